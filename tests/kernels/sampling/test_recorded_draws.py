"""A recorded draw gives the tokens, and counts, of the same draw made call by call."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from rekindle.buffers import DRAWN_ROWS
from rekindle.engine import sampler
from rekindle.engine.recorded_draws import GREEDY, OPEN, RecordedDraws
from rekindle.engine.sampler import uniform
from rekindle.engine.token_counts import TokenCounts
from rekindle.engine.types import Sampling
from rekindle.kernels.sampling import naive, triton
from rekindle.stages.graphs import GraphRecorder

VOCAB, WIDE = 181, 192  # ids that may be drawn, logits of a row
PROMPT = (1, 2, 3, 40, 50)


class Reruns:
    """Records on a GPU, elsewhere runs the step again; counts both."""

    def __init__(self, device: torch.device) -> None:
        self._graphs = GraphRecorder(device) if device.type == "cuda" else None
        self.recorded = 0
        self.replayed = 0

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1
        if self._graphs is not None:
            again = self._graphs(step)
        else:
            step()
            again = step

        def replay() -> None:
            self.replayed += 1
            again()

        return replay


@dataclass
class Row:
    sampling: Sampling
    position: int = 7
    tokens: tuple[int, ...] = (*PROMPT, 9, 9)
    prompt_length: int = len(PROMPT)
    drafted: tuple[int, ...] = ()
    in_block: bool = False
    token_counts: TokenCounts = field(default_factory=TokenCounts)
    mask: np.ndarray | None = None
    forced: int | None = None


@pytest.fixture(autouse=True)
def _small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "RUN", 64)
    monkeypatch.setattr(triton, "FINAL", 32)
    monkeypatch.setattr(triton, "OPEN_PART", 64)


@pytest.fixture(autouse=True)
def _by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler calls what it calls on a GPU."""
    for name in ("penalise", "keep_allowed", "argmax", "count_drawn"):
        monkeypatch.setattr(sampler, name, getattr(triton, name))

    def sample(logits: torch.Tensor, *settings: torch.Tensor) -> torch.Tensor:
        *others, uniforms = (each.cpu() for each in settings)
        return triton.sample(logits, torch.stack([x.float() for x in (*others, uniforms.clamp(max=1 - 2**-23))]))

    monkeypatch.setattr(sampler, "sample", sample)


def recorded(slots: int = 4) -> tuple[RecordedDraws, Reruns]:
    device = torch.zeros(1).device
    record = Reruns(device)
    return RecordedDraws(record, device, VOCAB, slots), record


def twin(row: Row) -> Row:
    """With counts of its own."""
    return replace(row, token_counts=TokenCounts())


def logits_of(rows: int) -> torch.Tensor:
    whole = torch.randn(rows, WIDE) * 3
    whole[:, VOCAB:] = 50.0  # a column that is no token
    return whole[:, :VOCAB]


def any_row(dice: random.Random, opens: bool, words: int) -> Row:
    greedy = not opens and dice.random() < 0.3
    drafted = tuple(dice.randrange(VOCAB) for _ in range(dice.choice((0, 0, 1, 15))))
    mask = None
    if dice.random() < 0.4:
        mask = np.frombuffer(dice.randbytes(4 * words), dtype=np.int32)
    return Row(
        Sampling(
            temperature=0.0 if greedy else dice.choice((0.3, 1.0, 1.7)),
            top_k=0 if opens else dice.randrange(1, 33),
            top_p=dice.choice((0.5, 0.8, 1.0)),
            min_p=dice.choice((0.0, 0.05)),
            repetition_penalty=dice.choice((1.0, 1.0, 1.3)),
            frequency_penalty=dice.choice((0.0, 0.0, 0.4)),
            presence_penalty=dice.choice((0.0, 1.5)),
            seed=dice.randrange(2**70) - 2**69,
        ),
        position=7 + len(drafted),
        drafted=drafted,
        in_block=bool(drafted),
        mask=mask,
        forced=dice.randrange(VOCAB) if dice.random() < 0.15 else None,
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_recorded_draw_gives_the_same_tokens_and_counts(seed: int) -> None:
    """One draw after the other over the same memory, with more and with fewer rows, of every kind."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    draws, record = recorded()
    for turn in range(5):
        opens = turn % 2 == 1
        count = dice.randrange(1, 4 if opens else 7)
        words = dice.choice((5, 6, 8))  # of a mask: fewer and more than the logits have, too
        rows = [any_row(dice, opens, words) for _ in range(count)]
        if turn == 4:  # the highest logit alone, after penalties and masks
            rows = [replace(row, sampling=replace(row.sampling, temperature=0.0)) for row in rows]
            rows[0].sampling = replace(rows[0].sampling, presence_penalty=1.5)
        logits = logits_of(count)
        if turn == 2:
            logits[0, 5] = torch.nan
        twins, before = [twin(row) for row in rows], record.replayed
        assert draws(logits, rows).tolist() == sampler.draw(logits, twins).tolist()
        assert record.replayed == before + 1
        for row, other in zip(rows, twins, strict=True):
            assert _counted(row) == _counted(other)


def _counted(row: Row) -> tuple[int, list[int] | None]:
    tensor = row.token_counts.tensor
    return row.token_counts._length, None if tensor is None else tensor.tolist()


def test_a_sequence_counts_what_it_draws_from_step_to_step() -> None:
    torch.manual_seed(3)
    draws, _ = recorded()
    settings = Sampling(temperature=1.0, top_k=20, presence_penalty=1.5, seed=5)
    rows, twins = [Row(settings)], [Row(settings)]
    for step in range(4):
        logits = logits_of(1)
        rows[0].position = twins[0].position = 7 + step
        assert draws(logits, rows).tolist() == sampler.draw(logits, twins).tolist()
    assert _counted(rows[0]) == _counted(twins[0])


def test_tokens_stay_while_others_are_drawn() -> None:
    torch.manual_seed(4)
    draws, _ = recorded()
    rows = [[Row(Sampling(top_k=20, seed=seed))] for seed in range(8)]
    logits = [logits_of(1) for _ in rows]
    drawn = [draws(each, row) for each, row in zip(logits, rows, strict=True)]
    wanted = [sampler.draw(each, row) for each, row in zip(logits, rows, strict=True)]
    assert [each.tolist() for each in drawn] == [each.tolist() for each in wanted]


@pytest.mark.parametrize(
    "rows",
    [
        [Row(Sampling(temperature=0.0))],  # the highest logit takes fewer launches than a selection
        [Row(Sampling(top_k=20, logit_bias={3: 5.0}))],
        [Row(Sampling(top_k=129))],
        [Row(Sampling(top_k=20)), Row(Sampling())],
        [Row(Sampling(top_k=20), drafted=(1,) * 16, position=23)],
        [Row(Sampling(seed=seed)) for seed in range(5)],  # more than have room for a copy of their logits
        [Row(Sampling(temperature=0.0, presence_penalty=1.0)) for _ in range(DRAWN_ROWS + 1)],
    ],
    ids=["greedy", "bias", "wide", "mixed", "drafted", "open", "rows"],
)
def test_what_is_not_recorded_is_drawn_call_by_call(rows: list[Row]) -> None:
    torch.manual_seed(6)
    draws, record = recorded()
    logits = logits_of(len(rows))
    assert draws(logits, [twin(row) for row in rows]).tolist() == sampler.draw(logits, rows).tolist()
    assert record.recorded == 0


def test_logits_that_lie_otherwise_are_drawn_call_by_call() -> None:
    draws, record = recorded()
    rows = [Row(Sampling(top_k=20)), Row(Sampling(top_k=20))]
    for logits in (torch.randn(2, VOCAB), logits_of(2).bfloat16(), torch.randn(2, VOCAB + 3)):
        assert draws(logits, [twin(row) for row in rows]).tolist() == sampler.draw(logits, rows).tolist()
    assert record.recorded == 0


def test_likely_draws_are_recorded_before_the_first() -> None:
    draws, record = recorded(slots=3)
    draws.make_ready()
    widths = [(1, OPEN), (1, GREEDY), (1, 32), (2, OPEN), (2, GREEDY), (2, 32), (3, OPEN), (4, GREEDY), (4, 32)]
    assert sorted(draws._replays) == widths
    torch.manual_seed(8)
    for sampling in (Sampling(top_k=20), Sampling(), Sampling(temperature=0, presence_penalty=1.5)):
        draws(logits_of(3), [Row(sampling)] * 3)
    assert (record.recorded, record.replayed) == (9, 3)


def test_one_row_is_recorded_however_long_it_is() -> None:
    """As a snapshot has it: no row lies behind it."""
    draws, record = recorded()
    row, logits = Row(Sampling(top_k=20)), torch.randn(VOCAB)[None]
    assert logits.stride(0) % 4, "rows of this length cannot lie side by side"
    assert draws(logits, [twin(row)]).tolist() == sampler.draw(logits, [row]).tolist()
    assert record.replayed == 1


def test_uniform_numbers_are_those_of_a_generator_set_to_the_position() -> None:
    for seed in (0, 7, -5, 2**64 - 1, 2**70 + 3):
        for position in (0, 1, 63, 64, 65, 4095, 262_143):
            generator = np.random.Generator(np.random.Philox(key=seed % 2**64, counter=position))
            assert uniform(seed, position) == float(generator.random())


def test_padding_reads_and_writes_nothing() -> None:
    """An order of zeros: no address is followed."""
    from rekindle.kernels.sampling import ordered

    block = torch.zeros(ordered.block_words(2, VOCAB, 2), dtype=torch.int64)
    for width in (16, OPEN, ordered.GREEDY):
        ordered.draw_ordered(ordered.parts_of(block, 2, VOCAB), VOCAB, width)
    assert not block.any()
    assert ordered.IN_PROMPT.value == naive.IN_PROMPT


def test_what_cannot_be_recorded_is_drawn_as_ever_and_not_tried_again() -> None:
    tries = list[int]()

    def record(step: Callable[[], None]) -> Callable[[], None]:
        tries.append(1)
        raise torch.cuda.OutOfMemoryError("no room")

    draws = RecordedDraws(record, torch.zeros(1).device, VOCAB, 4)
    row, logits = Row(Sampling(temperature=1.0, top_k=20, seed=3, presence_penalty=1.5)), logits_of(1)
    for _ in range(2):
        assert torch.equal(draws(logits, [twin(row)]), sampler.draw(logits, [twin(row)]))
    assert len(tries) == 1

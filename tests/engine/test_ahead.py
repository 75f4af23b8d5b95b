"""Blocks whose tokens the device knows before the host: verified without a wait, and the same as those it knows."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.paper_drafter import PaperReader
from support.snapshot_lab import PLENTY, Answer, Lab, RecordingCache, random_tokens

from rekindle.batch import PENDING, Ask, Batch, Segment, Wanted
from rekindle.engine import to_host
from rekindle.engine.ahead import Ahead, PassBehind, Stopwatch, launch_pass
from rekindle.engine.drafting import Draft, Drafts, Proposer
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.flight import Flight
from rekindle.engine.launch import pending_blocks
from rekindle.engine.results import Collector
from rekindle.engine.types import DraftReport, Sampling, Token
from rekindle.prefix import local_tiers
from rekindle.prompt import Prompt
from rekindle.speculative.cost import Costs
from rekindle.stages import Pipeline, StageOutput
from rekindle.stages.types import PendingTokens, Unseen

LENGTH, VOCAB = 40, 320
GREEDY, SEEDED = Sampling(temperature=0), Sampling(temperature=1.0, seed=5)
PENALISED = Sampling(temperature=1.0, seed=6, top_k=5, repetition_penalty=1.3, presence_penalty=0.5)
ALONE = Drafts(model="drafter", off=None)
CPU = torch.device("cpu")


class Reader(PaperReader):
    """Knows how texts go on. Its tokens stay where they are, in memory that every pass writes to, unless `ahead` is
    False."""

    def __init__(self, right: float, texts: Sequence[Sequence[int]], log: list[str], ahead: bool = True) -> None:
        super().__init__(right, (), VOCAB)
        self._texts, self._log, self.drafts_ahead = texts, log, ahead
        self._found = torch.zeros(4, 15, dtype=torch.int64)

    def propose(self, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        self._log.append("asked")
        return [tuple(self._drafted(ask)) for ask in asks]

    def propose_ahead(self, asks: Sequence[Ask]) -> torch.Tensor:
        self._log.append("pass")
        self._found.fill_(VOCAB - 1)
        for ask, found in zip(asks, self._found, strict=False):
            drafted = torch.tensor(self._drafted(ask))
            found[: len(drafted)] = drafted
        return self._found[: len(asks)]

    def _drafted(self, ask: Ask) -> list[int]:
        text = next(text for text in self._texts if text[ask.position] == ask.token)
        return [self._drafter.spoil(token) for token in text[ask.position + 1 : ask.position + 1 + ask.most]]


class ReaderBehind(Reader):
    """Goes on behind a block from what the target has drawn, before the host has read it. Of every 17th position it
    knows nothing, so that blocks are refused at the same places however wide they are."""

    def propose_behind(self, block: Unseen) -> torch.Tensor | None:
        self._log.append("behind")
        drafted, drawn = self._found[0, : block.drafted].tolist(), block.drawn.tolist()
        agreed = next((n for n, (a, b) in enumerate(zip(drafted, drawn, strict=False)) if a != b), block.drafted)
        taken = next((n for n, token in enumerate(drawn[:agreed]) if token in block.ends), agreed)
        position = block.position + 1 + taken
        self._found.fill_(VOCAB - 1)
        told = torch.tensor(self._drafted(Ask(block.slot, position, drawn[taken], 15)))
        self._found[0, : len(told)] = told
        return self._found[:1]

    def note_behind(self, slot: int, position: int | None) -> None:
        self._log.append("for nothing" if position is None else "as assumed")

    def _drafted(self, ask: Ask) -> list[int]:
        text = next(text for text in self._texts if text[ask.position] == ask.token)
        said = range(ask.position + 1, min(len(text), ask.position + 1 + ask.most))
        return [text[at] if at % 17 else (text[at] + 1) % VOCAB for at in said]


class Logged(Pipeline):
    """Says what it is given."""

    def __init__(self, stages: Sequence[Any], log: list[str], **fields: Any) -> None:
        super().__init__(stages, **fields)
        self._log = log

    def forward(self, batch: Batch, pending: PendingTokens | None = None) -> Future[StageOutput]:
        blocks = [segment for segment in batch.segments if len(segment) > 1]
        if batch.rewindable and blocks:
            self._log.append("unseen" if all(PENDING in segment.tokens for segment in blocks) else "known")
        return super().forward(batch, pending)

    def rewind(self, slot: int, position: int) -> None:
        self._log.append("back")
        super().rewind(slot, position)


@pytest.fixture(scope="module", params=["dense", "moe"])
def lab(request: Any, make_tiny: Any) -> Lab:
    return Lab(make_tiny(request.param), recorded=True)


def prompt(seed: int = 1, length: int = 100) -> Prompt:
    return Prompt(random_tokens(length, seed))


def plain(lab: Lab, asked: Prompt, sampling: Sampling = GREEDY) -> list[int]:
    engine = lab.engine(ram=0)
    tokens = Answer(engine, asked, sampling, max_tokens=LENGTH).tokens
    engine.stop()
    return tokens


def drafting(lab: Lab, texts: Sequence[Sequence[int]], log: list[str], right: float = 0.7, **fields: Any) -> Engine:
    ahead, measured, kind = fields.pop("ahead", True), fields.pop("measured", False), fields.pop("reader", Reader)
    pipeline = Logged([lab.stage()], log, drafter=kind(right, texts, log, ahead))
    settings = EngineSettings(context=2048, grid=64, drafts=ALONE, async_steps=1, measure_drafts=measured)
    return Engine(pipeline, RecordingCache(local_tiers(PLENTY)), settings).start()


def outcome(report: DraftReport) -> tuple[Any, ...]:
    return report.blocks, report.proposed, report.accepted, report.positions


@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_blocks_that_the_host_does_not_know_are_those_that_it_knows(lab: Lab, right: float, sampling: Sampling) -> None:
    """Tokens, blocks, what was accepted of each place, and the state that is captured behind them."""
    asked, found = prompt(), {}
    expected = plain(lab, asked, sampling)
    for ahead in (True, False):
        log = list[str]()
        engine = drafting(lab, [[*asked.tokens, *expected]], log, right, ahead=ahead)
        answer = Answer(engine, asked, sampling, max_tokens=LENGTH)
        assert answer.tokens == expected
        engine.stop()
        assert isinstance(engine.prefixes, RecordingCache)
        found[ahead] = outcome(answer.finished.draft), log.count("back"), engine.prefixes.seen[-1]
        assert set(log) >= ({"pass", "unseen"} if ahead else {"asked", "known"})
        assert not set(log) & ({"asked", "known"} if ahead else {"pass", "unseen"})
    assert found[True][:2] == found[False][:2]
    ours, theirs = found[True][2], found[False][2]
    assert ours.tokens.tolist() == theirs.tokens.tolist() and ours.stretches == theirs.stretches
    pairs = zip(ours.parts, theirs.parts, strict=True)
    assert all(torch.equal(a.tensors[name], b.tensors[name]) for a, b in pairs for name in a.tensors)


def test_nobody_waits_between_a_pass_and_the_step_that_verifies_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between them nothing is read from the device; and the client gets a block's tokens when the next step runs."""
    asked, log = prompt(), list[str]()
    expected = plain(lab, asked)
    take = to_host.OnHost.take

    def logged(self: Any, read: Any) -> Any:
        if threading.current_thread().name == "engine":  # another thread waits for captured logits
            log.append("wait")
        return take(self, read)

    monkeypatch.setattr(to_host.OnHost, "take", logged)
    engine = drafting(lab, [[*asked.tokens, *expected]], log)
    answer = Answer(engine, asked, at_token=lambda _: log.append("token"), max_tokens=LENGTH)
    assert answer.tokens == expected
    engine.stop()
    passes = [at for at, entry in enumerate(log) if entry == "pass"]
    assert len(passes) > 3
    assert all(log[at + 1] == "unseen" for at in passes), log
    back = [at for at, entry in enumerate(log) if entry == "back" and "pass" in log[at:]]
    follows = [next(entry for entry in log[at:] if entry in ("pass", "token")) for at in back]
    assert "pass" in follows, "tokens of a block are held until what follows it was launched"


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_next_block_is_drafted_before_the_host_knows_what_is_accepted(lab: Lab, sampling: Sampling) -> None:
    """The same tokens, blocks and snapshots as where every pass waits for that."""
    asked, found = prompt(), {}
    expected = plain(lab, asked, sampling)
    text = [*asked.tokens, *expected, *range(20)]
    for reader in (ReaderBehind, type("Waits", (ReaderBehind,), {"propose_behind": Reader.propose_behind})):
        log = list[str]()
        engine = drafting(lab, [text], log, reader=reader)
        answer = Answer(engine, asked, sampling, max_tokens=LENGTH)
        assert answer.tokens == expected
        engine.stop()
        assert isinstance(engine.prefixes, RecordingCache)
        found[reader] = outcome(answer.finished.draft), engine.prefixes.seen[-1].tokens.tolist(), log
    (ours, kept, log), (theirs, also_kept, waits) = found.values()
    assert (ours, kept) == (theirs, also_kept)
    assert waits.count("pass") == waits.count("unseen") and "behind" not in waits
    used = log.count("unseen") - log.count("pass")
    assert used > 1 and log.count("behind") <= used + 1 and "for nothing" not in log
    assert all(log[at - 1] == "unseen" for at, entry in enumerate(log) if entry == "behind"), "the device is busy then"


@pytest.mark.parametrize(("asked", "goes"), [((0,), True), ((0, 1), False)], ids=["alone", "of two"])
def test_no_pass_goes_behind_one_of_two_blocks(asked: tuple[int, ...], goes: bool) -> None:
    """Two sequences share a pass, and pages are short for one of them: the other's block does not lie where that of the
    only one would."""
    found = torch.zeros(2, 3, dtype=torch.int64)
    ahead = Ahead(found[: len(asked)], [Ask(slot, 8, 4, 3) for slot in asked], 0.0, Stopwatch(CPU))
    request = SimpleNamespace(stop_when=None, ends=frozenset({7}))
    owner = SimpleNamespace(request=request, max_tokens=40, answer_length=3)
    flight = Flight.__new__(Flight)
    flight.batch = Batch((Segment(0, 8, (4, PENDING, PENDING, PENDING), Wanted.ALL),), rewindable=True)
    flight.owners, flight.ahead, flight.failures = (owner,), ahead, {}  # type: ignore[assignment]
    flight.drawn = to_host.DrawnTokens(torch.zeros(4, dtype=torch.int64))
    assert (flight.unseen is not None) == goes


@pytest.mark.parametrize("how", ["cancelled", "a token that ends it", "its length", "a stop string"])
def test_an_end_behind_which_a_block_was_drafted_leaves_nothing_behind(lab: Lab, how: str) -> None:
    asked, log = prompt(), list[str]()
    expected = plain(lab, asked)
    engine = drafting(lab, [[*asked.tokens, *expected, *range(20)]], log, reader=ReaderBehind)
    if how == "cancelled":
        first = Answer(engine, asked, at_token=lambda n: n == 17 and engine.cancel(first.id), max_tokens=LENGTH)
        assert 17 <= len(first.tokens) < LENGTH and first.tokens == expected[: len(first.tokens)]
    elif how == "a token that ends it":
        ends = frozenset({expected[22]})
        first = Answer(engine, asked, max_tokens=LENGTH, stop_tokens=ends)
        assert first.tokens == expected[: expected.index(expected[22])]
    elif how == "its length":
        assert Answer(engine, asked, max_tokens=23).tokens == expected[:23]
    else:
        seen = list[int]()
        stop_when = lambda token: len(seen) == 21 or seen.append(token)  # noqa: E731
        assert Answer(engine, asked, stop_when=stop_when, max_tokens=LENGTH).tokens == expected[:22]
        assert "behind" not in log, "the host alone can say where such an answer ends"
    assert Answer(engine, asked, max_tokens=LENGTH).tokens == expected
    engine.stop()
    assert engine.status().pages.used == 0 and "behind" in log


def test_penalties_and_several_sources_go_the_old_way(lab: Lab) -> None:
    """Draws with penalties count the tokens of the block, so the host has to know them."""
    asked, log = prompt(), list[str]()
    expected = plain(lab, asked, PENALISED)
    engine = drafting(lab, [[*asked.tokens, *expected]], log)
    assert Answer(engine, asked, PENALISED, max_tokens=LENGTH).tokens == expected
    engine.stop()
    assert "known" in log and "pass" not in log and "unseen" not in log


@pytest.mark.parametrize("drafts", [Drafts(), ALONE], ids=["drafts nothing", "drafts"])
def test_beside_penalties_blocks_are_known_before_they_are_verified(lab: Lab, drafts: Drafts) -> None:
    """Of one step the host knows all blocks, or none."""
    asked, log = [prompt(seed, 80 + seed) for seed in range(2)], list[str]()
    expected = [plain(lab, each, how) for each, how in zip(asked, (SEEDED, PENALISED), strict=True)]
    texts = [[*each.tokens, *tokens] for each, tokens in zip(asked, expected, strict=True)]
    engine = drafting(lab, texts, log)
    answers = [Answer(engine, asked[0], SEEDED, max_tokens=LENGTH)]
    engine.settings = replace(engine.settings, drafts=drafts)
    answers.append(Answer(engine, asked[1], PENALISED, max_tokens=LENGTH))
    assert [answer.tokens for answer in answers] == expected
    engine.stop()
    assert "known" in log


def test_sequences_share_a_pass_and_a_step(lab: Lab) -> None:
    asked, log = [prompt(seed, 80 + seed) for seed in range(3)], list[str]()
    expected = [plain(lab, each, SEEDED) for each in asked]
    texts = [[*each.tokens, *tokens] for each, tokens in zip(asked, expected, strict=True)]
    engine = drafting(lab, texts, log)
    answers = [Answer(engine, each, SEEDED, max_tokens=LENGTH) for each in asked]
    assert [answer.tokens for answer in answers] == expected
    assert all(answer.finished.draft.blocks for answer in answers)
    engine.stop()
    assert "unseen" in log and "asked" not in log


@pytest.mark.parametrize("how", ["cancelled", "a token that ends it"])
def test_an_end_while_a_block_is_under_way_leaves_nothing_behind(lab: Lab, how: str) -> None:
    asked, log = prompt(), list[str]()
    expected = plain(lab, asked)
    engine = drafting(lab, [[*asked.tokens, *expected]], log, right=1.0)
    if how == "cancelled":
        first = Answer(engine, asked, at_token=lambda n: n == 7 and engine.cancel(first.id), max_tokens=LENGTH)
        assert 7 <= len(first.tokens) < LENGTH and first.tokens == expected[: len(first.tokens)]
    else:
        seen = list[int]()
        first = Answer(engine, asked, stop_when=lambda token: len(seen) == 6 or seen.append(token), max_tokens=LENGTH)
        assert first.tokens == expected[:7]
    assert Answer(engine, asked, max_tokens=LENGTH).tokens == expected
    engine.stop()
    assert engine.status().pages.used == 0 and log.count("unseen") > 2


def test_a_pass_behind_a_block_is_for_the_step_after_it_and_for_that_sequence() -> None:
    tokens, asks = torch.zeros(1, 4, dtype=torch.int64), [Ask(1, 9, 5, 3)]
    made = lambda: PassBehind(1, tokens, 0.0, Stopwatch(CPU))  # noqa: E731
    behind = made()
    assert behind.ahead(asks) is None, "nobody knows yet what was accepted"
    behind.note(9, 5)
    for other in (Ask(2, 9, 5, 3), Ask(1, 8, 5, 3), Ask(1, 9, 6, 3)):
        assert behind.ahead([other]) is None and not behind.used
    assert behind.ahead(asks) is not None and behind.used
    passes = list[str]()
    proposer = Proposer(lambda asks: [], None, lambda asks: passes.append("pass"), lambda block: made())
    proposer.go_on(Unseen(1, 4, 3, tokens[0], frozenset()))
    assert proposer.propose([]).tokens == [] and proposer._behind is not None
    proposer.propose([Resting()])
    assert proposer._behind is None, "a step went by without it"


class Resting:
    """A sequence that drafts nothing now."""

    in_flight, verifies_unseen, draft = 0, True, Draft()

    def propose(self) -> tuple[int, ...]:
        return ()

    def admit(self, drafted: tuple[int, ...]) -> tuple[int, ...]:
        return drafted

    def ask(self) -> None:
        return None


def test_while_a_block_is_chosen_the_device_stands_still_at_its_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step came back at 10, and this one was launched at 12; it is 15 now. A plain step was ready before."""
    monkeypatch.setattr("rekindle.engine.results.time.monotonic", lambda: 15.0)
    noted = list[tuple[int, float]]()
    collector = Collector.__new__(Collector)
    collector._pace, collector._costs, collector._behind, collector._was_over = None, Costs(), None, False
    monkeypatch.setattr(Costs, "note_step", lambda self, sequences, rows, seconds: noted.append((rows, seconds)))
    owner = SimpleNamespace(decoding=True)
    for tokens in ((1,), (1, 2, 3)):
        collector._last_back = 10.0
        batch = Batch((Segment(0, 4, tokens, Wanted.ALL),), rewindable=len(tokens) > 1)
        flight = SimpleNamespace(
            batch=batch, owners=(owner,), launched=12.0, began=12.0, ahead=None, behind=None, behind_chunk=False
        )
        collector._note_pace(flight, False)  # type: ignore[arg-type]
    assert noted == [(1, 3.0), (3, 5.0)]
    collector._behind = PassBehind(0, torch.zeros(1, 4), 0.0, Stopwatch(CPU))
    collector._note_pace(flight, False)  # type: ignore[arg-type]
    assert len(noted) == 2, "a step that has waited for a pass which nobody uses says nothing"
    flight.behind_chunk, collector._behind = True, None
    collector._note_pace(flight, False)  # type: ignore[arg-type]
    assert len(noted) == 2, "nor one behind the rest of a chunk"


def test_a_pass_is_timed_apart_from_the_step_behind_it(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    passes, steps = list[float](), list[float]()
    monkeypatch.setattr(Stopwatch, "seconds", lambda self: 1e6)
    monkeypatch.setattr(Costs, "note_pass", lambda self, drafted, seconds: passes.append(seconds))
    monkeypatch.setattr(Costs, "note_step", lambda self, sequences, rows, seconds: steps.append(seconds))
    monkeypatch.setattr(Costs, "knows_plain", True)
    asked, log = prompt(), list[str]()
    engine = drafting(lab, [[*asked.tokens, *plain(lab, asked)]], log, right=1.0, measured=True)
    Answer(engine, asked, max_tokens=LENGTH).wait()
    engine.stop()
    assert passes == [1e6] * log.count("pass") and passes
    assert max(steps) < 100 and min(steps) == 0.0


def test_a_client_that_fails_over_a_held_token_is_cancelled(lab: Lab) -> None:
    asked, log = prompt(), list[str]()
    expected = plain(lab, asked)
    engine = drafting(lab, [[*asked.tokens, *expected]], log, right=1.0)

    def fail(count: int) -> None:
        if count == 9:
            raise RuntimeError("gone")

    answer = Answer(engine, asked, at_token=fail, max_tokens=LENGTH)
    assert answer.finished.reason == "cancelled"
    assert [event.token for event in answer.events if isinstance(event, Token)] == expected[: len(answer.tokens)]
    engine.stop()


# Pieces


def test_rows_of_blocks_take_what_was_drafted_for_their_slot() -> None:
    asks = [Ask(5, 10, 1, 3), Ask(2, 20, 1, 4)]
    ahead = launch_pass(lambda _: torch.arange(100, 108).view(2, 4), asks, CPU)
    assert isinstance(ahead, Ahead) and ahead.counts == [3, 4]
    row, two = Segment(7, 3, (9,), Wanted.LAST), Segment(2, 20, (1, PENDING, PENDING), Wanted.ALL)
    three = Segment(5, 10, (1, PENDING, PENDING, PENDING), Wanted.ALL)
    pending = pending_blocks(Batch((row, two, three), rewindable=True), ahead)
    assert pending is not None
    taken = dict(zip(pending.rows, pending.tokens[list(pending.sources)].tolist(), strict=True))
    assert taken == {2: 104, 3: 105, 5: 100, 6: 101, 7: 102}
    assert pending.runs() == [(2, 4, 2), (5, 0, 3)]
    assert pending_blocks(Batch((row,)), ahead) is None
    assert ahead.known(2) == [104, 105, 106, 107]
    assert launch_pass(lambda _: None, asks, CPU) is None


@pytest.mark.parametrize(
    ("rows", "sources", "runs"),
    [
        ((), (), []),
        ((0, 1, 2), (0, 1, 2), [(0, 0, 3)]),
        ((0, 1, 2), (0, 2, 3), [(0, 0, 1), (1, 2, 2)]),
        ((0, 2, 3), (1, 2, 0), [(0, 1, 1), (2, 2, 1), (3, 0, 1)]),
    ],
)
def test_tokens_that_follow_one_another_are_one_run(
    rows: tuple[int, ...], sources: tuple[int, ...], runs: list[tuple[int, int, int]]
) -> None:
    assert PendingTokens(torch.zeros(4), rows, sources).runs() == runs

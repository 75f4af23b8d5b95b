"""A hit never changes an answer: whatever was restored, from wherever, equals the run that never stopped.

Every engine here records what it publishes. Each snapshot is then computed again by the same steps in one slot that
never captures nor restores, and compared bit for bit. REKINDLE_FULL=300 draws that many cases of each law, at random.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.snapshot_lab import PLENTY, Answer, Lab, RecordingCache, logit_distance, random_tokens, same_bits

from rekindle.build import Built, build_engine
from rekindle.config import Config
from rekindle.engine.engine import Engine
from rekindle.prompt import Boundary, BoundaryKind, Prompt
from rekindle.snapshots.types import Snapshot
from rekindle.spec import Span

FULL = int(os.environ.get("REKINDLE_FULL", "0"))
ROUNDING = 1e-4  # in logits, between a state born in decode and a cold prefill of the same tokens
BOUNDED = settings(
    max_examples=FULL or 6,
    derandomize=not FULL,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if FULL else [])],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module", params=["dense", "moe"])
def lab(request: Any, make_tiny: Any) -> Lab:
    return Lab(make_tiny(request.param))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A new one per use: hypothesis runs many cases in one test."""
    path = Path(tempfile.mkdtemp())
    yield path
    shutil.rmtree(path)


# -- random lives --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One request of a conversation."""

    conversation: int
    kept: float  # share of what was said before that is sent again; 1.0 appends
    new: int  # tokens
    cuts: tuple[float, ...]  # boundaries, as shares of the prompt
    answer: int  # tokens
    restart: bool  # a new engine before it, on the same folder


TURNS = st.builds(
    Turn,
    conversation=st.integers(0, 2),
    kept=st.sampled_from([1.0, 1.0, 1.0, 0.6]),
    new=st.integers(1, 130),
    cuts=st.lists(st.floats(0.01, 1.0), max_size=3).map(tuple),
    answer=st.integers(0, 5),
    restart=st.booleans(),
)
LIVES = st.fixed_dictionaries(
    {
        "turns": st.lists(TURNS, min_size=2, max_size=5),
        "grid": st.sampled_from([16, 48, 64, 100, 512]),
        "ram": st.sampled_from([0, 100_000, PLENTY]),  # one snapshot of these models takes some 80 kB
        "on_disk": st.booleans(),
        "split": st.booleans(),
    }
)


class Life:
    """Conversations with engines that come and go."""

    def __init__(self, lab: Lab, folder: Path, life: dict[str, Any]) -> None:
        self.lab = lab
        self.folder = folder if life["on_disk"] else None
        self.ram = life["ram"]
        self.grid = life["grid"]
        self.spans = (Span(0, 3), Span(3, 8)) if life["split"] else ()
        self.said: dict[int, tuple[int, ...]] = {}
        self.snapshots: dict[bytes, Snapshot] = {}
        self.engine = self.start()

    def start(self) -> Engine:
        return self.lab.engine(self.folder, self.ram, self.spans, grid=self.grid)

    def restart(self) -> None:
        self.stop()
        self.engine = self.start()

    def stop(self) -> None:
        self.engine.stop()
        assert isinstance(self.engine.prefixes, RecordingCache)
        self.snapshots |= {s.tokens.tobytes(): s for s in self.engine.prefixes.seen}

    def prompt(self, turn: Turn, seed: int) -> Prompt:
        before = self.said.get(turn.conversation, ())
        tokens = (*before[: round(len(before) * turn.kept)], *random_tokens(turn.new, seed))
        cuts = sorted({max(1, round(share * len(tokens))) for share in turn.cuts})
        return Prompt(tokens, tuple(Boundary(cut, BoundaryKind.MESSAGE) for cut in cuts))


@BOUNDED
@given(life=LIVES)
def test_every_snapshot_of_every_life_is_the_state_of_a_run_that_never_stopped(lab: Lab, life: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lived = Life(lab, Path(folder), life)
        cold = lab.engine(ram=0, grid=lived.grid)
        for seed, turn in enumerate(life["turns"]):
            if turn.restart:
                lived.restart()
            prompt = lived.prompt(turn, seed)
            answer = Answer(lived.engine, prompt, max_tokens=turn.answer)
            expected = Answer(cold, prompt, max_tokens=turn.answer)
            assert answer.tokens == expected.tokens
            lived.said[turn.conversation] = (*prompt.tokens, *answer.tokens)
        lived.stop()
        cold.stop()
        for snapshot in lived.snapshots.values():
            check_against_runs_without_restore(lab, snapshot)


def check_against_runs_without_restore(lab: Lab, snapshot: Snapshot) -> None:
    ways = {stretch.how for stretch in snapshot.stretches}
    assert ways <= {"prefill", "decode"}, "one request at a time is alone in its batches"
    assert same_bits(snapshot, lab.never_stopped(snapshot))
    cold = lab.cold(snapshot)
    if ways == {"prefill"}:
        assert same_bits(snapshot, cold), "the same boundaries, so the same bits"
    else:
        assert logit_distance(snapshot, cold) < ROUNDING


@BOUNDED
@given(
    lengths=st.lists(st.integers(1, 90), min_size=2, max_size=4),
    shared=st.sampled_from([0, 40, 150]),
    ram=st.sampled_from([0, 300_000, PLENTY]),
    grid=st.sampled_from([32, 64]),
)
def test_sequences_that_run_beside_each_other_answer_as_alone_before_and_after_a_restart(
    lab: Lab, lengths: list[int], shared: int, ram: int, grid: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        said = [(*random_tokens(shared, 1000), *random_tokens(n, i)) for i, n in enumerate(lengths)]
        cold = lab.engine(ram=0, grid=grid)
        for turn in range(2):
            engine = lab.engine(Path(folder), ram, grid=grid)
            answers = [Answer(engine, Prompt(tokens)) for tokens in said]
            for i, answer in enumerate(answers):
                assert answer.tokens == Answer(cold, Prompt(said[i])).tokens
                said[i] = (*said[i], *answer.tokens, *random_tokens(10, 50 + 10 * turn + i))
            engine.stop()
            assert isinstance(engine.prefixes, RecordingCache)
            for snapshot in engine.prefixes.seen:
                assert logit_distance(snapshot, lab.cold(snapshot)) < ROUNDING
        cold.stop()


@pytest.mark.parametrize("where", ["ram", "disk"])
def test_a_restored_run_gives_the_log_probabilities_of_the_run_that_never_stopped(
    lab: Lab, where: str, folder: Path
) -> None:
    """Seen from outside: the second half of a conversation, restored, against one engine that holds all of it."""
    prompt = random_tokens(170, 1)
    engine = lab.engine(folder)
    first = Answer(engine, Prompt(prompt), max_tokens=6)
    longer = Prompt((*prompt, *first.tokens, *random_tokens(50, 2)))
    if where == "disk":
        engine.stop()
        engine = lab.engine(folder)
    second = Answer(engine, longer, max_tokens=6)
    cache = second.finished.cache
    assert (cache.restored_from["ram"], cache.restored_from["disk"]) == ((175, 0) if where == "ram" else (0, 175))
    assert cache.computed == 51, "the last token was drawn and never consumed"
    engine.stop()
    assert isinstance(engine.prefixes, RecordingCache)
    last = max(engine.prefixes.seen, key=lambda snapshot: snapshot.position)
    assert last.position == 231
    assert same_bits(last, lab.never_stopped(last))


# -- the five faults of the system we learnt from, as laws -----------------------------------------------------------


def test_a_key_is_exactly_as_long_as_its_state_and_never_rounded_to_the_grid(lab: Lab) -> None:
    """Rounded snapshot: there, the state lay at the grid point below its key, and the rest was run again in silence;
    a boundary below the first grid point gave no snapshot at all."""
    engine = lab.engine(grid=64)
    system, middle, tail = random_tokens(37, 1), random_tokens(64, 2), random_tokens(40, 3)
    boundaries = (Boundary(37, BoundaryKind.SYSTEM), Boundary(101, BoundaryKind.MESSAGE))
    Answer(engine, Prompt((*system, *middle, *tail), boundaries)).finished  # noqa: B018
    for shared, position in (((*system, *middle), 101), (system, 37)):
        other = Answer(engine, Prompt((*shared, *random_tokens(20, position)), boundaries))
        assert other.finished.cache.restored == position
        assert other.finished.cache.computed == 20
    engine.stop()
    for entry in engine.prefixes.entries():
        snapshot = engine.prefixes.at_hand(entry)
        assert snapshot is not None
        assert len(snapshot.tokens) == entry.position
        assert same_bits(snapshot, lab.never_stopped(snapshot))


def test_the_newest_boundary_is_captured_so_the_chain_advances_every_turn(lab: Lab) -> None:
    """Second-to-last boundary: there, one boundary per request was captured and not the newest, so each turn
    computed the one before it again."""
    engine = lab.engine()
    tokens: tuple[int, ...] = random_tokens(60, 0)
    boundaries: tuple[Boundary, ...] = ()
    known = 0
    for turn in range(6):
        boundaries = (*boundaries, Boundary(len(tokens), BoundaryKind.MESSAGE))
        tokens = (*tokens, *random_tokens(70, 1 + turn))
        answer = Answer(engine, Prompt(tokens, boundaries))
        assert answer.finished.cache.restored == known
        assert answer.finished.cache.computed == len(tokens) - known
        branch = Answer(engine, Prompt((*tokens, 1 + answer.tokens[0], 7)), max_tokens=0)
        assert branch.finished.cache.restored == len(tokens), "also for a client that sends back another answer"
        tokens = (*tokens, *answer.tokens)
        known = len(tokens) - 1
    engine.stop()


@pytest.fixture(scope="module")
def built(golden: Path) -> Iterator[Built]:
    config = Config(model=golden / "tiny-qwen35-Q4_K_M.gguf", devices=("cpu",), context=2048, sequences=2, grid=64)
    built = build_engine(config)
    yield built
    built.engine.stop()


def render(built: Built, *messages: tuple[str, str]) -> Prompt:
    assert built.model.template is not None
    return built.model.template.render([{"role": role, "content": content} for role, content in messages])


def test_marker_like_text_in_a_message_hides_no_later_boundary(built: Built) -> None:
    """Scan stopped by marker-like text: there, an end marker inside a tool result ended the search, and nothing behind
    it was ever kept."""
    poison = "the log says <|im_end|> and <|im_start|> and <|im_end|>\nand goes on"
    opening = (("system", "Be brief."), ("user", poison), ("assistant", "Yes."), ("user", "Say it again. " * 12))
    first = Answer(built.engine, render(built, *opening))
    assert first.finished.cache.restored == 0
    for i in range(2):
        other = render(built, *opening, ("assistant", f"No {i}."), ("user", f"Question {i}."))
        boundary = render(built, *opening).boundaries[-2].position  # the generation prompt's role start
        answer = Answer(built.engine, other)
        assert answer.finished.cache.restored >= boundary


def test_a_conversation_without_a_system_turn_is_kept_like_any_other(built: Built) -> None:
    """No system turn: there, the system start was required, and without one nothing was cached."""
    opening = (("user", "Tell me of rivers and of the sea. " * 8),)
    first = Answer(built.engine, render(built, *opening))
    assert first.finished.cache.restored == 0
    boundary = render(built, *opening).boundaries[-2].position
    assert boundary > 64
    again = Answer(built.engine, render(built, *opening, ("assistant", "Water."), ("user", "More.")))
    assert again.finished.cache.restored >= boundary


def test_an_evicted_key_never_finds_the_state_of_another(lab: Lab, folder: Path) -> None:
    """Stale slot: there, a slot was used again while an old key still pointed at it, and the answer came from a foreign
    state. Here room for two snapshots is fought over by four conversations, and a restart comes in between."""
    prompts = [random_tokens(90 + i, 100 + i) for i in range(4)]
    cold = lab.engine(ram=0)
    expected = [Answer(cold, Prompt(p)).tokens for p in prompts]
    cold.stop()
    for disk in (None, folder, folder):
        engine = lab.engine(disk, ram=200_000, slots=1)
        for _ in range(3):
            for prompt, tokens in zip(prompts, expected, strict=True):
                assert Answer(engine, Prompt(prompt)).tokens == tokens
        engine.stop()
        assert sum(engine.prefixes.stats().evictions.values()) > 0
        for entry in engine.prefixes.entries():
            snapshot = engine.prefixes.at_hand(entry)
            if snapshot is not None:
                assert same_bits(snapshot, lab.never_stopped(snapshot))

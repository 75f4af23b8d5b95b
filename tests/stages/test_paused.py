"""A chunk that pauses between its layers for others' steps: no bit depends on where it pauses, or on what runs then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.answers import Answer
from support.lending_stages import WIDE, lending_stage, poisoned
from support.snapshot_lab import Lab, RecordingCache, random_tokens, same_bits, wait_until
from support.stage_life import LONGEST, SLOTS, TOKENS, StageLife

from rekindle.batch import Batch, Segment, Wanted
from rekindle.engine.engine import Engine
from rekindle.engine.flight import ChunkSection
from rekindle.engine.pace import Pace
from rekindle.layers import span
from rekindle.layers.span import LEAST_CUT, LEAST_LAYERS
from rekindle.prompt import Prompt
from rekindle.stages import LocalStage
from rekindle.stages.paused import PausedForward


@pytest.fixture(scope="module", autouse=True)
def short_sections() -> Iterator[None]:
    """Two layers each, also of chunks of a hundred rows; in the engine one at a time, however long steps take here."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(span, "SECTION", 0)
        patched.setattr(Pace, "sections", lambda self, rows, sections, waiting=1: 1)
        yield


def again(step: Callable[[], None], warm: Callable[[], None] | None = None) -> Callable[[], None]:
    """Records by keeping the step."""
    (warm or step)()
    return step


RECORDED: dict[str, Any] = {"table_width": 10, "record": again}


class PausedLife(StageLife):
    """The first of the stages runs chunks in sections; the other runs them whole."""

    def __init__(self, stages: list[LocalStage]) -> None:
        self.begun: tuple[int, PausedForward, torch.Tensor | None] | None = None
        super().__init__(stages)

    def begin(self, slot: int, count: int) -> None:
        """A chunk of the slot, unless one is under way."""
        self.open(slot)
        at = self.positions[slot]
        count = min(count, LONGEST - at)
        if self.begun is None and count > 0:
            batch = Batch((Segment(slot, at, tuple(TOKENS[at : at + count]), Wanted.LAST),))
            whole = self.stages[1].forward(batch, None).logits
            self.begun = slot, self.stages[0].begin(batch), whole
            self.positions[slot] = at + count

    def go_on(self, slot: int, count: int) -> None:
        if self.begun is not None:
            _, forward, _ = self.begun
            forward.go_on(1 + count % 2)
            if not forward.left:
                self.finish()

    def finish(self) -> None:
        if self.begun is not None:
            (_, forward, whole), self.begun = self.begun, None
            logits = forward.result().logits
            assert logits is not None and whole is not None and torch.equal(logits, whole)

    def close(self, slot: int, count: int = 0) -> None:
        """Also of a slot whose chunk is under way, which then comes to nothing."""
        if self.begun is not None and self.begun[0] == slot:
            self.begun = None
        super().close(slot)

    def run(self, slot: int, count: int, rewindable: bool = False) -> None:
        self._let_end(slot)
        super().run(slot, count, rewindable)

    def decode(self, slot: int, count: int) -> None:
        """A row of every slot but the one whose chunk is under way: its state is not there yet."""
        busy = self.begun[0] if self.begun is not None else None
        position = None if busy is None else self.positions.pop(busy)
        super().decode(slot, count)
        if busy is not None and position is not None:
            self.positions[busy] = position

    def rewind(self, slot: int, count: int) -> None:
        self._let_end(slot)
        super().rewind(slot, count)

    def restore(self, slot: int, count: int) -> None:
        self._let_end(count % SLOTS)
        super().restore(slot, count)

    def _let_end(self, slot: int) -> None:
        if self.begun is not None and self.begun[0] == slot:
            self.finish()

    def begin_row(self, slot: int, count: int) -> None:
        """A chunk of one row, as where a prompt ends one token behind an edge: a decode step serves it."""
        self.begin(slot, 1)


KINDS = ["begin_row", *["begin"] * 3, *["go_on"] * 5, *["decode"] * 4, "run", "open", "restore", "rewind", "close"]
Move = tuple[str, int, int]  # what, for which slot, how much
MOVES = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, SLOTS - 1), st.integers(1, 250)), min_size=15, max_size=50
)
STAGES: dict[str, dict[str, Any]] = {
    "all fits": {"pages": 40},
    "pages leave the device": {"pages": 8, "host_pages": 22},
    "sparse": {"pages": 8, "host_pages": 22, "kv_mode": "sparse"},
    "slots are lent": {"places": 8, "host_pages": 22},
    "experts are lent": {"places": 8, "host_pages": 22, "lendable": 3},
}


@pytest.fixture(scope="module", params=STAGES)
def pair(request: Any, make_tiny: Any) -> list[LocalStage]:
    options = {**RECORDED, **STAGES[request.param]}
    if "places" in options:
        kind = {"moe_intermediate_size": 256} if "lendable" in options else {}
        tiny = make_tiny("moe" if kind else "dense", **kind, **WIDE)
        return [poisoned(lending_stage(tiny, **options)), poisoned(lending_stage(tiny, **options))]
    tiny = make_tiny("dense")
    return [tiny.stage(slots=SLOTS, **options), tiny.stage(slots=SLOTS, **options)]


@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(moves=MOVES)
def test_no_bit_changes_whatever_runs_between_the_sections(pair: list[LocalStage], moves: list[Move]) -> None:
    life = PausedLife(pair)
    for kind, slot, count in moves:
        getattr(life, kind)(slot, count)
    life.finish()
    life.compare()
    for stage in pair:
        stage.check()


@pytest.fixture
def stage(make_tiny: Any) -> LocalStage:
    made: LocalStage = make_tiny("dense").stage(slots=SLOTS, pages=40, **RECORDED)
    return made


def chunk(slot: int, rows: int) -> Batch:
    return Batch((Segment(slot, 0, tuple(TOKENS[:rows]), Wanted.LAST),))


def row(slot: int, at: int) -> Batch:
    return Batch((Segment(slot, at, (TOKENS[at],), Wanted.LAST),))


def test_sections_have_so_many_layers_that_all_take_about_as_long(stage: LocalStage, monkeypatch: Any) -> None:
    monkeypatch.setattr(span, "SECTION", 512)
    sizes = {rows: [len(layers) for layers in stage.model.sections(rows)] for rows in (LEAST_CUT, 128, 512, 2048, 4096)}
    two = [LEAST_LAYERS] * 4
    assert sizes == {LEAST_CUT: [8], 128: [4, 4], 512: two, 2048: two, 4096: [1] * 8}


def test_a_chunk_runs_section_by_section_and_a_short_one_does_not_pause(stage: LocalStage) -> None:
    assert stage.model.sections(LEAST_CUT - 1) == (stage.model.layers,)
    stage.open(0)
    long = stage.begin(chunk(0, 100))
    assert (long.sections, long.left) == (4, 4)
    long.go_on(3)
    assert long.left == 1
    assert long.result().logits is not None and long.left == 0
    stage.open(1)
    assert stage.begin(chunk(1, 9)).sections == 1


def test_others_steps_leave_it_paused_and_another_chunk_ends_the_pause(stage: LocalStage) -> None:
    for slot in range(SLOTS):
        stage.open(slot)
    stage.forward(chunk(1, 5), None)
    paused = stage.begin(chunk(0, 200))
    paused.go_on(1)
    stage.forward(row(1, 5), None)
    stage.capture(1)
    assert paused.left == 3
    stage.forward(chunk(2, 9), None)
    assert paused.left == 0


def test_it_ends_before_pages_have_to_move_or_its_own_state_is_asked_for(make_tiny: Any) -> None:
    stage = make_tiny("dense").stage(slots=2, pages=4, host_pages=9, **RECORDED)
    for slot in (0, 1):
        stage.open(slot)
    stage.forward(chunk(1, 64), None)
    paused = stage.begin(chunk(0, 190))
    assert stage.pool.free_places == 0
    stage.forward(row(1, 64), None)
    assert paused.left == 0, "a page had to leave for this row"
    stage.open(0)
    paused = stage.begin(chunk(0, 70))
    stage.capture(0)
    assert paused.left == 0


def test_where_its_slot_is_closed_no_further_section_of_it_runs(stage: LocalStage) -> None:
    stage.open(0)
    paused = stage.begin(chunk(0, 200))
    paused.go_on(1)
    stage.close(0)
    before = [tensor.clone() for state in stage._state.layers.values() for tensor in state.cleared(0)]
    paused.go_on(5)
    after = [tensor for state in stage._state.layers.values() for tensor in state.cleared(0)]
    assert all(torch.equal(x, y) for x, y in zip(before, after, strict=True))
    stage.check()
    assert paused.left == 0
    with pytest.raises(RuntimeError, match="dropped"):
        paused.result()


def test_where_one_of_several_prompts_in_it_ends_the_others_go_on(make_tiny: Any) -> None:
    stage, plain = (make_tiny("dense").stage(slots=SLOTS, pages=40, **RECORDED) for _ in range(2))
    both = Batch(tuple(Segment(slot, 0, tuple(TOKENS[:150]), Wanted.LAST) for slot in (0, 1)))
    for each in (stage, plain):
        each.open(0)
        each.open(1)
    paused, whole = stage.begin(both), plain.forward(both, None).logits
    assert paused.sections > 1
    paused.go_on(1)
    for each in (stage, plain):
        each.close(0)
    assert torch.equal(paused.result().logits, whole)  # type: ignore[arg-type]
    ours, theirs = (each.forward(row(1, 150), None).logits for each in (stage, plain))
    assert torch.equal(ours, theirs)  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["in a section", "behind the last"])
def test_what_goes_wrong_in_it_is_its_own_and_nothing_of_it_runs_twice(make_tiny: Any, where: str) -> None:
    stage = make_tiny("dense").stage(slots=2, pages=4, host_pages=9, **RECORDED)
    for slot in (0, 1):
        stage.open(slot)
    stage.forward(chunk(1, 64), None)
    paused, failures = stage.begin(chunk(0, 190)), list[str]()

    def fail(*_: object, **__: object) -> None:
        failures.append(where)
        raise MemoryError(where)

    if where == "in a section":
        paused._replay._step.replays[2] = fail  # type: ignore[union-attr]
    else:
        paused._finish = fail  # type: ignore[assignment]
    paused.go_on(1)
    assert stage.forward(row(1, 64), None).logits is not None, "it had to go on for this row"
    assert paused.left == 0
    for _ in range(2):
        with pytest.raises(MemoryError, match=where):
            paused.result()
    assert failures == [where]


def test_a_sequence_that_comes_lets_it_pause_unless_pages_have_to_move(make_tiny: Any) -> None:
    tiny = make_tiny("dense", **WIDE)
    stage = lending_stage(tiny, slots=3, places=30, host_pages=9, **RECORDED)
    stage.open(0)
    paused = stage.begin(chunk(0, 200))
    paused.go_on(1)
    stage.open(1)
    assert paused.left == 3, "its pages lie elsewhere"
    tight = lending_stage(tiny, slots=3, places=8, host_pages=30, **RECORDED)
    tight.open(0)
    paused = tight.begin(chunk(0, 600))
    paused.go_on(1)
    assert any(tight._idle.holds_pages(slot) for slot in (1, 2))  # type: ignore[union-attr]
    for slot in (1, 2):
        tight.open(slot)
    assert paused.left == 0


def test_only_chunks_that_are_recorded_in_several_sections_can_pause(make_tiny: Any) -> None:
    tiny = make_tiny("dense")
    stage = tiny.stage(slots=2, pages=40, **RECORDED)
    assert [stage.can_pause(rows) for rows in (1, 32, 64, 4096, 4097)] == [False, False, True, True, False]
    assert not tiny.stage(slots=2, pages=40, table_width=10).can_pause(200), "nothing is recorded"
    assert not tiny.stage(slots=2, pages=8, host_pages=9, kv_mode="sparse", **RECORDED).can_pause(200)
    short = tiny.stage(slots=2, pages=4, host_pages=9, **RECORDED)
    assert short.can_pause(200)
    short.open(0)
    for at in range(0, 600, 100):
        short.forward(Batch((Segment(0, at, tuple(TOKENS[at : at + 100]), Wanted.LAST),)), None)
    assert short.pool.away and not short.can_pause(200)


def test_features_of_a_chunk_are_those_of_its_own_rows_whoever_runs_between_its_sections(make_tiny: Any) -> None:
    taps = (1, 3, 6)
    stage, plain = (make_tiny("dense").stage(slots=SLOTS, pages=40, taps=taps, **RECORDED) for _ in range(2))
    chunks = Batch((Segment(0, 0, tuple(TOKENS[:90]), Wanted.LAST, features=90),), taps=taps)
    for each in (stage, plain):
        each.open(0)
        each.open(1)
    paused = stage.begin(chunks)
    for at in range(paused.left):
        paused.go_on(1)
        stage.forward(Batch((Segment(1, at, (TOKENS[at],), Wanted.LAST, features=1),), taps=taps), None)
    expected = plain.forward(chunks, None).features
    assert len(expected) == 3
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(paused.result().features, expected, strict=True))


# In the engine


def beside(engine: Engine, short: Prompt, count: int, long: Prompt, **fields: Any) -> tuple[Answer, Answer]:
    """The second is asked for at the third token of the first, by the engine's own thread: all of it runs beside."""
    asked = list[Answer]()

    def ask(tokens: int) -> None:
        if tokens == 3:
            asked.append(Answer(engine, long, **fields))

    first = Answer(engine, short, at_token=ask, max_tokens=count)
    first.first_token.wait()
    wait_until(lambda: bool(asked))
    return first, asked[0]


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("async_steps", [0, 1])
def test_beside_answers_a_prompt_comes_in_by_sections_and_nobody_gets_another_token(
    make_tiny: Any, kind: str, async_steps: int
) -> None:
    lab = Lab(make_tiny(kind), recorded=True)
    short, long = random_tokens(30, 1), random_tokens(700, 2)
    alone = lab.engine(grid=256)
    expected = [Answer(alone, Prompt(prompt), max_tokens=60).tokens for prompt in (short, long)]
    alone.stop()
    engine = lab.engine(grid=256, turns=True, max_gap=1e-9, async_steps=async_steps)
    between = list[tuple[int, int]]()  # sections and steps that were on their way when something came back
    collect = engine._collector.collect

    def noting() -> None:
        kinds = [isinstance(flight, ChunkSection) for flight in engine._flights]
        between.append((sum(kinds), len(kinds) - sum(kinds)))
        collect()

    engine._collector.collect = noting  # type: ignore[method-assign]
    first, second = beside(engine, Prompt(short), 60, Prompt(long), max_tokens=60)
    assert [first.tokens, second.tokens] == expected
    assert sum(sections for sections, _ in between) > 0, "it paused"
    assert Answer(engine, Prompt(long), max_tokens=60).tokens == expected[1]
    engine.stop()
    assert isinstance(engine.prefixes, RecordingCache)
    prefilled = [s for s in engine.prefixes.seen if all(stretch.how == "prefill" for stretch in s.stretches)]
    assert any(len(snapshot.tokens) == len(long) for snapshot in prefilled)
    assert all(same_bits(snapshot, lab.cold(snapshot)) for snapshot in prefilled)


def test_a_prompt_that_ends_one_token_behind_an_edge_has_the_answer_of_a_run_by_itself(make_tiny: Any) -> None:
    lab = Lab(make_tiny("dense"), recorded=True)
    long = Prompt(random_tokens(257, 2))
    alone = lab.engine(grid=256)
    expected = Answer(alone, long, max_tokens=5).tokens
    alone.stop()
    engine = lab.engine(grid=256, turns=True, max_gap=1e-9)
    _, second = beside(engine, Prompt(random_tokens(30, 1)), 200, long, max_tokens=5)
    assert second.tokens == expected
    assert Answer(engine, long, max_tokens=5).tokens == expected, "restored, with the logits that were captured"
    engine.stop()


@pytest.mark.parametrize("pool", [{"kv_mode": "sparse", "host_pages": 60}, {"host_pages": 60}], ids=str)
def test_chunks_that_cannot_pause_are_shorter_beside_answers(
    make_tiny: Any, pool: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A chunk may take as long as a step, which on a busy machine is as long as any chunk of so small a model.
    monkeypatch.setattr(Pace, "note_step", lambda self, seconds, at_most: None)
    engine = Lab(make_tiny("dense"), recorded=True).engine(grid=1024, turns=True, max_gap=1e-9, pages=20, pool=pool)
    forward, rows = engine.pipeline.forward, list[int]()

    def noting(batch: Batch, pending: Any = None) -> Any:
        rows.append(batch.rows)
        return forward(batch, pending)

    engine.pipeline.forward = noting  # type: ignore[method-assign]
    _, second = beside(engine, Prompt(random_tokens(30, 1)), 600, Prompt(random_tokens(1600, 2)), max_tokens=5)
    assert second.finished
    assert 1 < max(rows) <= 512
    engine.stop()


@pytest.mark.parametrize("how", ["cancelled", "stopped", "failed"])
def test_a_request_that_ends_while_its_prompt_pauses_leaves_nothing_behind(make_tiny: Any, how: str) -> None:
    lab = Lab(make_tiny("dense"), recorded=True)
    engine = lab.engine(grid=256, turns=True, max_gap=1e-9)
    expected = Answer(engine, Prompt(random_tokens(700, 2)), max_tokens=5).tokens
    run_sections, seen = engine._launcher._run_sections, list[int]()

    def meddling(begun: Any, decoding: Any) -> None:
        seen.append(begun.forward.result().left)
        if len(seen) == 3 and how == "failed":
            begun.forward.result()._replay._step.replays[1] = None
        if len(seen) == 3 and how == "cancelled":
            engine.cancel(begun.owners[0].request.id)
        if len(seen) == 3 and how == "stopped":
            engine.end_requests()
        run_sections(begun, decoding)

    engine._launcher._run_sections = meddling  # type: ignore[method-assign]
    short, long = Prompt(random_tokens(30, 1)), Prompt(random_tokens(690, 3))
    first, second = beside(engine, short, 400, long, max_tokens=5)
    last = second.last
    engine._launcher._run_sections = run_sections  # type: ignore[method-assign]
    assert len(seen) >= 3
    if how != "stopped":
        assert len(first.tokens) == 400
        assert ("Failed" if how == "failed" else "Finished") in type(last).__name__
    if how == "cancelled":
        assert Answer(engine, Prompt(random_tokens(700, 2)), max_tokens=5).tokens == expected
    engine.stop()
    stage = engine.pipeline.stages[0]
    assert isinstance(stage, LocalStage)
    stage.check()
    assert stage.pages().used == 0

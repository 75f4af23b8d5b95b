"""Coming into a slot: what is found late still counts, and what goes wrong there is nobody else's matter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.answers import arriving_together
from support.faulty import Faulty
from support.snapshot_lab import Answer, Lab, RecordingCache, random_tokens, wait_until

from rekindle.engine.engine import AT_FIRST, Engine, EngineSettings
from rekindle.engine.flight import Flight
from rekindle.engine.state import Loading
from rekindle.engine.to_host import DrawnTokens
from rekindle.engine.types import Failed, FinishReason, Started, Token
from rekindle.errors import PoolFull, PromptTooLong
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.prompt import MOST_OF_A_KIND, Boundary, BoundaryKind, Prompt
from rekindle.snapshots.disk import DiskStore
from rekindle.spec import Span
from rekindle.stages import Pipeline

KNOWN = Prompt(random_tokens(150, 1))
OTHER = Prompt(random_tokens(200, 2))


@pytest.fixture(scope="module")
def lab(make_tiny: Any) -> Lab:
    return Lab(make_tiny("dense"))


def engine_over(stage: Any, grid: int = 64) -> Engine:
    return Engine(Pipeline([stage]), PrefixCache(local_tiers(1 << 28)), EngineSettings(context=2048, grid=grid)).start()


def at_tokens(acts: dict[int, Callable[[], object]]) -> Callable[[int], bool]:
    """A stop predicate that never stops, and acts on the engine's own thread when the n-th token is drawn."""
    seen: list[int] = []

    def act(token: int) -> bool:
        seen.append(token)
        acts.get(len(seen), lambda: None)()
        return False

    return act


def failure_of(answer: Answer) -> Exception:
    assert answer._done.wait(60), "a request fell silent"
    last = answer.events[-1]
    assert isinstance(last, Failed), last
    return last.error


def assert_nothing_is_held(engine: Engine) -> None:
    assert all(entry.pins == 0 for entry in engine.prefixes.entries())
    assert engine.status().pages.used == 0


@pytest.mark.parametrize("arrived", [True, False])
def test_a_first_token_that_is_not_here_yet_keeps_no_other_prompt_waiting(
    lab: Lab, arrived: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU each is drawn behind the state of the prompt before, which travels for a while."""
    monkeypatch.setattr(DrawnTokens, "arrived", arrived)
    engine, prompts = lab.engine(), [KNOWN, OTHER, Prompt(random_tokens(180, 3))]
    expected = [Answer(engine, prompt).tokens for prompt in prompts]
    done, restore = list[str](), engine.pipeline.restore
    monkeypatch.setattr(engine.pipeline, "restore", lambda *state: (done.append("state"), restore(*state)))
    with arriving_together(engine):
        again = [Answer(engine, prompt, at_token=lambda n: n == 1 and done.append("token")) for prompt in prompts]
    assert [answer.tokens for answer in again] == expected
    assert done == (["state", "token"] * 3 if arrived else ["state"] * 3 + ["token"] * 3)
    for answer, prompt in zip(again, prompts, strict=True):
        assert answer.finished.cache.restored == len(prompt.tokens)
        assert [type(event) for event in answer.events[:2]] == [Started, Token]
    engine.stop()


def test_a_device_without_work_gets_a_step_before_all_in_line_have_come_in(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = AT_FIRST + 3
    engine = engine_over(lab.stage(slots=count, pages=4 * count))
    done, open_slot, forward = list[str](), engine.pipeline.open, engine.pipeline.forward
    monkeypatch.setattr(engine.pipeline, "open", lambda slot: (done.append("open"), open_slot(slot)))
    monkeypatch.setattr(engine.pipeline, "forward", lambda *step: (done.append("step"), forward(*step))[1])
    with arriving_together(engine):
        answers = [Answer(engine, Prompt(random_tokens(70, seed))) for seed in range(count)]
    assert all(answer.finished.reason is FinishReason.LENGTH for answer in answers)
    assert done[: count + 1] == ["open"] * AT_FIRST + ["step"] + ["open"] * 3
    engine.stop()


@pytest.fixture
def long_chunks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The chunks of these tests are long, and over once something has been put into the list."""
    over = list[bool]()
    monkeypatch.setattr("rekindle.engine.engine.SHARED", 32)
    monkeypatch.setattr("rekindle.engine.scheduler.SHARED", 32)
    monkeypatch.setattr(Flight, "is_over", property(lambda flight: bool(over)))
    return over


def gpu_like(lab: Lab, slots: int = 4, **settings: Any) -> Engine:
    """Chunks take turns with decode steps, and a step may be launched ahead of the host."""
    asked = {"context": 4096, "grid": 64, "async_steps": 1, "max_gap": 1.0, **settings}
    pipeline = Pipeline([lab.stage(slots=slots, pages=400)])
    return Engine(pipeline, PrefixCache(local_tiers(1 << 28)), EngineSettings(**asked)).start()


class Diary:
    """When slots are filled, steps launched and results collected. `at_step`: what happens as the n-th is launched."""

    def __init__(self, engine: Engine, at_step: dict[int, Callable[[], object]] | None = None) -> None:
        self.done = list[str]()
        self._at_step = at_step or {}
        for owner, verb, name in (
            (engine.pipeline, "open", "open"),
            (engine.pipeline, "forward", "step"),
            (engine._collector, "collect", "collect"),
        ):
            setattr(owner, verb, self._noting(name, getattr(owner, verb)))

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            self.done.append(name)
            if name == "step":
                self._at_step.get(self.done.count("step"), lambda: None)()
            return call(*arguments)

        return noted


def test_what_comes_while_a_long_chunk_runs_has_its_slot_before_the_chunk_is_looked_at(
    lab: Lab, long_chunks: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, later = gpu_like(lab), list[Answer]()
    diary = Diary(engine, {1: lambda: later.append(Answer(engine, Prompt(random_tokens(20, 7))))})
    open_slot = engine.pipeline.open

    def opened(slot: int) -> None:
        open_slot(slot)
        if diary.done.count("open") == 2:
            long_chunks.append(True)

    monkeypatch.setattr(engine.pipeline, "open", opened)
    assert Answer(engine, Prompt(random_tokens(60, 8))).finished.reason is FinishReason.LENGTH
    assert later[0].finished.reason is FinishReason.LENGTH
    assert diary.done[: diary.done.index("collect")] == ["open", "step", "open", "step"]
    engine.stop()


def test_a_long_prompt_stands_behind_the_chunk_as_soon_as_it_has_come(lab: Lab, long_chunks: list[bool]) -> None:
    """No other prompt could share its chunk. The first chunk is over when both have been launched, and not before."""
    engine, later = gpu_like(lab), list[Answer]()
    both = {1: lambda: later.append(Answer(engine, Prompt(random_tokens(500, 7)))), 2: lambda: long_chunks.append(True)}
    diary = Diary(engine, both)
    assert Answer(engine, Prompt(random_tokens(60, 8))).finished.reason is FinishReason.LENGTH
    assert later[0].finished.reason is FinishReason.LENGTH
    assert diary.done[: diary.done.index("collect")] == ["open", "step", "open", "step"]
    engine.stop()


def test_nobody_waits_for_a_first_token_behind_a_second_chunk(
    lab: Lab, long_chunks: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU it is drawn behind all that was launched before: the first chunk's results would come a chunk late."""
    engine, later = gpu_like(lab), list[Answer]()
    Answer(engine, KNOWN).wait()
    waited, wait, beside = list[int](), DrawnTokens.wait, engine._admit_beside_chunk
    inside = list[bool]()

    def waits(drawn: DrawnTokens) -> None:
        if inside:
            waited.append(len(engine._flights))
            long_chunks.append(True)
        wait(drawn)

    def marked() -> None:
        inside.append(True)
        beside()
        inside.clear()

    monkeypatch.setattr(DrawnTokens, "wait", waits)
    monkeypatch.setattr(DrawnTokens, "arrived", False)
    monkeypatch.setattr(engine, "_admit_beside_chunk", marked)
    Diary(engine, {1: lambda: later.append(Answer(engine, KNOWN)), 12: lambda: long_chunks.append(True)})
    assert Answer(engine, Prompt(random_tokens(600, 4))).finished.reason is FinishReason.LENGTH
    assert later[0].finished.cache.restored == 150
    assert all(count == 1 for count in waited)
    engine.stop()


def test_an_engine_that_stops_waits_for_no_long_chunk(lab: Lab, long_chunks: list[bool]) -> None:
    engine, launched = gpu_like(lab), threading.Event()
    Diary(engine, {1: launched.set})
    answer = Answer(engine, Prompt(random_tokens(60, 8)), max_tokens=500)
    assert launched.wait(60)
    engine.stop()
    assert answer.finished.reason is FinishReason.CANCELLED


def test_a_step_that_no_more_prompts_could_share_is_launched_before_others_come_in(
    lab: Lab, long_chunks: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nobody is kept out for longer than that."""
    early, late = AT_FIRST + 4, list[Answer]()
    engine = gpu_like(lab, slots=early + 3)
    monkeypatch.setattr(Engine, "_runs_long", True)  # the device has work: those in line come in at once

    def others_come() -> None:
        late.extend(Answer(engine, Prompt(random_tokens(20, 90 + seed))) for seed in range(3))

    diary = Diary(engine, {1: others_come})
    with arriving_together(engine):
        answers = [Answer(engine, Prompt(random_tokens(20, seed))) for seed in range(early)]
    assert all(answer.finished.reason is FinishReason.LENGTH for answer in answers)
    assert all(answer.finished.reason is FinishReason.LENGTH for answer in late)
    opens = [at for at, what in enumerate(diary.done) if what == "open"]
    assert diary.done[opens[early - 1] : opens[early]].count("step") >= 2, "the one in which they came, and the next"
    engine.stop()


@pytest.mark.parametrize("stages", [1, 2])
def test_background_prompts_in_slots_keep_no_client_out(lab: Lab, stages: int) -> None:
    """Eight prompts that are prepared stand in slots; a long one runs, and a short one comes."""
    whole = lab._oracle.span.stop
    half = whole // 2
    spans = [None] if stages == 1 else [Span(0, half), Span(half, whole)]
    pipeline = Pipeline([lab.stage(span, slots=AT_FIRST + 4, pages=400) for span in spans])
    settings = EngineSettings(context=4096, grid=64, async_steps=int(stages == 1))
    engine = Engine(pipeline, PrefixCache(local_tiers(1 << 28)), settings).start()
    steps, asked, ours = list[set[str]](), dict[str, Answer](), list[int]()
    forward, collect = engine.pipeline.forward, engine._collector.collect

    def launched(*step: Any) -> Any:
        slots = {segment.slot for segment in step[0].segments}
        steps.append({s.request.id for s in engine._roster.running if s.slot in slots})
        if "long" not in asked and len(engine._roster.background) == AT_FIRST:
            asked["long"] = Answer(engine, Prompt(random_tokens(1500, 1)))
        return forward(*step)

    def collected() -> None:
        collect()
        if "short" not in asked and "long" in asked and sum(asked["long"].id in step for step in steps) == 4:
            ours.append(len(steps))
            asked["short"] = Answer(engine, Prompt(random_tokens(70, 2)))

    engine.pipeline.forward, engine._collector.collect = launched, collected  # type: ignore[method-assign]
    with arriving_together(engine):
        prepared = [
            Answer(engine, Prompt(random_tokens(300, 700 + seed)), max_tokens=0, background=True)
            for seed in range(AT_FIRST)
        ]
    wait_until(lambda: "short" in asked)
    assert all(answer.finished for answer in (*asked.values(), *prepared))
    engine.stop()
    first = next(number for number, step in enumerate(steps) if asked["short"].id in step)
    assert sum(asked["long"].id in step for step in steps[ours[0] : first]) < 8, "of two dozen"


def test_snapshots_of_those_who_come_in_later_are_read_before_the_first_step(lab: Lab, tmp_path: Path) -> None:
    """As many as there are slots for; what RAM has is left alone, and nothing is read for scores of a prompt."""
    prompts = [Prompt(random_tokens(150, 50 + seed)) for seed in range(3)]
    before = lab.engine(tmp_path)
    expected = [Answer(before, prompt).tokens for prompt in prompts]
    before.stop()

    disk = DiskStore(tmp_path, "f" * 64, 1 << 30)
    pipeline = Pipeline([lab.stage(slots=AT_FIRST + 2, pages=400)])
    settings = EngineSettings(context=2048, grid=64)
    engine = Engine(pipeline, PrefixCache(local_tiers(1 << 28, disk)), settings).start()
    in_ram = Prompt(random_tokens(150, 60))
    Answer(engine, in_ram).wait()
    asked, load, forward, at_first = list[str](), disk.load, pipeline.forward, list[tuple[int, int, int]]()
    looked_up = engine.prefixes.stats().lookups
    disk.load = lambda id: (asked.append(id), load(id))[1]  # type: ignore[method-assign]

    def launched(*step: Any) -> Any:
        if not at_first:
            wait_until(lambda: len(asked) == 2)
            pinned = sum(entry.pins for entry in engine.prefixes.entries() if entry.position == 150)
            loading = sum(isinstance(sequence.state, Loading) for sequence in engine._roster.line)
            at_first.append((loading, pinned - len(asked), engine.prefixes.stats().lookups - looked_up))
        return forward(*step)

    pipeline.forward = launched  # type: ignore[method-assign]
    with arriving_together(engine):
        others = [Answer(engine, Prompt(random_tokens(70, seed))) for seed in range(AT_FIRST)]
        scored = Answer(engine, prompts[0], prompt_logprobs=0)
        again = [Answer(engine, prompt) for prompt in (in_ram, *prompts)]
    assert all(answer.finished.reason is FinishReason.LENGTH for answer in (*others, scored))
    assert [answer.tokens for answer in again[1:]] == expected
    assert [answer.finished.cache.restored for answer in again] == [150] * 4
    ((loading, pinned, lookups),) = at_first
    assert loading == 2, "there are two slots left"
    assert pinned <= 0, "what RAM has is looked up when its turn has come"
    assert lookups <= AT_FIRST + 2, "those that came into slots, and the two that are read"
    engine.stop()
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("between", [0, AT_FIRST - 2, AT_FIRST - 1, AT_FIRST])
def test_a_twin_far_behind_in_line_restores_what_it_shares_with_the_first(lab: Lab, between: int) -> None:
    """Also where the first is launched before the twin comes in."""
    engine = engine_over(lab.stage(slots=16, pages=200), grid=512)
    shared, strangers = random_tokens(300, 99), [Prompt(random_tokens(70, 100 + seed)) for seed in range(between)]
    first, twin = (Prompt((*shared, *random_tokens(40, seed))) for seed in (1, 2))
    with arriving_together(engine):
        answers = [Answer(engine, prompt) for prompt in (first, *strangers, twin)]
    assert [answer.finished.cache.computed for answer in answers] == [340, *[70] * between, 40]
    engine.stop()


def test_a_prefix_published_while_a_request_waits_for_pages_is_restored(lab: Lab) -> None:
    elsewhere = lab.engine()
    expected = Answer(elsewhere, KNOWN).tokens
    elsewhere.stop()
    assert isinstance(elsewhere.prefixes, RecordingCache)
    snapshot = next(s for s in elsewhere.prefixes.seen if s.position == 150)

    engine = engine_over(lab.stage(slots=2, pages=4))  # the other prompt holds all four
    answers: list[Answer] = []
    looked: list[int] = []

    def publish() -> None:
        looked.append(engine.prefixes.stats().lookups)
        engine.prefixes.publish(snapshot, BoundaryKind.END)

    acts = {1: lambda: answers.append(Answer(engine, KNOWN)), 6: publish}
    assert Answer(engine, OTHER, max_tokens=20, stop_when=at_tokens(acts)).finished
    assert answers[0].finished.cache.restored == 150
    assert answers[0].tokens == expected
    assert looked == [2], "the one that waits has looked before the prefix was there"
    engine.stop()
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("verb", ["open", "prepare_restore", "commit_restore"])
def test_a_fault_at_admission_fails_its_own_request_only(lab: Lab, verb: str) -> None:
    # Opened are: the first and the other; restored is the repeated one.
    stage = Faulty(lab.stage(), verb, 3 if verb == "open" else 1, MemoryError("no memory for the state"))
    engine = engine_over(stage)
    assert Answer(engine, KNOWN).finished
    failing: list[Answer] = []
    again = Prompt(random_tokens(90, 3)) if verb == "open" else KNOWN
    acts = {2: lambda: failing.append(Answer(engine, again))}
    other = Answer(engine, OTHER, max_tokens=20, stop_when=at_tokens(acts))
    assert other.finished.completion_tokens == 20
    assert "no memory for the state" in str(failure_of(failing[0]))
    assert Answer(engine, again).finished.reason is FinishReason.LENGTH
    engine.stop()
    assert_nothing_is_held(engine)


def test_a_slot_that_was_half_filled_at_admission_is_emptied(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_over(lab.stage())
    assert Answer(engine, KNOWN).finished

    def no_room(hit: Any) -> None:
        raise MemoryError("no memory behind the restore")

    with monkeypatch.context() as patch:
        patch.setattr(engine._auditor, "note", no_room)
        assert "behind the restore" in str(failure_of(Answer(engine, KNOWN)))
    assert engine.status().pages.used == 0
    assert Answer(engine, KNOWN).finished.cache.restored == 150
    engine.stop()
    assert_nothing_is_held(engine)


def test_a_full_pool_lets_a_restore_wait_while_others_run(lab: Lab) -> None:
    engine = engine_over(Faulty(lab.stage(), "prepare_restore", 1, PoolFull("all places hold open pages")))
    assert Answer(engine, KNOWN).finished
    waiting: list[Answer] = []
    acts = {2: lambda: waiting.append(Answer(engine, KNOWN))}
    assert Answer(engine, OTHER, max_tokens=20, stop_when=at_tokens(acts)).finished.completion_tokens == 20
    assert waiting[0].finished.cache.restored == 150
    engine.stop()
    assert_nothing_is_held(engine)


def test_a_pool_too_small_for_a_restore_alone_is_said_to_its_request(lab: Lab) -> None:
    engine = engine_over(Faulty(lab.stage(), "prepare_restore", 1, PoolFull("all places hold open pages")))
    assert Answer(engine, KNOWN).finished
    error = failure_of(Answer(engine, KNOWN))
    assert isinstance(error, PromptTooLong)
    assert "all places hold open pages" in str(error)
    assert Answer(engine, KNOWN).finished.cache.restored == 150
    engine.stop()
    assert_nothing_is_held(engine)


def test_a_prompt_of_nothing_but_boundaries_leaves_a_bounded_number_of_snapshots(lab: Lab) -> None:
    """A client that writes role starts only must not have a snapshot of every token taken, at everyone's expense."""
    tokens = random_tokens(600, 3)
    boundaries = tuple(Boundary(at, BoundaryKind.MESSAGE) for at in range(1, 600))
    engine = engine_over(lab.stage(slots=2))
    answer = Answer(engine, Prompt(tokens, boundaries))
    expected = answer.tokens
    taken = [entry.position for entry in engine.prefixes.entries() if entry.kind is BoundaryKind.MESSAGE]
    assert sorted(taken) == list(range(600 - MOST_OF_A_KIND, 600)), "the newest"
    assert Answer(engine, Prompt(tokens, boundaries)).tokens == expected
    engine.stop()


def test_marks_are_kept_newest_first_and_no_more_than_are_captured(lab: Lab) -> None:
    tokens = random_tokens(600, 4)
    marks = tuple(range(1, 600))
    prompt = Prompt(tokens, tuple(Boundary(at, BoundaryKind.MARK) for at in marks), marks)
    engine = engine_over(lab.stage(slots=2))
    assert Answer(engine, prompt).tokens
    engine.keep(prompt, 300, "")
    wait_until(lambda: any(entry.kept_until for entry in engine.prefixes.entries()))
    assert Answer(engine, OTHER).tokens, "the engine's thread has done it all by now"
    kept = [entry.position for entry in engine.prefixes.entries() if entry.kept_until]
    assert sorted(kept) == list(range(600 - MOST_OF_A_KIND, 600))
    engine.stop()

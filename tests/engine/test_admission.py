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
from rekindle.engine.twins import Twins
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


def engine_on_disk(lab: Lab, folder: Path, slots: int, pages: int) -> tuple[Engine, DiskStore]:
    """One that starts on what an earlier one has left, and its disk."""
    disk = DiskStore(folder, "f" * 64, 1 << 30)
    cache = PrefixCache(local_tiers(1 << 28, disk))
    pipeline = Pipeline([lab.stage(slots=slots, pages=pages)])
    return Engine(pipeline, cache, EngineSettings(context=2048, grid=64)).start(), disk


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
    asked = {"context": 4096, "grid": 64, "async_steps": 1, "turns": True, "max_gap": 1.0, **settings}
    pipeline = Pipeline([lab.stage(slots=slots, pages=400)])
    return Engine(pipeline, PrefixCache(local_tiers(1 << 28)), EngineSettings(**asked)).start()


class Diary:
    """When slots are filled, steps launched and results collected. `at_step`: what happens as the n-th is launched;
    `at_open`, `at_collect`: as the n-th slot is filled, and before the host looks at the n-th results."""

    def __init__(
        self,
        engine: Engine,
        at_step: dict[int, Callable[[], object]] | None = None,
        at_open: dict[int, Callable[[], object]] | None = None,
        at_collect: dict[int, Callable[[], object]] | None = None,
    ) -> None:
        self.done = list[str]()
        self._acts = {"step": at_step or {}, "open": at_open or {}, "collect": at_collect or {}}
        for owner, verb, name in (
            (engine.pipeline, "open", "open"),
            (engine.pipeline, "forward", "step"),
            (engine._collector, "collect", "collect"),
        ):
            setattr(owner, verb, self._noting(name, getattr(owner, verb)))

    def _noting(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any) -> Any:
            self.done.append(name)
            self._acts[name].get(self.done.count(name), lambda: None)()
            return call(*arguments)

        return noted


def over(chunks: list[bool]) -> Callable[[], object]:
    return lambda: chunks.append(True)


@pytest.mark.parametrize("draws", [False, True])
def test_what_comes_while_a_long_chunk_runs_has_its_slot_and_its_step_before_the_chunk_is_looked_at(
    lab: Lab, long_chunks: list[bool], draws: bool
) -> None:
    """Unless a first token comes of the chunk: the second would wait for a whole chunk of somebody else."""
    engine, later = gpu_like(lab), list[Answer]()
    comes = {1: lambda: later.append(Answer(engine, Prompt(random_tokens(500, 7))))}
    diary = Diary(engine, comes, at_open={2: over(long_chunks)})
    first = Answer(engine, Prompt(random_tokens(60, 8)), max_tokens=4 if draws else 0)
    assert first.finished.reason is later[0].finished.reason is FinishReason.LENGTH
    assert diary.done[:5] == ["open", "step", "open", *(["collect", "step"] if draws else ["step", "collect"])]
    engine.stop()


def test_nobody_who_answers_waits_for_a_long_chunk_to_be_over(lab: Lab, long_chunks: list[bool]) -> None:
    """It never is: to look at its results is what waits for it on a GPU."""
    engine, later = gpu_like(lab, async_steps=0), list[Answer]()
    Diary(engine, {4: lambda: later.append(Answer(engine, Prompt(random_tokens(60, 7)), max_tokens=0))})
    assert Answer(engine, Prompt(random_tokens(20, 8)), max_tokens=30).finished.reason is FinishReason.LENGTH
    assert later[0].finished.reason is FinishReason.LENGTH
    engine.stop()


def test_as_many_prompts_as_can_share_a_step_have_it_while_a_long_chunk_runs(lab: Lab, long_chunks: list[bool]) -> None:
    """The chunk is over when they do, and not before."""
    engine, later = gpu_like(lab, slots=AT_FIRST + 2), list[Answer]()

    def come() -> None:
        later.extend(Answer(engine, Prompt(random_tokens(20, 40 + seed))) for seed in range(AT_FIRST))

    diary = Diary(engine, {1: come, 2: over(long_chunks)})
    assert Answer(engine, Prompt(random_tokens(60, 8))).finished.reason is FinishReason.LENGTH
    assert all(answer.finished.reason is FinishReason.LENGTH for answer in later)
    assert diary.done[: diary.done.index("collect")] == ["open", "step", *["open"] * AT_FIRST, "step"]
    engine.stop()


def test_prompts_that_come_while_a_long_chunk_runs_compute_what_they_share_once(
    lab: Lab, long_chunks: list[bool]
) -> None:
    """The first of them is long enough for a chunk of its own, and the second comes a moment later."""
    engine, later, shared = gpu_like(lab, grid=512), list[Answer](), random_tokens(300, 99)

    def comes(seed: int) -> Callable[[], object]:
        return lambda: later.append(Answer(engine, Prompt((*shared, *random_tokens(50, seed)))))

    Diary(engine, {1: comes(1)}, at_open={2: lambda: (comes(2)(), engine._inbox.put(over(long_chunks)))})
    assert Answer(engine, Prompt(random_tokens(60, 8)), max_tokens=0).finished.reason is FinishReason.LENGTH
    assert [answer.finished.cache.computed for answer in later] == [350, 50]
    engine.stop()


@pytest.mark.parametrize("behind", [False, True])
def test_a_step_that_no_more_prompts_could_share_is_launched_before_others_come_in(
    lab: Lab, long_chunks: list[bool], behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one more, where the host is behind the device; nobody is kept out for longer than that."""
    early, late = AT_FIRST + 16, list[Answer]()
    engine = gpu_like(lab, slots=early + 3)
    monkeypatch.setattr(Engine, "_runs_long", True)  # the device has work: those in line come in at once
    long_chunks += [True] * behind

    def others_come() -> None:
        late.extend(Answer(engine, Prompt(random_tokens(20, 90 + seed))) for seed in range(3))

    diary = Diary(engine, at_collect={1: others_come})
    with arriving_together(engine):
        answers = [Answer(engine, Prompt(random_tokens(20, seed))) for seed in range(early)]
    assert all(answer.finished.reason is FinishReason.LENGTH for answer in (*answers, *late))
    looked = diary.done.index("collect")
    come_in = diary.done.index("open", looked)
    assert diary.done[looked:come_in] == ["collect", "step"] * (1 + behind)
    assert diary.done[come_in : come_in + 3] == ["open"] * 3
    engine.stop()


@pytest.mark.parametrize("longs", [3, 6])
@pytest.mark.parametrize("stages", [1, 2])
def test_a_free_slot_is_filled_however_many_long_prompts_come_in(lab: Lab, stages: int, longs: int) -> None:
    """Every chunk counts as over when the host looks, as where the host is slower than the device."""
    whole = lab._oracle.span.stop
    spans = [None] if stages == 1 else [Span(0, whole // 2), Span(whole // 2, whole)]
    pipeline = Pipeline([lab.stage(span, slots=longs + 2, pages=300) for span in spans])
    settings = EngineSettings(context=4096, grid=64, async_steps=int(stages == 1), turns=True, max_gap=1.0)
    engine = Engine(pipeline, PrefixCache(local_tiers(1 << 28)), settings).start()
    short = list[Answer]()
    diary = Diary(engine, {10: lambda: short.append(Answer(engine, Prompt(random_tokens(70, 2))))})
    with arriving_together(engine):
        answers = [Answer(engine, Prompt(random_tokens(700, 100 + n)), max_tokens=2) for n in range(longs)]
    assert all(answer.finished.reason is FinishReason.LENGTH for answer in answers)
    assert short[0].finished.reason is FinishReason.LENGTH
    engine.stop()
    last = max(at for at, what in enumerate(diary.done) if what == "open")
    assert diary.done[:last].count("step") <= 13, "of ten before it came, and some that were on their way"


def test_who_is_in_line_when_a_long_prompt_is_launched_computes_what_they_share_once(
    lab: Lab, long_chunks: list[bool]
) -> None:
    """The second has come before the first one's turn, though it gets its slot after that."""
    engine, shared, both = gpu_like(lab, slots=8, grid=256), random_tokens(150, 1), list[Answer]()

    def comes(seed: int) -> Callable[[], object]:
        return lambda: both.append(Answer(engine, Prompt((*shared, *random_tokens(60, seed))), max_tokens=2))

    Diary(engine, {4: comes(2), 9: comes(3)})
    with arriving_together(engine):
        longs = [Answer(engine, Prompt(random_tokens(2000, 9 + n)), max_tokens=2) for n in range(4)]
    assert all(answer.finished.reason is FinishReason.LENGTH for answer in longs)
    assert [answer.finished.cache.computed for answer in both] == [210, 60]
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


def test_who_leaves_while_a_long_chunk_runs_gets_no_slot(lab: Lab, long_chunks: list[bool]) -> None:
    engine, later = gpu_like(lab), list[Answer]()

    def come() -> None:
        later.append(Answer(engine, Prompt(random_tokens(20, 7))))
        engine.cancel(later[0].id)
        later.append(Answer(engine, Prompt(random_tokens(20, 9))))

    diary = Diary(engine, {1: come}, at_open={2: over(long_chunks)})
    assert Answer(engine, Prompt(random_tokens(60, 8)), max_tokens=0).finished.reason is FinishReason.LENGTH
    assert [answer.finished.reason for answer in later] == [FinishReason.CANCELLED, FinishReason.LENGTH]
    assert diary.done.count("open") == 2
    engine.stop()


@pytest.mark.parametrize("amid", range(8, 14))
def test_stages_that_cannot_say_whether_a_step_is_over_keep_nobody_out_for_it(
    lab: Lab, amid: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short prompt comes amid three long ones, whose chunks take no more along."""
    monkeypatch.setattr("rekindle.engine.scheduler.SHARED", 32)
    whole = lab._oracle.span.stop
    stages = [lab.stage(span, slots=8, pages=300) for span in (Span(0, whole // 2), Span(whole // 2, whole))]
    settings = EngineSettings(context=4096, grid=64, async_steps=0, turns=True, max_gap=1.0)
    engine = Engine(Pipeline(stages), PrefixCache(local_tiers(1 << 28)), settings).start()
    short = list[Answer]()

    def comes() -> None:
        short.append(Answer(engine, Prompt(random_tokens(70, 2)), max_tokens=1))
        diary.done.append("comes")

    diary = Diary(engine, {amid: comes})
    with arriving_together(engine):
        longs = [Answer(engine, Prompt(random_tokens(1500, 100 + n)), max_tokens=1) for n in range(3)]
    assert all(answer.finished.reason is FinishReason.LENGTH for answer in (*longs, *short))
    engine.stop()
    came = diary.done.index("comes")
    assert diary.done[came : diary.done.index("open", came)].count("collect") <= 1


def test_for_whom_there_is_no_slot_nobody_looks_for_twins(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every step it would take longer, the longer the line is."""
    asked, is_ahead_of = list[int](), Twins.is_ahead_of

    def noted(twins: Twins, sequence: Any) -> bool:
        asked.append(twins._roster.slots_left)
        return is_ahead_of(twins, sequence)

    monkeypatch.setattr(Twins, "is_ahead_of", noted)
    monkeypatch.setattr("rekindle.engine.scheduler.SHARED", 32)
    engine = gpu_like(lab, slots=2)
    with arriving_together(engine):
        answers = [Answer(engine, Prompt(random_tokens(150, seed)), max_tokens=3) for seed in range(8)]
    assert all(answer.finished.reason is FinishReason.LENGTH for answer in answers)
    engine.stop()
    assert asked and all(asked)


def test_an_engine_that_stops_waits_for_no_long_chunk(lab: Lab, long_chunks: list[bool]) -> None:
    engine, launched = gpu_like(lab), threading.Event()
    Diary(engine, {1: launched.set})
    answer = Answer(engine, Prompt(random_tokens(60, 8)), max_tokens=500)
    assert launched.wait(60)
    engine.stop()
    assert answer.finished.reason is FinishReason.CANCELLED


@pytest.mark.parametrize("read", [0, 2])
def test_snapshots_of_those_who_come_in_later_are_read_before_the_first_step(
    lab: Lab, tmp_path: Path, read: int
) -> None:
    """As many as there are slots for, behind those whose turn is first: what RAM has is left alone, and nothing is read
    for scores of a prompt."""
    prompts = [Prompt(random_tokens(150, 50 + seed)) for seed in range(3)]
    before = lab.engine(tmp_path)
    expected = [Answer(before, prompt).tokens for prompt in prompts]
    before.stop()

    engine, disk = engine_on_disk(lab, tmp_path, slots=AT_FIRST + 2 + read, pages=400)
    pipeline = engine.pipeline
    in_ram = Prompt(random_tokens(150, 60))
    Answer(engine, in_ram).wait()
    asked, load, forward, at_first = list[str](), disk.load, pipeline.forward, list[tuple[int, int, int]]()
    looked_up = engine.prefixes.stats().lookups
    disk.load = lambda id: (asked.append(id), load(id))[1]  # type: ignore[method-assign]

    def launched(*step: Any) -> Any:
        if not at_first:
            wait_until(lambda: len(asked) == read)
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
    assert loading == read, "two of the slots that are left are others'"
    assert pinned <= 0, "what RAM has is looked up when its turn has come"
    assert lookups <= AT_FIRST + read, "those that came into slots, and those that are read"
    engine.stop()
    assert_nothing_is_held(engine)


def test_a_read_that_cannot_be_decided_on_is_the_matter_of_its_request_alone(lab: Lab) -> None:
    engine, bad = lab.engine(), random_tokens(150, 51)
    decide = engine.prefixes.must_be_read

    def fails(tokens: Any, *how: Any, **more: Any) -> bool:
        if tuple(tokens[:5]) == bad[:5]:
            raise RuntimeError("of this one alone")
        return decide(tokens, *how, **more)

    engine.prefixes.must_be_read = fails  # type: ignore[method-assign]
    running = Answer(engine, Prompt(random_tokens(40, 2)), max_tokens=200)
    wait_until(lambda: any(sequence.decoding for sequence in engine._roster.running))
    with arriving_together(engine):
        first, second, third = (Answer(engine, Prompt(random_tokens(150, 50 + seed))) for seed in range(3))
    assert "of this one alone" in str(failure_of(second))
    assert all(answer.finished.reason is FinishReason.LENGTH for answer in (running, first, third))
    engine.stop()
    assert_nothing_is_held(engine)


def test_behind_a_request_that_waits_for_pages_nothing_is_read_for_those_who_come_later(
    lab: Lab, tmp_path: Path
) -> None:
    """They would hold memory for as long as it waits."""
    prompts = [Prompt(random_tokens(150, 80 + seed)) for seed in range(3)]
    before = lab.engine(tmp_path)
    for prompt in prompts:
        Answer(before, prompt).wait()
    before.stop()
    engine, disk = engine_on_disk(lab, tmp_path, slots=8, pages=12)
    large, asked, load = Prompt(random_tokens(600, 2)), list[str](), disk.load
    Answer(engine, large).wait()  # known, so that all of it must fit at once
    disk.load = lambda id: (asked.append(id), load(id))[1]  # type: ignore[method-assign]
    hog = Answer(engine, Prompt(random_tokens(300, 1)), max_tokens=300)
    wait_until(lambda: any(sequence.decoding for sequence in engine._roster.running))
    waiting = Answer(engine, large)
    wait_until(lambda: engine._admission._short is not None)
    later = [Answer(engine, prompt) for prompt in prompts]
    wait_until(lambda: len(engine._roster.line) == 4)
    steps = len(hog.events)
    wait_until(lambda: len(hog.events) > steps + 5 or hog._done.is_set())
    assert not hog._done.is_set() and asked == []
    assert all(answer.finished.reason is FinishReason.LENGTH for answer in (hog, waiting, *later))
    assert [answer.finished.cache.restored for answer in later] == [150] * 3
    engine.stop()
    assert_nothing_is_held(engine)


def test_all_reads_from_disk_begin_before_a_slot_is_filled(lab: Lab, tmp_path: Path) -> None:
    """Filling one takes some milliseconds, and readers would stand idle behind the first that is known."""
    prompts = [Prompt(random_tokens(150, 70 + seed)) for seed in range(3)]
    before = lab.engine(tmp_path)
    expected = [Answer(before, prompt).tokens for prompt in prompts]
    before.stop()
    engine, disk = engine_on_disk(lab, tmp_path, slots=4, pages=400)
    Answer(engine, prompts[0]).wait()  # from now on in RAM
    asked, load, restore, counts = list[str](), disk.load, engine.pipeline.restore, list[int]()
    disk.load = lambda id: (asked.append(id), load(id))[1]  # type: ignore[method-assign]

    def restored(*state: Any) -> None:
        if not counts:
            wait_until(lambda: len(asked) == 2)
        counts.append(len(asked))
        restore(*state)

    engine.pipeline.restore = restored  # type: ignore[method-assign]
    with arriving_together(engine):
        again = [Answer(engine, prompt) for prompt in prompts]
    assert [answer.tokens for answer in again] == expected
    assert [answer.finished.cache.restored for answer in again] == [150] * 3
    assert counts == [2] * 3
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

"""Captures whose copies to host memory come late: nobody reads them before they are complete."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from support.answers import arriving_together
from support.snapshot_lab import Answer, Lab, RecordingCache, random_tokens, same_bits, wait_until

from rekindle.batch import Batch, Segment, Wanted
from rekindle.engine.drafting import NO_DRAFTS, Drafts
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.types import Token
from rekindle.errors import CopyFailed
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.prompt import Prompt
from rekindle.shards.parts import export_parts
from rekindle.snapshots.types import Part, copies_done
from rekindle.speculative.lookup import PromptLookup
from rekindle.stages import LocalStage, Pipeline

T = TypeVar("T")

PROMPT = Prompt(random_tokens(150, 1))


class Gate:
    """Copies of one capture. Until the gate opens they hold garbage, then what was captured."""

    def __init__(self, in_time: bool) -> None:
        self.in_time = in_time  # for whoever waits
        self.waited = threading.Event()
        self._opened = threading.Event()
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def late(self, captured: torch.Tensor) -> torch.Tensor:
        copy = torch.full_like(captured, torch.nan)
        self._copies.append((copy, captured))
        return copy

    def open(self) -> None:
        for copy, captured in self._copies:
            copy.copy_(captured)
        self._opened.set()

    @property
    def done(self) -> bool:
        return self._opened.is_set()

    def wait(self) -> None:
        self.waited.set()
        if self.in_time:
            self.open()
        assert self._opened.wait(60), "the gate stayed shut"


class LateStage:
    """A stage whose captures are complete when the test, or in time whoever waits, opens their gates."""

    def __init__(self, stage: LocalStage) -> None:
        self._stage = stage
        self.in_time = False
        self.gates: list[Gate] = []
        self._all_open = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def begin_capture(self, slot: int) -> Callable[[], list[Part]]:
        parts = self.capture(slot)
        return lambda: parts

    def capture(self, slot: int) -> list[Part]:
        gate = Gate(self.in_time)
        parts = [late_part(part, gate) for part in self._stage.capture(slot)]
        self.gates.append(gate)
        if self._all_open:
            gate.open()
        return parts

    def open_gates(self) -> None:
        """Of all captures, also of those to come."""
        self._all_open = True
        for gate in tuple(self.gates):
            gate.open()


def late_part(part: Part, gate: Gate) -> Part:
    return replace(part, tensors={name: gate.late(tensor) for name, tensor in part.tensors.items()}, ready=gate)


@pytest.fixture(scope="module")
def lab(make_tiny: Any) -> Lab:
    return Lab(make_tiny("dense"))


def engine_over(stage: Any, **settings: Any) -> Engine:
    return Engine(
        Pipeline([stage]), PrefixCache(local_tiers(1 << 28)), EngineSettings(context=2048, grid=64, **settings)
    ).start()


def test_tokens_go_out_while_copies_are_late_and_nothing_is_published_before_they_are_settled(lab: Lab) -> None:
    stage = LateStage(lab.stage())
    engine = engine_over(stage)
    answer = Answer(engine, PROMPT, max_tokens=8)
    assert answer.finished.completion_tokens == 8
    assert engine.prefixes.known_length(PROMPT.tokens) == 0
    stage.open_gates()
    engine.stop()
    assert engine.prefixes.known_length(PROMPT.tokens) == 150
    snapshots = [engine.prefixes.at_hand(entry) for entry in engine.prefixes.entries()]
    assert all(copies_done(snapshot.parts) for snapshot in snapshots if snapshot)


def test_a_prompt_that_comes_while_copies_are_late_waits_for_them_and_computes_nothing_again(lab: Lab) -> None:
    stage = LateStage(lab.stage())
    stage.in_time = True
    engine = engine_over(stage)
    busy = Answer(engine, Prompt(random_tokens(40, 2)), max_tokens=1500)  # so that the engine is never idle
    assert Answer(engine, PROMPT).finished.cache.restored == 0
    assert Answer(engine, PROMPT).finished.cache.restored == 150
    engine.cancel(busy.id)
    assert busy.finished
    engine.stop()


class FullStage:
    """A stage that never has room for a further capture; what happens is written down."""

    def __init__(self, stage: LocalStage, happened: list[str]) -> None:
        self._stage, self._happened = stage, happened

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def has_room_for_capture(self, others: int = 0) -> bool:
        return False

    def forward(self, batch: Batch, *args: Any) -> Any:
        self._happened.append("chunk" if batch.rows > len(batch.segments) else "rows")
        return self._stage.forward(batch, *args)

    def begin_capture(self, slot: int) -> Callable[[], list[Part]]:
        parts = self.capture(slot)
        return lambda: parts

    def capture(self, slot: int) -> list[Part]:
        self._happened.append("capture")
        return self._stage.capture(slot)


@pytest.mark.parametrize("max_gap", [None, 0.05], ids=["in one batch", "in turns"])
@pytest.mark.parametrize("length", [60, 64, 150, 300])
def test_where_a_capture_would_wait_other_chunks_are_launched_first_and_none_is_lost(
    lab: Lab, max_gap: float | None, length: int
) -> None:
    """Prompts of one chunk and of several, of which two may be under way."""
    happened = list[str]()
    cache = RecordingCache(local_tiers(1 << 28))
    settings = EngineSettings(context=2048, grid=64, async_steps=1, turns=max_gap is not None, max_gap=max_gap)
    engine = Engine(Pipeline([FullStage(lab.stage(slots=4), happened)]), cache, settings).start()
    prompts = [Prompt(random_tokens(length, seed)) for seed in range(4)]
    with arriving_together(engine):
        answers = [Answer(engine, prompt, max_tokens=6) for prompt in prompts]
    assert all(len(answer.tokens) == 6 for answer in answers)
    again = [Answer(engine, prompt, max_tokens=6) for prompt in prompts]
    assert [answer.finished.cache.restored for answer in again] == [length] * 4
    assert [answer.tokens for answer in again] == [answer.tokens for answer in answers]
    engine.stop()
    if max_gap is not None and length <= 64:
        assert happened[:3] == ["chunk", "chunk", "capture"], "the second prompt's chunk does not wait"
    at_end = [snapshot for snapshot in cache.seen if len(snapshot.tokens) == length]
    assert len(at_end) == 4
    assert all(same_bits(snapshot, lab.cold(snapshot)) for snapshot in at_end)


class CrowdedStage(FullStage):
    """One that has room when the test says so."""

    def __init__(self, stage: LocalStage, happened: list[str]) -> None:
        super().__init__(stage, happened)
        self.room = False

    def has_room_for_capture(self, others: int = 0) -> bool:
        return self.room


class Crowd:
    """An engine that keeps slots, whose answers end while there is no room for what they leave."""

    def __init__(self, lab: Lab, **settings: Any) -> None:
        self.happened = list[str]()
        self.stage = CrowdedStage(lab.stage(slots=2), self.happened)
        self.engine = lab.engine(stages=[self.stage], keeps=True, **settings)

    def ask(self, prompt: Prompt) -> tuple[Answer, tuple[int, ...]]:
        """And all tokens that the state behind the answer has consumed."""
        answer = Answer(self.engine, prompt, max_tokens=6)
        return answer, (*prompt.tokens, *answer.tokens[:-1])

    @property
    def captures(self) -> int:
        return self.happened.count("capture")

    def known(self, tokens: tuple[int, ...]) -> int:
        return self.engine.prefixes.known_length(tokens)

    def stop(self, lab: Lab) -> None:
        """All that was captured is what a run that never stopped leaves."""
        self.engine.stop()
        assert isinstance(self.engine.prefixes, RecordingCache)
        for snapshot in self.engine.prefixes.seen:
            if not any(stretch.how == "verify" for stretch in snapshot.stretches):
                assert same_bits(snapshot, lab.never_stopped(snapshot))
        assert all(entry.pins == 0 for entry in self.engine.prefixes.entries())


def test_the_end_of_an_answer_waits_for_no_room_and_its_state_is_captured_when_there_is_some(lab: Lab) -> None:
    """It lies in the kept slot meanwhile, and idle time is enough."""
    crowd = Crowd(lab)
    _, first = crowd.ask(PROMPT)
    wait_until(lambda: crowd.known(first) == len(PROMPT.tokens))
    before = crowd.captures
    assert before == 1, "of the prompt alone"
    assert crowd.engine.kept_length(first, "") == len(first)
    crowd.stage.room = True
    wait_until(lambda: crowd.known(first) == len(first))
    assert crowd.captures == before + 1
    crowd.stop(lab)


def test_while_others_answer_states_are_captured_one_after_the_other_as_there_is_room(lab: Lab) -> None:
    crowd = Crowd(lab)
    running = Answer(crowd.engine, Prompt(random_tokens(40, 2)), max_tokens=1500)
    _, first = crowd.ask(PROMPT)
    crowd.stage.room = True
    wait_until(lambda: crowd.known(first) == len(first))
    assert not running._done.is_set()
    crowd.engine.cancel(running.id)
    assert running.finished
    crowd.stop(lab)


@pytest.mark.parametrize("drafts", [NO_DRAFTS, Drafts("lookup", PromptLookup, None)], ids=["plain", "lookup"])
def test_a_state_that_waits_in_a_slot_is_captured_before_the_next_turn_goes_on_in_it(lab: Lab, drafts: Drafts) -> None:
    crowd = Crowd(lab, drafts=drafts)
    repeats = Prompt(PROMPT.tokens[:20] * 6)
    _, first = crowd.ask(repeats)
    answer, second = crowd.ask(Prompt((*first, *random_tokens(30, 5))))
    assert dict(answer.finished.cache.restored_from)["device"] == len(first)
    crowd.stage.room = True
    wait_until(lambda: crowd.known(second) == len(second))
    assert crowd.known((*first, 3)) == len(first), "another turn may part from it there"
    crowd.stop(lab)


def test_a_state_that_waits_in_a_slot_is_captured_before_somebody_else_gets_the_slot(lab: Lab) -> None:
    crowd = Crowd(lab)
    said = [crowd.ask(Prompt(random_tokens(100, seed)))[1] for seed in range(4)]  # two slots
    wait_until(lambda: [crowd.known(tokens) for tokens in said] == [105, 105, 100, 100])
    crowd.stop(lab)
    assert [crowd.known(tokens) for tokens in said] == [105] * 4, "what waits is captured before the end"


def test_an_engine_that_captures_nothing_more_drops_what_waits_in_slots(lab: Lab) -> None:
    crowd = Crowd(lab)
    _, first = crowd.ask(PROMPT)
    wait_until(lambda: crowd.known(first) == len(PROMPT.tokens))
    crowd.engine.degrade("the file was written to")
    before = crowd.captures
    answer, _ = crowd.ask(Prompt((*first, *random_tokens(30, 5))))
    assert dict(answer.finished.cache.restored_from)["device"] == len(first)
    crowd.stop(lab)
    assert crowd.captures == before and crowd.known(first) == len(PROMPT.tokens)


def no_memory(slot: int, later: bool = False) -> Any:
    raise MemoryError("no memory for the copy")


def test_an_engine_ends_though_what_waits_in_slots_cannot_be_captured(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = Crowd(lab)
    _, first = crowd.ask(PROMPT)
    wait_until(lambda: crowd.known(first) == len(PROMPT.tokens))
    monkeypatch.setattr(crowd.engine.pipeline, "capture", no_memory)
    ending = threading.Thread(target=crowd.engine.stop, daemon=True)
    ending.start()
    ending.join(60)
    assert not ending.is_alive()
    assert crowd.known(first) == len(PROMPT.tokens)


def test_a_slot_that_could_not_be_kept_owes_nothing(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next state is that of another prompt, as long as this one."""
    crowd, failures = Crowd(lab), [MemoryError("no memory for the list")]
    keep = crowd.engine._roster.keep

    def fails_once(*what: Any) -> None:
        while failures:
            raise failures.pop()
        keep(*what)

    monkeypatch.setattr(crowd.engine._roster, "keep", fails_once)
    Answer(crowd.engine, PROMPT, max_tokens=6).wait()
    _, second = crowd.ask(Prompt(random_tokens(150, 2)))
    crowd.stage.room = True
    wait_until(lambda: crowd.known(second) == len(second))
    crowd.stop(lab)
    assert isinstance(crowd.engine.prefixes, RecordingCache)
    assert [len(snapshot.tokens) for snapshot in crowd.engine.prefixes.seen] == [150, 150, 155]


def test_what_waits_in_slots_is_not_trusted_once_a_step_has_failed(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    crowd = Crowd(lab)
    _, first = crowd.ask(PROMPT)
    wait_until(lambda: crowd.known(first) == len(PROMPT.tokens))
    before = crowd.captures
    with monkeypatch.context() as patch:
        patch.setattr(crowd.engine._launcher, "launch_next", lambda: 1 // 0)
        Answer(crowd.engine, Prompt(random_tokens(60, 9)), max_tokens=2).wait()
    _, second = crowd.ask(Prompt(random_tokens(70, 3)))
    crowd.stage.room = True
    wait_until(lambda: crowd.known(second) == len(second))
    assert crowd.captures == before + 2 and crowd.known(first) == len(PROMPT.tokens)
    crowd.stop(lab)


def test_an_answer_that_ends_in_a_kept_slot_is_told_though_room_for_it_cannot_be_made(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    crowd = Crowd(lab)

    def fails(sequence: Any = None) -> bool:
        raise RuntimeError("no slot can be given up")

    monkeypatch.setattr(type(crowd.engine._roster.kept), "too_many", property(lambda kept: True))
    monkeypatch.setattr(crowd.engine._endings, "make_room", fails)
    answer = Answer(crowd.engine, PROMPT, max_tokens=6)
    assert len(answer.tokens) == 6
    monkeypatch.undo()
    crowd.engine.stop()


def test_equal_answers_that_wait_in_slots_are_captured_once(lab: Lab) -> None:
    crowd = Crowd(lab)
    with arriving_together(crowd.engine):
        answers = [Answer(crowd.engine, PROMPT, max_tokens=6) for _ in range(2)]
    known = (*PROMPT.tokens, *answers[0].tokens[:-1])
    assert answers[1].tokens == answers[0].tokens
    wait_until(lambda: crowd.known(known) == len(PROMPT.tokens))
    assert crowd.captures == 1, "of the prompt"
    crowd.stage.room = True
    wait_until(lambda: crowd.known(known) == len(known))
    assert crowd.captures == 2
    crowd.stop(lab)


def test_of_a_capture_that_fails_in_one_place_the_rest_is_finished(lab: Lab) -> None:
    """What lies copied on a device would take others' room for ever."""
    pipeline, finished = Pipeline([lab.stage()]), list[str]()

    def begun(finish: Callable[[], Any]) -> Future[Callable[[], Any]]:
        future = Future[Callable[[], Any]]()
        future.set_result(finish)
        return future

    def fails() -> Any:
        raise CopyFailed("of the first stage")

    result = Future[tuple[Part, ...]]()
    pipeline._begun.append((result, [begun(fails), begun(lambda: finished.append("second") or ())]))
    pipeline.finish_captures()
    assert finished == ["second"]
    with pytest.raises(CopyFailed, match="of the first stage"):
        result.result()
    pipeline.stop()


def test_a_state_that_cannot_be_captured_from_its_slot_is_lost_alone(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    crowd = Crowd(lab)
    _, first = crowd.ask(PROMPT)
    wait_until(lambda: crowd.known(first) == len(PROMPT.tokens))

    with monkeypatch.context() as patch:
        patch.setattr(crowd.engine.pipeline, "capture", no_memory)
        crowd.stage.room = True
        wait_until(lambda: "the state at 155 tokens could not be captured: no memory" in caplog.text)
    assert crowd.known(first) == len(PROMPT.tokens)
    answer, second = crowd.ask(Prompt((*first, *random_tokens(30, 5))))
    assert dict(answer.finished.cache.restored_from)["device"] == len(first)
    wait_until(lambda: crowd.known(second) == len(second))
    crowd.stop(lab)


def test_the_device_has_two_steps_while_the_rest_of_a_capture_is_done(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes longer than one."""
    engine, happened = lab.engine(async_steps=1), list[str]()
    pipeline, forward, finish = engine.pipeline, engine.pipeline.forward, engine.pipeline.finish_captures

    def note_finish() -> None:
        if pipeline.has_begun_captures:
            happened.append(f"finish beside {len(engine._flights)}")
        finish()

    monkeypatch.setattr(pipeline, "finish_captures", note_finish)
    monkeypatch.setattr(pipeline, "forward", lambda *step: (happened.append("step"), forward(*step))[1])
    assert len(Answer(engine, Prompt(random_tokens(60, 1)), max_tokens=8).tokens) == 8
    engine.stop()
    assert happened[:5] == ["step"] * 4 + ["finish beside 2"], "and the token behind the prompt's is out by then"


def test_a_prompt_waits_for_no_copies_of_unrelated_prompts(lab: Lab) -> None:
    stage = LateStage(lab.stage())
    engine = engine_over(stage)
    busy = Answer(engine, PROMPT, max_tokens=1500)
    wait_until(lambda: any(isinstance(event, Token) for event in busy.events))  # its prompt is captured
    assert Answer(engine, Prompt(random_tokens(40, 2))).finished.completion_tokens == 4
    assert not any(gate.waited.is_set() for gate in stage.gates)
    stage.open_gates()
    engine.cancel(busy.id)
    assert busy.finished
    engine.stop()


class Lost:
    """Copies that never come, which is known at once or when somebody waits for them."""

    def __init__(self, at_once: bool) -> None:
        self.done = at_once

    def wait(self) -> None:
        self.done = True
        raise CopyFailed("out of memory")


class LosingStage(LateStage):
    """Loses the copies of its first capture."""

    def __init__(self, stage: LocalStage, ready: Lost) -> None:
        super().__init__(stage)
        self._lost: Lost | None = ready

    def begin_capture(self, slot: int) -> Callable[[], list[Part]]:
        parts = self.capture(slot)
        return lambda: parts

    def capture(self, slot: int) -> list[Part]:
        parts, lost, self._lost = self._stage.capture(slot), self._lost, None
        return parts if lost is None else [replace(part, ready=lost) for part in parts]


@pytest.mark.parametrize("at_once", [True, False])
def test_a_capture_whose_copies_never_come_is_not_published_and_holds_nobody_up(
    lab: Lab, caplog: pytest.LogCaptureFixture, at_once: bool
) -> None:
    engine = engine_over(LosingStage(lab.stage(), Lost(at_once)))
    assert Answer(engine, PROMPT).finished.completion_tokens == 4
    assert Answer(engine, Prompt(random_tokens(100, 2))).finished.completion_tokens == 4
    engine.stop()
    lost = [record.message for record in caplog.records if "could not be captured" in record.message]
    assert len(lost) == 1
    assert "out of memory" in lost[0]
    assert not any(record.exc_info for record in caplog.records), "the engine's step went on"
    assert engine.prefixes.known_length(random_tokens(100, 2)) == 100


@pytest.fixture
def filled(lab: Lab) -> LateStage:
    """Slot 0 has seen the prompt."""
    stage = LateStage(lab.stage())
    stage.open(0)
    stage.forward(Batch((Segment(0, 0, PROMPT.tokens, Wanted.NONE),)), None)
    return stage


def once_complete(stage: LateStage, read: Callable[[], T]) -> T:
    """What a reader reads, who comes while the last capture's copies are late."""
    (gate,) = stage.gates
    with ThreadPoolExecutor(1) as readers:
        reading = readers.submit(read)
        wait_until(lambda: gate.waited.is_set() or reading.done())
        gate.open()
        return reading.result()


def test_a_restore_waits_for_the_copies_it_reads(filled: LateStage) -> None:
    parts = filled.capture(0)
    once_complete(filled, lambda: filled.restore(1, len(PROMPT.tokens), parts))
    restored, captured = (export_parts(filled._stage.capture(slot), {}).tensors for slot in (1, 0))
    assert all(torch.equal(restored[name], captured[name]) for name in captured)


def test_a_link_sends_only_complete_copies(filled: LateStage) -> None:
    parts = filled.capture(0)
    # As a link does: the bytes are those at the time of sending.
    sent = once_complete(
        filled, lambda: {name: tensor.clone() for name, tensor in export_parts(parts, {}).tensors.items()}
    )
    captured = export_parts(filled._stage.capture(0), {}).tensors
    assert all(torch.equal(sent[name], captured[name]) for name in captured)


def test_a_request_that_comes_while_copies_are_under_way_does_not_wait_for_them(lab: Lab) -> None:
    stage = LateStage(lab.stage())
    engine = engine_over(stage)
    assert Answer(engine, PROMPT, max_tokens=4).finished
    wait_until(lambda: not engine._publisher.unfinished)  # from here on only the copies are missing
    assert Answer(engine, Prompt(random_tokens(70, 9)), max_tokens=4, patience=20.0).finished
    assert engine.prefixes.known_length(PROMPT.tokens) == 0
    stage.open_gates()
    wait_until(lambda: engine.prefixes.known_length(PROMPT.tokens) == 150)
    engine.stop()


def test_an_audit_waits_for_the_copies_it_compares(lab: Lab) -> None:
    stage = LateStage(lab.stage())
    stage.in_time = True
    engine = engine_over(stage, audit=1)
    assert Answer(engine, PROMPT).finished
    assert Answer(engine, PROMPT).finished.cache.restored == 150
    wait_until(lambda: engine.status().audits == 1)
    assert engine.status().audit_mismatches == 0
    engine.stop()


class TellingStage:
    """Writes down when captures begin and when they are finished."""

    def __init__(self, stage: LocalStage, happened: list[str]) -> None:
        self._stage, self._happened = stage, happened

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def begin_capture(self, slot: int) -> Callable[[], list[Part]]:
        self._happened.append("begun")
        finish = self._stage.begin_capture(slot)

        def finish_and_tell() -> list[Part]:
            self._happened.append("finished")
            return finish()

        return finish_and_tell


def test_the_first_token_goes_out_before_the_greater_part_of_a_capture(lab: Lab) -> None:
    happened = list[str]()
    engine = engine_over(TellingStage(lab.stage(), happened))
    answer = Answer(engine, Prompt(random_tokens(50, 3)), max_tokens=3, at_token=lambda _: happened.append("token"))
    assert answer.finished.cache.published == 52
    engine.stop()
    assert happened[:4] == ["begun", "token", "token", "finished"], "and so does the next one, which follows soon"


def test_a_capture_holds_what_the_slot_held_when_it_began(lab: Lab) -> None:
    stage, tokens = lab.stage(), random_tokens(150, 4)
    stage.open(0)
    stage.forward(Batch((Segment(0, 0, tokens[:100]),)), None)
    whole = export_parts(stage.capture(0), {}).tensors
    finish = stage.begin_capture(0)
    stage.forward(Batch((Segment(0, 100, tokens[100:]),)), None)
    stage.close(0)
    later = export_parts(finish(), {}).tensors
    assert later.keys() == whole.keys() and all(torch.equal(later[name], whole[name]) for name in whole)


def test_a_client_that_asks_again_at_once_does_not_wait_for_the_capture_of_its_last_answer(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = list[str]()
    monkeypatch.setattr("rekindle.engine.engine.LINGER", 3600.0)
    engine = engine_over(TellingStage(lab.stage(), happened))
    ask = partial(Answer, engine, max_tokens=3, at_token=lambda _: happened.append("token"))
    assert ask(Prompt(random_tokens(50, 5))).finished.cache.published == 52
    before, happened[:] = happened[:], []
    assert before.count("begun") == 2 and before.count("finished") == 1, "the prompt's end, and the answer's"
    assert ask(Prompt(random_tokens(50, 6))).finished.cache.published == 52
    assert happened.index("token") < happened.index("finished")
    engine.stop()
    assert len(engine.prefixes.entries()) == 4


def test_logits_that_cannot_be_brought_end_their_own_request_alone(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_over(lab.stage())
    prompt = Prompt(random_tokens(40, 7))
    busy = Answer(engine, prompt, max_tokens=600)
    wait_until(lambda: engine.prefixes.known_length(prompt.tokens) == 40)  # its own were brought
    bring = engine._publisher.bring
    failing = iter([True])
    monkeypatch.setattr(engine._publisher, "bring", lambda row: 1 // 0 if next(failing, False) else bring(row))
    other = Answer(engine, Prompt(random_tokens(50, 8)), max_tokens=2)
    with pytest.raises(AssertionError, match="division"):
        assert other.finished
    assert busy.finished.completion_tokens == 600
    engine.stop()

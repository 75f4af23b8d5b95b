"""The line of a stage elsewhere keeps the other end supplied, and keeps the order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch

from rekindle.batch import Batch, Segment
from rekindle.errors import StageLost
from rekindle.spec import Span
from rekindle.stages.lines import LineStep, SendingLine, line_for
from rekindle.stages.types import StageOutput

PATIENCE = 10  # seconds; only a broken line takes so long


class PaperAnswer:
    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.released = threading.Event()

    def result(self) -> StageOutput:
        assert self.released.wait(PATIENCE), f"the answer for slot {self.slot} was never released"
        return StageOutput(torch.tensor([[float(self.slot)]]), None)


class PaperElsewhere:
    """Notes what reaches it, in order; answers when the test lets it."""

    span, slots, device = Span(1, 2), 8, "elsewhere"

    def __init__(self) -> None:
        self.heard: list[str] = []
        self.answers: list[PaperAnswer] = []
        self.arrived = threading.Semaphore(0)  # counts batches
        self.lost: Exception | None = None

    def submit(self, batch: Batch, hidden: torch.Tensor | None) -> PaperAnswer:
        if self.lost is not None:
            raise self.lost
        slot = batch.segments[0].slot
        self.heard.append(f"forward {slot}")
        self.answers.append(PaperAnswer(slot))
        self.arrived.release()
        return self.answers[-1]


@pytest.fixture
def stage() -> PaperElsewhere:
    return PaperElsewhere()


@pytest.fixture
def line(stage: PaperElsewhere) -> Iterator[SendingLine]:
    line = SendingLine(stage)  # type: ignore[arg-type]  # only what a line asks of it
    yield line
    for answer in stage.answers:
        answer.released.set()
    line.stop()


def step(slot: int, before: Future[StageOutput] | None = None) -> LineStep:
    return LineStep(Batch((Segment(slot, 0, (1,)),)), before, Future())


def done(skipping: frozenset[int] = frozenset()) -> Future[StageOutput]:
    future: Future[StageOutput] = Future()
    future.set_result(StageOutput(torch.zeros(1, 1), None, skipping))
    return future


def test_the_next_batch_is_sent_before_the_last_one_is_answered(line: SendingLine, stage: PaperElsewhere) -> None:
    first, second = step(0), step(1)
    line.enter(first)
    line.enter(second)
    assert stage.heard == ["forward 0", "forward 1"]
    assert not first.after.done()
    for answer, each in zip(stage.answers, (first, second), strict=True):
        answer.released.set()
        output = each.after.result(PATIENCE)
        assert output.hidden is not None and output.hidden.item() == answer.slot


def test_whoever_completes_the_stage_before_sends(line: SendingLine, stage: PaperElsewhere) -> None:
    before: Future[StageOutput] = Future()
    line.enter(step(0, before))
    assert stage.heard == []
    before.set_result(StageOutput(torch.zeros(1, 1), None))
    assert stage.heard == ["forward 0"]


def test_a_batch_that_is_ready_early_waits_its_turn(line: SendingLine, stage: PaperElsewhere) -> None:
    before: Future[StageOutput] = Future()
    line.enter(step(0, before))
    line.enter(step(1, done()))
    assert stage.heard == []
    before.set_result(StageOutput(torch.zeros(1, 1), None))
    assert stage.heard == ["forward 0", "forward 1"]


def test_no_batch_overtakes_a_call(line: SendingLine, stage: PaperElsewhere) -> None:
    began, may_end = threading.Event(), threading.Event()

    def capture() -> str:
        began.set()
        assert may_end.wait(PATIENCE)
        stage.heard.append("capture")
        return "parts"

    first, second = step(0), step(0, done())
    line.enter(first)
    stage.answers[0].released.set()
    parts = line.post(capture)
    line.enter(second)
    assert began.wait(PATIENCE)
    assert stage.heard == ["forward 0"]
    may_end.set()
    assert parts.result(PATIENCE) == "parts"
    for _ in range(2):
        assert stage.arrived.acquire(timeout=PATIENCE)
    stage.answers[1].released.set()
    second.after.result(PATIENCE)
    assert stage.heard == ["forward 0", "capture", "forward 0"]


def test_a_call_sees_every_answer_before_it(line: SendingLine, stage: PaperElsewhere) -> None:
    first = step(0)
    line.enter(first)
    seen = line.post(first.after.done)
    stage.answers[0].released.set()
    assert seen.result(PATIENCE) is True


def test_a_batch_that_failed_before_is_not_sent(line: SendingLine, stage: PaperElsewhere) -> None:
    before: Future[StageOutput] = Future()
    before.set_exception(ValueError("out of pages"))
    failed, next_one = step(0, before), step(1, done())
    line.enter(failed)
    line.enter(next_one)
    with pytest.raises(ValueError, match="out of pages"):
        failed.after.result(PATIENCE)
    assert stage.heard == ["forward 1"]


def test_a_lost_stage_fails_the_batch_and_not_whoever_sends_it(line: SendingLine, stage: PaperElsewhere) -> None:
    stage.lost = StageLost("gone")
    lost = step(0, done())
    line.enter(lost)
    with pytest.raises(StageLost):
        lost.after.result(PATIENCE)


def test_slots_that_left_out_pages_are_told_onwards(line: SendingLine, stage: PaperElsewhere) -> None:
    each = step(3, done(frozenset({3})))
    line.enter(each)
    stage.answers[0].released.set()
    assert each.after.result(PATIENCE).skipping == {3}


def test_a_stage_that_can_send_gets_a_line_that_sends() -> None:
    class Whole(PaperElsewhere):
        def __getattr__(self, name: str) -> object:
            return lambda *_: None

    line = line_for(Whole())  # type: ignore[arg-type]
    assert isinstance(line, SendingLine)
    line.stop()

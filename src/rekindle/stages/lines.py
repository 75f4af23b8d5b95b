"""The queue of one stage, and the thread that works it off.

Steps and calls leave a line in the order in which they came. A step is one batch: it waits for the stage before.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch

from rekindle.batch import Batch
from rekindle.stages.types import Sending, Stage, StageOutput, UnderWay

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class LineStep:
    """A batch at one stage."""

    batch: Batch
    before: Future[StageOutput] | None  # from the stage before, None at the first
    after: Future[StageOutput]

    def complete(self, run: Callable[[Batch, torch.Tensor | None], StageOutput]) -> None:
        """Wait for the stage before, run, and hand the output on."""
        try:
            earlier = self.before.result() if self.before is not None else None
            output = run(self.batch, earlier.hidden if earlier is not None else None)
            self.after.set_result(output if earlier is None else _with_earlier(output, earlier))
        except BaseException as error:
            self.after.set_exception(error)


def _with_earlier(output: StageOutput, earlier: StageOutput) -> StageOutput:
    """What the last stage says for all of them."""
    if not earlier.skipping and not earlier.features:
        return output
    skipping, features = earlier.skipping | output.skipping, earlier.features + output.features
    return replace(output, skipping=skipping, features=features)


class Line(Protocol):
    def enter(self, step: LineStep) -> None: ...
    def post(self, call: Callable[[], T]) -> Future[T]: ...
    def stop(self) -> None: ...


def line_for(stage: Stage) -> Line:
    return SendingLine(stage) if isinstance(stage, Sending) else WorkingLine(stage)


class CallLine:
    """Calls, which a thread of its own makes in order."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._work.put(lambda: _answer(future, call))
        return future

    def stop(self) -> None:
        self._work.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()


class WorkingLine(CallLine):
    """Of a stage in this process: its thread runs everything."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        super().__init__(f"stage {stage.span}")

    def enter(self, step: LineStep) -> None:
        self._work.put(lambda: step.complete(self._stage.forward))


class SendingLine:
    """Of a stage elsewhere: a step is sent by the thread that completes the stage before; this line's own thread only
    takes answers.

    So the other end has its next batch before the last one's answer has been looked at, and does not wait for a thread
    here to wake up.
    """

    def __init__(self, stage: Sending) -> None:
        self._stage = stage
        self._waiting: deque[LineStep | Callable[[], None] | None] = deque()
        self._sent: deque[tuple[LineStep, UnderWay | BaseException]] = deque()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"stage {stage.span}", daemon=True)
        self._thread.start()

    def enter(self, step: LineStep) -> None:
        with self._changed:
            self._waiting.append(step)
        if step.before is None:
            self._send()
        else:
            step.before.add_done_callback(lambda _: self._send())

    def post(self, call: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._put(lambda: _answer(future, call))
        return future

    def stop(self) -> None:
        self._put(None)
        self._thread.join()

    def _put(self, call: Callable[[], None] | None) -> None:
        with self._changed:
            self._waiting.append(call)
            self._changed.notify()

    def _send(self) -> None:
        """Every step at the front whose stage before is done. From any thread."""
        with self._changed:
            while self._waiting and isinstance(step := self._waiting[0], LineStep) and _is_ready(step):
                self._sent.append((step, self._submit(step)))
                self._waiting.popleft()
            self._changed.notify()

    def _submit(self, step: LineStep) -> UnderWay | BaseException:
        try:
            hidden = step.before.result().hidden if step.before is not None else None
            return self._stage.submit(step.batch, hidden)
        except BaseException as error:  # raised again where the answer would have come
            return error

    def _run(self) -> None:
        while (work := self._next_work()) is not None:
            work()

    def _next_work(self) -> Callable[[], None] | None:
        """An answer to wait for, or a call behind everything that was sent."""
        with self._changed:
            self._changed.wait_for(self._has_work)
            if self._sent:
                step, answer = self._sent.popleft()
                return lambda: step.complete(lambda *_: _result(answer))
            call = self._waiting[0]
        assert not isinstance(call, LineStep), "the line's thread is woken for answers and calls"
        return partial(self._call, call) if call is not None else None

    def _call(self, call: Callable[[], None]) -> None:
        """It stands at the front until it has run, so that no step overtakes it."""
        call()
        with self._changed:
            self._waiting.popleft()
        self._send()

    def _has_work(self) -> bool:
        return bool(self._sent) or bool(self._waiting and not isinstance(self._waiting[0], LineStep))


def _is_ready(step: LineStep) -> bool:
    return step.before is None or step.before.done()


def _result(answer: UnderWay | BaseException) -> StageOutput:
    if isinstance(answer, BaseException):
        raise answer
    return answer.result()


def _answer(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)

"""The stages in order, as one. Batches flow through them; state verbs reach all of them, in step.

With one stage everything runs in the caller's thread. With several, each has a worker thread with a line of its own:
a batch enters the line of the next stage when the stage before it is done, so the stages work on different batches at
the same time. State verbs stand in the same lines, so each stage meets them at the same point of its work: a capture
that was asked for between two chunks sees every stage between these two chunks.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch

from rekindle.batch import Batch
from rekindle.errors import RekindleError, StageLost
from rekindle.snapshots.types import Part
from rekindle.spec import Span
from rekindle.stages.lines import Step, line_for
from rekindle.stages.types import Ahead, InProcess, PageCount, Recoverable, Stage, StageOutput, TwoPhaseRestore

T = TypeVar("T")


class Pipeline:
    def __init__(self, stages: Sequence[Stage], take_in: Callable[[Span, RekindleError], Stage] | None = None) -> None:
        """take_in: another stage for a span whose own stays away, for the reason given; or raises StageLost."""
        _check_tiling([stage.span for stage in stages])
        self.stages = tuple(stages)
        self._take_in = take_in
        self._lines = [line_for(stage) for stage in stages] if len(stages) > 1 else []

    @property
    def depth(self) -> int:
        """How many batches keep every stage busy."""
        return len(self.stages)

    @property
    def slots(self) -> int:
        return min(stage.slots for stage in self.stages)

    def pages(self) -> PageCount:
        """Of the stage with the fewest free pages: what every sequence can count on."""
        return min((stage.pages() for stage in self.stages), key=lambda count: count.free)

    def work(self) -> Counter[str]:
        """How the stages of this process have worked, all together."""
        counts = Counter[str]()
        for stage in self.stages:
            if isinstance(stage, InProcess):
                counts.update(stage.work())
        return counts

    def settle(self) -> None:
        """Behind all that is in line: each stage of this process finishes its expert swaps, and what it has found out
        about its last forwards is raised."""
        self._on_all(_settle)

    @property
    def elsewhere(self) -> list[str]:
        """The stages outside this process, which cannot be asked what went wrong."""
        return [f"layers {stage.span}" for stage in self.stages if not isinstance(stage, InProcess)]

    @property
    def run_ahead(self) -> int:
        """Steps that may be handed over before the last one's tokens are known: what keeps a GPU without gaps."""
        return int(len(self.stages) == 1 and self.stages[0].device.startswith("cuda"))

    @property
    def logits_device(self) -> torch.device:
        """Where the last stage's logits come to lie in this process."""
        device = self.stages[-1].device
        return torch.device(device if device.startswith("cuda") else "cpu")

    def forward(self, batch: Batch, ahead: Ahead | None = None) -> Future[StageOutput]:
        if not self._lines:
            return _done(lambda: self.stages[0].forward(batch, None, ahead))
        assert ahead is None, "only a pipeline of one stage runs ahead"
        # It stands in every line at once, so that the order in all lines is the order of the calls.
        before: Future[StageOutput] | None = None
        for line in self._lines:
            after: Future[StageOutput] = Future()
            line.enter(Step(batch, before, after))
            before = after
        return after

    def open(self, slot: int) -> None:
        self._on_all(lambda stage: stage.open(slot))

    def close(self, slot: int) -> None:
        self._on_all(lambda stage: _close(stage, slot))

    def capture(self, slot: int) -> Future[tuple[Part, ...]]:
        """The parts of all stages, in layer order. Taken where it stands in line; the result may come later."""
        futures = self._post_all(lambda stage: stage.capture(slot))
        result: Future[tuple[Part, ...]] = Future()

        def gather() -> None:
            try:
                result.set_result(tuple(part for future in futures for part in future.result()))
            except BaseException as error:
                result.set_exception(error)

        _when_all_done(futures, gather)
        return result

    def restore(self, slot: int, position: int, parts: Sequence[Part]) -> None:
        """All stages take their layers, or none does: first each one checks, then each one adopts."""
        if error := _first_error(self._post_all(lambda stage: _prepare(stage, slot, position, parts))):
            self._on_all(lambda stage: _abort(stage, slot))
            raise error
        if error := _first_error(self._post_all(lambda stage: _commit(stage, slot, position, parts))):
            self.close(slot)
            raise error

    def rewind(self, slot: int, position: int) -> None:
        self._on_all(lambda stage: stage.rewind(slot, position))

    def recover(self) -> None:
        """Bring lost stages back, empty, or have another take their span; raises StageLost if neither can be.

        It also raises where no stage says that it is lost: then whatever failed would fail again, for ever.
        First everything in line comes to its end, so that nothing meant for the lost state meets the new one.
        """
        for line in self._lines:
            line.post(lambda: None).result()
        lost = [(i, s) for i, s in enumerate(self.stages) if isinstance(s, Recoverable) and s.lost is not None]
        if not lost:
            raise StageLost("no stage says that it is lost, so there is none to start again")
        for index, stage in lost:
            self._bring_back(index, stage)

    def _bring_back(self, index: int, stage: Recoverable) -> None:
        try:
            stage.recover()
        except RekindleError as error:
            if self._take_in is None:
                raise
            self._replace(index, self._take_in(self.stages[index].span, error))

    def _replace(self, index: int, stage: Stage) -> None:
        old = self.stages[index]
        assert stage.span == old.span, f"layers {old.span} are to be taken in, {stage.span} were loaded"
        if self._lines:
            self._lines[index].stop()
            self._lines[index] = line_for(stage)
        self.stages = (*self.stages[:index], stage, *self.stages[index + 1 :])
        old.stop()

    def stop(self) -> None:
        for line in self._lines:
            line.stop()
        for stage in self.stages:
            stage.stop()

    def _post_all(self, verb: Callable[[Stage], T]) -> list[Future[T]]:
        if not self._lines:
            return [_done(lambda: verb(self.stages[0]))]
        return [line.post(partial(verb, stage)) for line, stage in zip(self._lines, self.stages, strict=True)]

    def _on_all(self, verb: Callable[[Stage], None]) -> None:
        for future in self._post_all(verb):
            future.result()


def _settle(stage: Stage) -> None:
    if isinstance(stage, InProcess):
        stage.settle()


def _close(stage: Stage, slot: int) -> None:
    """A lost stage holds no slots, so there is nothing to close."""
    with suppress(StageLost):
        stage.close(slot)


def _prepare(stage: Stage, slot: int, position: int, parts: Sequence[Part]) -> None:
    if isinstance(stage, TwoPhaseRestore):
        stage.prepare_restore(slot, position, parts)


def _commit(stage: Stage, slot: int, position: int, parts: Sequence[Part]) -> None:
    if isinstance(stage, TwoPhaseRestore):
        stage.commit_restore(slot)
    else:
        stage.restore(slot, position, parts)


def _abort(stage: Stage, slot: int) -> None:
    """A lost stage holds nothing that was prepared."""
    if isinstance(stage, TwoPhaseRestore):
        with suppress(StageLost):
            stage.abort_restore(slot)


def _first_error(futures: Sequence[Future[T]]) -> BaseException | None:
    """After the last of them has come back."""
    errors = [future.exception() for future in futures]
    return next((error for error in errors if error is not None), None)


def _done(call: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future


def _when_all_done(futures: Sequence[Future[T]], then: Callable[[], None]) -> None:
    """Call `then` once, after the last of them."""
    left = len(futures)
    lock = threading.Lock()

    def count(_: Future[T]) -> None:
        nonlocal left
        with lock:
            left -= 1
            last = left == 0
        if last:
            then()

    for future in futures:
        future.add_done_callback(count)


def _check_tiling(spans: Sequence[Span]) -> None:
    position = 0
    for span in spans:
        assert span.start == position, f"spans do not tile the model: {[str(s) for s in spans]}"
        position = span.stop

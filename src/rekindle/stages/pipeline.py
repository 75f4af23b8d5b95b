"""The stages in order, as one. Batches flow through them; state verbs reach all of them, in step.

With one stage everything runs in the caller's thread. With several, each has a worker thread with a line of its own:
a batch enters the line of the next stage when the stage before it is done, so the stages work on different batches at
the same time. State verbs stand in the same lines, so each stage meets them at the same point of its work: a capture
that was asked for between two chunks sees every stage between these two chunks. A drafter that reads the target's
features stands behind the last stage in the same way. No answer needs it, so its fault ends drafting and no
request.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch

from rekindle.batch import Ask, Batch
from rekindle.errors import RekindleError, StageLost
from rekindle.snapshots.types import Part, StateHolder
from rekindle.spec import Span
from rekindle.stages.lines import CallLine, Line, LineStep, line_for
from rekindle.stages.paused import PausedForward, Pausing
from rekindle.stages.types import (
    BeginsCapture,
    FeatureReader,
    InProcess,
    PageCount,
    PendingTokens,
    Recoverable,
    Stage,
    StageOutput,
    TwoPhaseRestore,
    Unseen,
)

log = logging.getLogger("rekindle.stages")

T = TypeVar("T")
Begun = tuple[Future[tuple[Part, ...]], list[Future[Callable[[], Sequence[Part]]]]]  # the result, and what finishes it


class Pipeline:
    def __init__(
        self,
        stages: Sequence[Stage],
        replace_stage: Callable[[Span, RekindleError], Stage] | None = None,
        drafter: FeatureReader | None = None,
    ) -> None:
        """replace_stage: loads another stage for a span whose own cannot be brought back, given the error; or raises
        StageLost."""
        _check_tiling([stage.span for stage in stages])
        self.stages = tuple(stages)
        self.drafter = drafter  # None from its first fault on
        self.drafter_fault: str | None = None  # in words
        self._replace_stage = replace_stage
        self._lines = [line_for(stage) for stage in stages] if len(stages) > 1 else []
        self._drafter_line = CallLine("drafter") if self._lines and drafter is not None else None
        self._begun: deque[Begun] = deque()  # captures that are to be finished

    @property
    def depth(self) -> int:
        """How many batches keep every stage busy."""
        return len(self.stages)

    @property
    def slots(self) -> int:
        return min(stage.slots for stage in self.stages)

    def pages(self) -> PageCount:
        """Of the stage with the fewest free pages: what every sequence can count on."""
        counts = [stage.pages() for stage in self.stages]
        fewest = min(counts, key=lambda count: count.free)
        # The stage with the fewest places may be another one, and so may the one whose slots are the largest.
        return replace(fewest, here=min(count.at_once for count in counts), slot=max(count.slot for count in counts))

    def has_room_for_capture(self, others: int = 0) -> bool:
        """Whether a capture, and so many others behind it, would not wait until earlier ones are on the host."""
        return all(stage.has_room_for_capture(others) for stage in self.stages if isinstance(stage, InProcess))

    def work(self) -> Counter[str]:
        """How the stages of this process have worked, all together."""
        counts = Counter[str]()
        for stage in self.stages:
            if isinstance(stage, InProcess):
                counts.update(stage.work())
        return counts

    def poll_experts(self) -> None:
        """After all that is in line: each stage of this process finishes its expert swaps, and what it has found out
        about its last forwards is raised."""
        self._on_all(_poll_experts)

    @property
    def elsewhere(self) -> list[str]:
        """The stages outside this process, which cannot be asked what went wrong."""
        return [f"layers {stage.span}" for stage in self.stages if not isinstance(stage, InProcess)]

    @property
    def async_steps(self) -> int:
        """Steps that may be handed over before the last one's tokens are known: what keeps a GPU without gaps."""
        return int(len(self.stages) == 1 and self.stages[0].device.startswith("cuda"))

    @property
    def on_cpu(self) -> bool:
        """Whether every stage computes on a CPU, of this machine or another."""
        return all(stage.device.rstrip(")").endswith("cpu") for stage in self.stages)

    @property
    def logits_device(self) -> torch.device:
        """Where the last stage's logits come to lie in this process."""
        device = self.stages[-1].device
        return torch.device(device if device.startswith("cuda") else "cpu")

    def can_pause(self, rows: int) -> bool:
        """Whether a chunk of so many rows can be run in sections, with steps of others in between."""
        stage = self.stages[0]
        return not self._lines and isinstance(stage, Pausing) and stage.can_pause(rows)

    def begin(self, batch: Batch, pending: PendingTokens | None = None) -> PausedForward:
        """Where it can: a chunk of which no layer has run yet."""
        stage, batch = self.stages[0], self._tapped(batch)
        assert isinstance(stage, Pausing) and not self._lines, "asked where chunks can pause"
        return stage.begin(batch, pending).then(lambda output: self._read(batch, output, pending))

    def _tapped(self, batch: Batch) -> Batch:
        drafter = self.drafter
        return replace(batch, taps=drafter.taps) if drafter is not None and batch.feature_rows else batch

    def forward(self, batch: Batch, pending: PendingTokens | None = None) -> Future[StageOutput]:
        batch = self._tapped(batch)
        if not self._lines:
            return called(lambda: self._read(batch, self.stages[0].forward(batch, None, pending), pending))
        assert pending is None, "only a pipeline of one stage runs ahead"
        # It stands in every line at once, so that the order in all lines is the order of the calls.
        before: Future[StageOutput] | None = None
        for line in self._lines:
            after: Future[StageOutput] = Future()
            line.enter(LineStep(batch, before, after))
            before = after
        return (
            after if self._drafter_line is None else self._drafter_line.post(lambda: self._read(batch, after.result()))
        )

    def _read(self, batch: Batch, output: StageOutput, pending: PendingTokens | None = None) -> StageOutput:
        if (drafter := self.drafter) is not None:
            self._drafted(lambda: drafter.read(batch, output.features, pending), None)
        return replace(output, features=()) if output.features else output

    def propose(self, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        """What the drafter proposes, for all of them in one pass; nothing once it has failed. Nothing of these slots is
        in flight, so their state is read by a capture at most; in line it would wait for the batches of others."""
        nothing: list[tuple[int, ...]] = [()] * len(asks)
        drafter = self.drafter
        return nothing if drafter is None else self._drafted(lambda: drafter.propose(asks), nothing)

    @property
    def drafts_ahead(self) -> bool:
        """Whether a batch can take the drafter's tokens on the device, where the host does not know them yet."""
        return not self._lines and self.drafter is not None and self.drafter.drafts_ahead

    def propose_ahead(self, asks: Sequence[Ask]) -> torch.Tensor | None:
        """The same, on the device: nobody waits for it. None once the drafter has failed."""
        drafter = self.drafter
        return None if drafter is None else self._drafted(lambda: drafter.propose_ahead(asks), None)

    def propose_behind(self, block: Unseen) -> torch.Tensor | None:
        """Tokens behind those that will be accepted of a block: nobody waits for the target's."""
        drafter = self.drafter
        return None if drafter is None else self._drafted(lambda: drafter.propose_behind(block), None)

    def note_behind(self, slot: int, position: int | None) -> None:
        if (drafter := self.drafter) is not None:
            self._drafted(lambda: drafter.note_behind(slot, position), None)

    def _drafted(self, call: Callable[[], T], instead: T) -> T:
        """What the drafter answers. After a fault its state is not known, so the pipeline does without it."""
        try:
            return call()
        except Exception as error:
            if self.drafter is not None:
                log.exception("the drafter failed and drafts no more until the next start; answers go on without it")
            self.drafter_fault = f"the drafter failed with {type(error).__name__}, the log says where"
            self.drafter = None
            return instead

    def open(self, slot: int) -> None:
        self._on_all(lambda holder: holder.open(slot))

    def close(self, slot: int) -> None:
        self._on_all(lambda holder: _close(holder, slot))

    def capture(self, slot: int, later: bool = False) -> Future[tuple[Part, ...]]:
        """The parts of all stages, in layer order, and the drafter's, if it has one. Taken where it stands in line; the
        result may come later. later: what need not be done now waits for `finish_captures`, and the result with it."""
        if later and not self._lines:
            begun: Future[tuple[Part, ...]] = Future()
            self._begun.append((begun, [called(partial(self._begin, holder, slot)) for holder in self._holders]))
            return begun
        futures = self._post_all(lambda holder: self._captured(holder, slot))
        result: Future[tuple[Part, ...]] = Future()

        def gather() -> None:
            try:
                result.set_result(tuple(part for future in futures for part in future.result()))
            except BaseException as error:
                result.set_exception(error)

        _when_all_done(futures, gather)
        return result

    @property
    def has_begun_captures(self) -> bool:
        """Whether some wait for `finish_captures`."""
        return bool(self._begun)

    def finish_captures(self) -> None:
        """Those that were to be finished later, on the thread that began them."""
        while self._begun:
            result, finishing = self._begun.popleft()
            parts, failures = list[Part](), list[Exception]()
            for finish in finishing:  # each of them: what lies copied on a device would stay there
                try:
                    parts += finish.result()()
                except Exception as error:  # of a device or a link; this capture is lost, others are not
                    failures.append(error)
            result.set_exception(failures[0]) if failures else result.set_result(tuple(parts))

    def _begin(self, holder: StateHolder, slot: int) -> Callable[[], Sequence[Part]]:
        if not isinstance(holder, BeginsCapture):
            parts = self._captured(holder, slot)
            return lambda: parts
        if any(holder is stage for stage in self.stages):
            return holder.begin_capture(slot)
        nothing: Callable[[], Sequence[Part]] = tuple
        if self.drafter is None:
            return nothing
        finish = self._drafted(lambda: holder.begin_capture(slot), nothing)
        return lambda: self._drafted(finish, ())

    def _captured(self, holder: StateHolder, slot: int) -> Sequence[Part]:
        if any(holder is stage for stage in self.stages):
            return holder.capture(slot)
        return () if self.drafter is None else self._drafted(lambda: holder.capture(slot), ())

    def restore(self, slot: int, position: int, parts: Sequence[Part]) -> None:
        """All stages take their layers, or none does: first each one checks, then each one adopts."""
        if error := _first_error(self._post_all(lambda holder: _prepare(holder, slot, position, parts))):
            self._on_all(lambda holder: _abort(holder, slot))
            raise error
        if error := _first_error(self._post_all(lambda holder: _commit(holder, slot, position, parts))):
            self.close(slot)
            raise error

    def rewind(self, slot: int, position: int) -> None:
        self._on_all(lambda holder: holder.rewind(slot, position))

    def recover(self) -> None:
        """Bring lost stages back, empty, or have another take their span; raises StageLost if neither can be.

        It also raises where no stage says that it is lost: then whatever failed would fail again, for ever.
        First everything in line comes to its end, so that nothing meant for the lost state meets the new one.
        """
        for line in (*self._lines, self._drafter_line):
            if line is not None:
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
            if self._replace_stage is None:
                raise
            self._replace(index, self._replace_stage(self.stages[index].span, error))

    def _replace(self, index: int, stage: Stage) -> None:
        old = self.stages[index]
        assert stage.span == old.span, f"layers {old.span} are to be taken in, {stage.span} were loaded"
        if self._lines:
            self._lines[index].stop()
            self._lines[index] = line_for(stage)
        self.stages = (*self.stages[:index], stage, *self.stages[index + 1 :])
        old.stop()

    def stop(self) -> None:
        for line in (*self._lines, self._drafter_line):
            if line is not None:
                line.stop()
        for stage in self.stages:
            stage.stop()

    @property
    def _holders(self) -> list[StateHolder]:
        """The drafter is the last."""
        return [*self.stages] if self.drafter is None else [*self.stages, self.drafter]

    def _post_all(self, verb: Callable[[StateHolder], T]) -> list[Future[T]]:
        holders = self._holders
        if not self._lines:
            return [called(partial(verb, holder)) for holder in holders]
        lines: list[Line | CallLine] = [*self._lines]
        if len(holders) > len(lines) and self._drafter_line is not None:
            lines.append(self._drafter_line)
        return [line.post(partial(verb, holder)) for line, holder in zip(lines, holders, strict=True)]

    def _on_all(self, verb: Callable[[StateHolder], None]) -> None:
        if self._lines:
            for future in self._post_all(verb):
                future.result()
            return
        errors = list[Exception]()
        for holder in self._holders:
            try:
                verb(holder)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _poll_experts(holder: StateHolder) -> None:
    if isinstance(holder, InProcess):
        holder.poll_experts()


def _close(holder: StateHolder, slot: int) -> None:
    """A lost stage holds no slots, so there is nothing to close."""
    with suppress(StageLost):
        holder.close(slot)


def _prepare(holder: StateHolder, slot: int, position: int, parts: Sequence[Part]) -> None:
    if isinstance(holder, TwoPhaseRestore):
        holder.prepare_restore(slot, position, parts)


def _commit(holder: StateHolder, slot: int, position: int, parts: Sequence[Part]) -> None:
    if isinstance(holder, TwoPhaseRestore):
        holder.commit_restore(slot)
    else:
        holder.restore(slot, position, parts)


def _abort(holder: StateHolder, slot: int) -> None:
    """A lost stage holds nothing that was prepared."""
    if isinstance(holder, TwoPhaseRestore):
        with suppress(StageLost):
            holder.abort_restore(slot)


def _first_error(futures: Sequence[Future[T]]) -> BaseException | None:
    """After the last of them has come back."""
    errors = [future.exception() for future in futures]
    return next((error for error in errors if error is not None), None)


def called(call: Callable[[], T]) -> Future[T]:
    """What comes of it, or the error, for whoever asks for the result."""
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

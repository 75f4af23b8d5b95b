"""Snapshots on their way from the stages to the index.

A capture is asked for while the batch that reaches the boundary is under way; its parts and its logits arrive later
and separately, on a GPU as copies that nobody waits for. When all is here the snapshot is published, under exactly
the tokens its state has consumed (law 1).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Sequential
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from rekindle.engine.flight import OnHost
from rekindle.engine.sequence import Phase, Sequence
from rekindle.errors import SnapshotMismatch
from rekindle.prefix import PrefixCache
from rekindle.prompt import BoundaryKind
from rekindle.snapshots.types import Part, Snapshot, Stretch, are_settled, wait_for
from rekindle.stages import Pipeline

log = logging.getLogger("rekindle.engine")


@dataclass(slots=True, eq=False)
class _Pending:
    sequence: Sequence
    position: int
    kind: BoundaryKind
    tokens: np.ndarray
    stretches: tuple[Stretch, ...]
    parts: Future[tuple[Part, ...]]
    logits: OnHost | None = None
    failure: Exception | None = None  # why it never comes

    def serves(self, prompt: np.ndarray) -> bool:
        """Whether only its copies are missing, and the prompt could go on from it."""
        whole = self.logits is not None and self.parts.done()
        return whole and np.array_equal(self.tokens, prompt[: self.position])

    def wait(self) -> None:
        """For the parts and for their copies, if they come."""
        try:
            wait_for(self.parts.result())
            if self.logits is not None:
                self.logits.get()
        except Exception as error:  # of a device or a link; the capture is lost, the engine goes on
            self.failure = error

    def is_here(self) -> bool:
        """Whether there is nothing to wait for any more: all has come, or `failure` says why not."""
        if self.failure is not None or not self.parts.done():
            return self.failure is not None
        try:
            parts = self.parts.result()
            if self.logits is None or not self.logits.done or not are_settled(parts):
                return False
            wait_for(parts)
        except Exception as error:
            self.failure = error
        return True


class Publisher:
    def __init__(self, pipeline: Pipeline, prefixes: PrefixCache, grid: int) -> None:
        self._pipeline = pipeline
        self._prefixes = prefixes
        self._grid = grid
        self._pending: list[_Pending] = []

    def capture(self, sequence: Sequence, position: int, kind: BoundaryKind) -> None:
        """Ask every stage for the state at `position`, where the sequence stands now."""
        assert sequence.position == position, f"the state stands at {sequence.position}, not at {position}"
        tokens = np.asarray(sequence.tokens[:position], dtype=np.int32)
        if not self._prefixes.wants(tokens, kind):
            return
        sequence.captured = max(sequence.captured, position)
        parts = self._pipeline.capture(sequence.slot)
        self._pending.append(_Pending(sequence, position, kind, tokens, tuple(sequence.stretches), parts))

    def awaits(self, sequence: Sequence, position: int) -> bool:
        """Whether a snapshot of this sequence at this position is still on its way."""
        return any(p.sequence is sequence and p.position == position for p in self._pending)

    def give_logits(self, sequence: Sequence, position: int, logits: torch.Tensor) -> None:
        for pending in self._pending:
            if pending.sequence is sequence and pending.position == position:
                pending.logits = OnHost(logits.detach().float())

    def publish_ready(self) -> None:
        self._pending = [pending for pending in self._pending if not self._publish(pending)]

    def publish_captured(self, tokens: Sequential[int]) -> None:
        """Also what this prompt could go on from and is being copied still, which takes milliseconds."""
        prompt = np.asarray(tokens, dtype=np.int32)
        self._publish_after([pending for pending in self._pending if pending.serves(prompt)])

    def abandon(self) -> None:
        """A stage was lost: publish what is whole, forget the captures whose forward never came back."""
        self._publish_after([pending for pending in self._pending if pending.parts.done()])
        self._pending.clear()

    def drain(self) -> None:
        """Wait for every capture that was asked for; called when idle and at the end."""
        self._publish_after(self._pending)

    def _publish_after(self, awaited: Iterable[_Pending]) -> None:
        for pending in awaited:
            pending.wait()
        self.publish_ready()

    def _publish(self, pending: _Pending) -> bool:
        """True when the pending capture is settled, one way or the other."""
        if not pending.is_here():
            # Without logits the forward that reaches the boundary is not back yet; or it failed, and the state is not
            # to be trusted.
            return pending.parts.done() and pending.logits is None and pending.sequence.phase is Phase.ENDED
        if pending.failure is not None or pending.logits is None:
            log.warning("the state at %d tokens could not be captured: %s", pending.position, pending.failure)
            return True
        # A row of its own in ordinary memory: the one it came in serves the next.
        logits = pending.logits.get().clone()
        if not logits.isfinite().all():
            log.error("the state at %d tokens is not published: its logits are not finite", pending.position)
            return True
        try:
            snapshot = Snapshot(pending.tokens, pending.parts.result(), logits, self._grid, pending.stretches)
        except SnapshotMismatch as error:
            log.error("the state at %d tokens is not published: %s", pending.position, error)
            return True
        self._prefixes.publish(snapshot, pending.kind)
        return True

"""Snapshots on their way from the stages to the index.

A capture is asked for while the batch that reaches the boundary is under way, or, where it would have to wait for
others, when that batch is back; its parts and its logits arrive later and separately, on a GPU as copies that run
beside the next steps. When all of it is on the host the snapshot is published, under exactly the tokens its state has
consumed (law 1).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Sequential
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from rekindle.engine.sequence import Sequence
from rekindle.engine.to_host import OnHost
from rekindle.errors import BadLogits, SnapshotMismatch, StageLost
from rekindle.prefix import PrefixCache
from rekindle.prompt import BoundaryKind, common_length
from rekindle.snapshots.types import Part, Snapshot, Stretch, copies_done, wait_for
from rekindle.stages import Pipeline

log = logging.getLogger("rekindle.engine")


@dataclass(slots=True, eq=False)
class _Capture:
    """A snapshot whose parts and logits are on their way."""

    sequence: Sequence
    position: int
    kind: BoundaryKind
    tokens: np.ndarray
    stretches: tuple[Stretch, ...]
    parts: Future[tuple[Part, ...]]
    owed_by: int | None = None  # a kept slot that the state has yet to be taken from
    logits: Future[torch.Tensor] | None = None  # [vocab] in memory of its own; None until the forward is collected
    failure: Exception | None = None  # why it cannot be published

    def serves(self, prompt: np.ndarray, namespace: str) -> bool:
        """Whether the forward that reached it is back, and the prompt could go on from it."""
        whole = self.logits is not None and self.sequence.namespace == namespace
        return whole and np.array_equal(self.tokens, prompt[: self.position])

    def wait(self) -> None:
        """For the parts and their copies; what goes wrong is kept in `failure`."""
        try:
            wait_for(self.parts.result())
            if self.logits is not None:
                self.logits.result()
        except Exception as error:  # of a device or a link; the capture is lost, the engine goes on
            self.failure = error

    def is_here(self) -> bool:
        """Whether the parts, their copies and the logits are complete, or `failure` says why they never will be."""
        if self.failure is not None or not self.parts.done():
            return self.failure is not None
        try:
            parts = self.parts.result()
            if self.logits is None or not self.logits.done() or not copies_done(parts):
                return False
            wait_for(parts)
            self.logits.result()
        except Exception as error:
            self.failure = error
        return True

    def lose(self) -> None:
        """It will not be published: `failure` says why, to the log and to its request if that runs."""
        self.sequence.account.lose(self.position, f"the state at {self.position:,} tokens could not be captured")
        if isinstance(self.failure, BadLogits):
            log.error("the state at %d tokens is not published: %s", self.position, self.failure)
        else:
            log.warning("the state at %d tokens could not be captured: %s", self.position, self.failure)


class Publisher:
    def __init__(self, pipeline: Pipeline, prefixes: PrefixCache, grid: int) -> None:
        self._pipeline = pipeline
        self._prefixes = prefixes
        self._grid = grid
        self._captures: list[_Capture] = []
        self._closed = False
        # A thread of its own waits for rows of up to 250,000 logits, checks and copies them beside the token loop.
        self._rows = ThreadPoolExecutor(1, "rekindle-logits")

    def close(self) -> None:
        """From now on nothing is captured, and captures under way are dropped when they arrive. From any thread."""
        self._closed = True

    def make_ready(self, logits: torch.Tensor) -> None:
        """Copy a row to the host once, before the first request."""
        self.bring(logits).result()

    def bring(self, logits: torch.Tensor) -> Future[torch.Tensor]:
        """A row in host memory of its own; raises BadLogits if it holds what is no number."""
        return self._rows.submit(_own_row, OnHost(logits.detach().float()))

    def stop(self) -> None:
        """Every sequence has ended before, and all that was captured is published."""
        self._rows.shutdown()

    def capture(self, sequence: Sequence, position: int, kind: BoundaryKind, will_be_kept: bool = False) -> None:
        """Ask every stage for the state at `position`, where the sequence stands now. will_be_kept: its slot stays as
        it is, so that a capture which would wait for others is made later (`capture_owed`): a whole crowd of answers
        may end in one step, and every token and request would wait for their copies."""
        assert sequence.position == position, f"the state stands at {sequence.position}, not at {position}"
        if (why := self._prefixes.refusal(position)) is not None:
            sequence.account.lose(position, why)
            return
        tokens = sequence.key[:position].copy()
        if self._closed or not self._prefixes.wants(tokens, kind, namespace=sequence.namespace):
            return
        sequence.account.captured.add(position)
        owed_by = sequence.slot if will_be_kept and not self._has_room_for_kept else None
        parts = self._pipeline.capture(sequence.slot, later=True) if owed_by is None else Future()
        self._captures.append(_Capture(sequence, position, kind, tokens, tuple(sequence.stretches), parts, owed_by))

    @property
    def owes(self) -> bool:
        """Whether states wait in kept slots."""
        return bool(self._owed())

    @property
    def can_pay(self) -> bool:
        """Whether some do, and there is room by now."""
        return self.owes and self._has_room_for_kept

    @property
    def _has_room_for_kept(self) -> bool:
        """And for one that may come behind it: of a prompt, whose client waits."""
        return self._pipeline.has_room_for_capture(others=1)

    def capture_owed(self) -> None:
        """The oldest of the states that wait in kept slots, if there is room for it."""
        if self.can_pay:
            self._take_owed(self._owed()[0])

    def capture_kept(self, slot: int) -> None:
        """What is still to be taken from a kept slot: it will not stay as it is."""
        for capture in self._owed():
            if capture.owed_by == slot:
                self._take_owed(capture)

    def forget_owed(self, slot: int | None = None) -> None:
        """What would be taken from this slot, or from any, is lost, not to be trusted, or taken from elsewhere."""
        self._captures = [
            capture for capture in self._captures if capture.owed_by is None or slot not in (None, capture.owed_by)
        ]

    def _owed(self) -> list[_Capture]:
        """Whose states wait in kept slots."""
        if self._closed:
            self.forget_owed()
        return [capture for capture in self._captures if capture.owed_by is not None]

    def _take_owed(self, capture: _Capture) -> None:
        assert capture.owed_by is not None, "it has been taken"
        slot = capture.owed_by
        try:
            if not self._prefixes.wants(capture.tokens, capture.kind, namespace=capture.sequence.namespace):
                self.forget_owed(slot)  # an equal answer's has been published, or no tier takes any now
                return
            capture.owed_by = None
            capture.parts = self._pipeline.capture(slot, later=True)
        except Exception as error:  # of this snapshot alone, unless a stage is lost: the engine goes on
            capture.owed_by = None
            capture.parts.set_exception(error)
            if isinstance(error, StageLost):
                raise

    def awaits(self, sequence: Sequence, position: int) -> bool:
        """Whether a snapshot of this sequence at this position is still on its way."""
        return any(p.sequence is sequence and p.position == position for p in self._captures)

    def shared_length(self, prompt: np.ndarray, namespace: str) -> int:
        """How far a prompt goes along with what is still on its way, of which the index knows nothing yet."""
        mine = (capture.tokens for capture in self._captures if capture.sequence.namespace == namespace)
        return max((common_length(tokens, prompt) for tokens in mine), default=0)

    def give_logits(self, sequence: Sequence, position: int, logits: torch.Tensor | Future[torch.Tensor]) -> None:
        """The row after `position` tokens, or the one that was brought before."""
        for capture in self._captures:
            if capture.sequence is sequence and capture.position == position:
                capture.logits = logits if isinstance(logits, Future) else self.bring(logits)

    @property
    def awaits_any(self) -> bool:
        """Whether some snapshot is still on its way."""
        return bool(self._captures)

    @property
    def unfinished(self) -> bool:
        return self._pipeline.has_begun_captures

    def finish(self) -> None:
        """What of captures could wait until tokens were out, or until a request that came meanwhile is under way."""
        self._pipeline.finish_captures()

    def publish_ready(self) -> None:
        self._captures = [capture for capture in self._captures if not self._publish(capture)]

    def publish_captured(self, tokens: Sequential[int] | np.ndarray, namespace: str, beyond: int = 0) -> None:
        """Wait for captures beyond that position which this prompt could be restored from and that are still copied,
        which takes milliseconds, and publish them with the rest."""
        prompt = np.asarray(tokens, dtype=np.int32)
        longer = [capture for capture in self._captures if capture.position > beyond]
        serving = [capture for capture in longer if capture.serves(prompt, namespace)]
        if serving:
            self.finish()
        self._publish_after([capture for capture in serving if capture.parts.done()])

    def abandon(self) -> None:
        """A stage was lost: publish captures that are complete, drop those whose forward never came back."""
        self.finish()
        self._publish_after([capture for capture in self._captures if capture.parts.done()])
        self._captures.clear()

    def drain(self) -> None:
        """Wait for every capture that was asked for: before an audit, and at the end."""
        for capture in self._owed():
            self._take_owed(capture)
        self.finish()
        self._publish_after(self._captures)

    def _publish_after(self, awaited: Iterable[_Capture]) -> None:
        for capture in awaited:
            capture.wait()
        self.publish_ready()

    def _publish(self, capture: _Capture) -> bool:
        """True when the capture is published or dropped."""
        if not capture.is_here():
            # Without logits the forward that reaches the boundary is not back yet; or it failed, its sequence has
            # ended, and the state is not to be trusted.
            return capture.parts.done() and capture.logits is None and capture.sequence.ended
        if capture.failure is None and not self._closed:
            try:
                self._publish_whole(capture)
            except Exception as error:  # of this snapshot alone: the engine goes on
                capture.failure = error
        if capture.failure is not None:
            capture.lose()
        return True

    def _publish_whole(self, capture: _Capture) -> None:
        assert capture.logits is not None, "a capture is whole with its logits"
        try:
            snapshot = Snapshot(
                capture.tokens,
                capture.parts.result(),
                capture.logits.result(),
                self._grid,
                capture.stretches,
                namespace=capture.sequence.namespace,
            )
        except SnapshotMismatch as error:
            log.error("the state at %d tokens is not published: %s", capture.position, error)
            capture.sequence.account.lose(capture.position, str(error))
            return
        if self._prefixes.publish(snapshot, capture.kind).gone:
            why = f"the state at {capture.position:,} tokens had to give way at once: no tier had room for it"
            capture.sequence.account.lose(capture.position, why)


def _own_row(row: OnHost) -> torch.Tensor:
    """The row in memory of its own, since the pinned memory serves the next row. Law 5: every logit is a number."""
    own = row.take(torch.clone)
    # A sum has no number where one of its terms has none. It takes a thirtieth of a look at each of 250,000, which runs
    # beside the next request; only a sum that is none itself is looked into.
    if not bool(own.sum().isfinite()) and not bool(own.isfinite().all()):
        raise BadLogits("its logits are not finite")
    return own

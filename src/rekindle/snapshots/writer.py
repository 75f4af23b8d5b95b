"""Write-behind: one thread saves snapshots; the token path only ever puts them in a short queue."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from rekindle.errors import DoesNotFit
from rekindle.prompt import BoundaryKind
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.rank import stand_back
from rekindle.snapshots.record import Record
from rekindle.snapshots.types import Snapshot

logger = logging.getLogger(__name__)

FIRST_PAUSE = 15.0  # seconds without an attempt after the disk refused
LONGEST_PAUSE = 600.0
REST = 9.0  # seconds of rest for every second of work
# Niceness: some 3 % of a core that others want. Not the lowest: a writer that is starved while it holds the
# interpreter's lock holds up the token path too.
RANK = 15


@dataclass(frozen=True, slots=True)
class Save:
    """One snapshot to be saved; `done` is called once, from the writer's thread, with None if it was not."""

    snapshot: Snapshot
    kind: BoundaryKind
    conversation: str | None
    done: Callable[[Record | None], None]


class DiskWriter:
    """Saves in the background. When the disk refuses (full, read-only) it says so once and pauses, longer each time."""

    def __init__(self, store: DiskStore, capacity: int = 4, clock: Callable[[], float] = time.monotonic) -> None:
        assert capacity > 0, "a queue of no length saves nothing"
        self.store = store
        self.capacity = capacity
        self.saves = 0
        self.saved_bytes = 0
        self.refused: Counter[str] = Counter()  # by reason
        self._clock = clock
        self._queue: deque[Save] = deque()
        self._busy = False
        self._closing = False
        self._urgent = 0  # threads that wait until everything is saved
        self._worked_from = 0.0
        self._pause = 0.0  # seconds; 0 while the disk works
        self._retry_at = 0.0
        self._budget_warned = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="rekindle-disk-writer", daemon=True)
        self._thread.start()

    @property
    def troubled(self) -> bool:
        """Whether the disk refused the last attempt."""
        return self._pause > 0

    @property
    def waiting(self) -> int:
        """Snapshots offered and not yet done with."""
        with self._changed:
            return len(self._queue) + self._busy

    def offer(self, save: Save) -> bool:
        """Queue a save, or refuse it at once; never waits."""
        with self._changed:
            reason = self._refusal()
            if reason is not None:
                self.refused[reason] += 1
                return False
            self._queue.append(save)
            self._changed.notify_all()
            return True

    def put(self, save: Save) -> bool:
        """Queue a save, waiting for a place; for shutdown, never for the token path."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._queue) < self.capacity or self._closing)
        return self.offer(save)

    def _refusal(self) -> str | None:
        if self._closing:
            return "closing"
        if self._clock() < self._retry_at:
            return "disk"
        return "queue" if len(self._queue) >= self.capacity else None

    def flush(self) -> None:
        """Wait until everything offered so far has been saved or refused."""
        with self._changed:
            self._urgent += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: not self._queue and not self._busy)
            finally:
                self._urgent -= 1

    def close(self) -> None:
        self.flush()
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        stand_back(RANK)
        while (save := self._next()) is not None:
            try:
                save.done(self._attempt(save))
            except Exception:
                # The last line of defence of a thread that must outlive a fault of ours: without it every later
                # save would wait for ever.
                logger.exception("disk writer: a save of %d tokens failed", save.snapshot.position)
                self.refused["fault"] += 1
            del save  # or the snapshot would live until the next one comes
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next(self) -> Save | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return None
            self._busy = True
            save = self._queue.popleft()
            self._changed.notify_all()
            return save

    def _attempt(self, save: Save) -> Record | None:
        if self._clock() < self._retry_at:
            self.refused["disk"] += 1
            return None
        self._worked_from = self._clock()
        try:
            record = self.store.save(save.snapshot, save.kind, save.conversation, self._rest)
        except OSError as error:
            self._disk_refused(error)
            return None
        except DoesNotFit as error:
            self.refused["budget"] += 1
            if not self._budget_warned:
                logger.warning("disk tier: not saved: %s", error)
            self._budget_warned = True
            return None
        if self.troubled:
            logger.info("disk tier %s: saves work again", self.store.folder)
        self._pause = self._retry_at = 0.0
        self.saves += 1
        self.saved_bytes += record.nbytes
        return record

    def _rest(self) -> None:
        """Hashing and writing take memory and processors from a decode step, so they are at it a tenth of the time;
        not while a thread waits for them, or while the next snapshot would be refused for want of a place."""
        worked = self._clock() - self._worked_from
        with self._changed:
            self._changed.wait_for(self._in_a_hurry, timeout=REST * worked)
        self._worked_from = self._clock()

    def _in_a_hurry(self) -> bool:
        return self._closing or self._urgent > 0 or len(self._queue) >= self.capacity

    def _disk_refused(self, error: OSError) -> None:
        self.refused["disk"] += 1
        if not self.troubled:
            logger.warning("disk tier %s: cannot save: %s; serving goes on from RAM", self.store.folder, error)
        self._pause = min(max(self._pause * 2, FIRST_PAUSE), LONGEST_PAUSE)
        self._retry_at = self._clock() + self._pause

"""Write-behind: one thread saves snapshots; the token path only ever puts them in a short queue.

What the queue has no place for is refused. When nothing waits any more, the thread asks its owner for what was left.
"""

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

# Bytes of snapshots that may wait, where these are more than the few that always may: the memory of those that RAM has
# given up meanwhile. Pages that several of them share count for each.
QUEUE_BYTES = 256 << 20
FIRST_PAUSE = 15.0  # seconds without an attempt after the disk refused
LONGEST_PAUSE = 600.0
REST = 9.0  # seconds of rest for every second of work …
LOOK = 0.25  # … between two looks whether there is still a reason to rest, and without an answer until there is none
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

    @property
    def nbytes(self) -> int:
        parts = self.snapshot.parts
        pages = sum(len(part.pages) * part.pages[0].nbytes for part in parts if part.pages)
        return self.snapshot.own_bytes + pages


class DiskWriter:
    """Saves in the background. When the disk refuses (full, read-only) it says so once and pauses, longer each time."""

    def __init__(
        self,
        store: DiskStore,
        capacity: int = 4,
        clock: Callable[[], float] = time.monotonic,
        queue_bytes: int = QUEUE_BYTES,
        busy: Callable[[], bool] = lambda: True,
    ) -> None:
        """capacity: snapshots that may wait, however large; more of them while all have no more than queue_bytes. busy:
        whether somebody is being answered, for whose sake the writer rests."""
        assert capacity > 0, "a queue of no length saves nothing"
        self.store = store
        self.capacity = capacity
        self.more: Callable[[], Save | None] = lambda: None  # asked for what was refused, when nothing waits
        self.saves = 0
        self.saved_bytes = 0
        self.refused: Counter[str] = Counter()  # by reason
        self._clock = clock
        self._is_serving = busy
        self._served_at = -LOOK  # when somebody was last seen being answered
        self._queue: deque[tuple[Save, int]] = deque()  # with their bytes
        self._queue_bytes = queue_bytes
        self._queued_bytes = 0
        self._busy = False
        self._idle = False  # nothing waits, and there is no more
        self._closing = False
        self._tried_at_last = False  # the disk, at shutdown, though it was in its pause
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
            nbytes = save.nbytes
            reason = self._refusal(nbytes)
            if reason is not None:
                self.refused[reason] += 1
                return False
            self._queue.append((save, nbytes))
            self._queued_bytes += nbytes
            self._changed.notify_all()
            return True

    def put(self, save: Save) -> bool:
        """Queue a save, waiting for a place; for shutdown, never for the token path. A disk that refused the last one
        is tried once more."""
        with self._changed:
            if not self._tried_at_last:
                self._tried_at_last, self._retry_at = True, 0.0
            self._changed.wait_for(lambda: len(self._queue) < self.capacity or self._closing)
        return self.offer(save)

    def _refusal(self, nbytes: int) -> str | None:
        if self._closing:
            return "closing"
        if self._clock() < self._retry_at:
            return "disk"
        is_full = len(self._queue) >= self.capacity and self._queued_bytes + nbytes > self._queue_bytes
        return "queue" if is_full else None

    def flush(self) -> None:
        """Wait until everything offered so far has been saved or refused, and there is no more or the disk pauses."""
        with self._changed:
            self._urgent += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._idle and not self._queue)
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
            # The last lines of defence of a thread that must outlive a fault of ours: without them every later save
            # would wait for ever.
            record = None
            try:
                record = self._attempt(save)
            except Exception:
                logger.exception("disk writer: a save of %d tokens failed", save.snapshot.position)
                self.refused["fault"] += 1
            try:
                save.done(record)
            except Exception:
                logger.exception("disk writer: nobody was told of a save of %d tokens", save.snapshot.position)
                self.refused["fault"] += 1
            del save  # or the snapshot would live until the next one comes
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next(self) -> Save | None:
        while True:
            with self._changed:
                if self._queue:
                    self._busy = True
                    save, nbytes = self._queue.popleft()
                    self._queued_bytes -= nbytes
                    self._changed.notify_all()
                    return save
                if self._closing:
                    self._idle = True  # for whoever flushes now or later
                    self._changed.notify_all()
                    return None
            pause = self._retry_at - self._clock()
            try:
                more = self.more() if pause <= 0 else None
            except Exception:
                logger.exception("disk writer: what was refused cannot be asked for")
                more = None
            with self._changed:
                if more is not None:
                    self._busy = True
                    return more
                self._idle = True
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._closing, timeout=pause if pause > 0 else None)
                self._idle = False

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
        """Hashing and writing take memory and processors from a decode step, so they are at it a tenth of the time; all
        of it while nobody has been answered for a moment, a thread waits for them, or so many snapshots wait as always
        may: of a queue that fills up what comes last would be refused, and perhaps lost."""
        now = self._clock()
        until = now + REST * (now - self._worked_from)
        with self._changed:
            while (left := until - self._clock()) > 0:
                if self._changed.wait_for(self._in_a_hurry, timeout=min(left, LOOK)):
                    break
        self._worked_from = self._clock()

    def _in_a_hurry(self) -> bool:
        return self._is_quiet() or self._closing or self._urgent > 0 or len(self._queue) >= self.capacity

    def _is_quiet(self) -> bool:
        """For some time: between two requests of an agent nobody is answered either."""
        now = self._clock()
        if self._is_serving():
            self._served_at = now
        return now - self._served_at >= LOOK

    def _disk_refused(self, error: OSError) -> None:
        self.refused["disk"] += 1
        if not self.troubled:
            logger.warning("disk tier %s: cannot save: %s; serving goes on from RAM", self.store.folder, error)
        self._pause = min(max(self._pause * 2, FIRST_PAUSE), LONGEST_PAUSE)
        self._retry_at = self._clock() + self._pause

"""Host memory for snapshots, in slabs that are used again.

Fresh memory is slow: the system clears it when it is first touched, which takes longer than to read a file into it, and
to pin it for a GPU takes longer still, under a lock that launches wait for. So a slab without holders is kept for the
next request, and beside a GPU threads keep some in stock, enough for captures and restores that come all at once; what
is taken from it is made anew when nobody has asked for some time and no step runs, unless little is left. Then a part
of what the RAM tier has yet to fill is made ahead, too. While steps run memory is cleared ahead, which keeps no launch
waiting and takes most of the time, so that only pinning is left to do; not while snapshots are loaded or many slabs are
taken, which it would slow down. Idle memory is bounded: the stock, and what the RAM tier leaves of its budget. One of
the threads gives back the rest, since the last reference to a slab may be dropped anywhere, also where the driver must
not be called.

A slab is lent as a whole or cut; it comes back by itself when nothing of it is referred to. Code that lets a device
read or write it keeps a reference until the device has.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, SimpleQueue

import numpy as np

from rekindle.buffers import SLAB_BYTES, SLAB_MAKERS
from rekindle.snapshots.files import Bytes

EDGE = 256  # bytes on which everything begins that is cut from a slab
LARGE_PAGE = 2 << 20  # bytes: on such an edge a mapping begins, so that the system can back all of it with large pages
QUIET = 0.25  # seconds without a request for memory, after which the stock is filled if no step runs
# Seconds without a request for memory, or a load, after which memory is cleared ahead: the requests of a burst follow
# each other within milliseconds, and the threads that fill what they took need the memory's bandwidth.
CALM = 0.05
SPARE_PART = 4  # of what the RAM tier leaves, this part is made ahead
LOW_PART = 4  # with less than this part of the stock it is filled at once, …
# … though amid requests slab by slab, so many seconds apart, while there is this part of it: to pin one keeps launches
# waiting for 2 ms, and four in turn kept a request waiting for 7. With less, requests would have to pin for themselves.
SPACED_PART, APART = 8, 0.008
PAUSE = 1.0  # seconds between a refusal of memory for the stock and the next try

Pin = Callable[[int, int], Callable[[], object] | None]  # address, bytes -> what undoes it; None where it is refused

log = logging.getLogger(__name__)


class Slab:
    """Memory of its own, given back to the system with this object. `make` backs it with memory and pins it."""

    def __init__(self, nbytes: int, pin: Pin | None) -> None:
        self.nbytes = nbytes
        self.pinned = False  # a GPU of this process can read it where it lies
        self.made = pin is None  # the system makes what is not pinned as it is touched
        self._pin = pin
        self._cleared = False
        self._making = threading.Lock()
        # Private: shared memory gets no large pages. DONTFORK: a fork would make its pages copy-on-write.
        self._mapping = mmap.mmap(-1, nbytes + LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # Large pages are pinned faster; for memory that files are read into, small ones are ready sooner.
        for advice in ("MADV_DONTFORK",) if pin is None else ("MADV_DONTFORK", "MADV_HUGEPAGE"):
            if hasattr(mmap, advice):
                with contextlib.suppress(OSError):  # a system without large pages is slower, not wrong
                    self._mapping.madvise(getattr(mmap, advice))
        self._start = -np.frombuffer(self._mapping, dtype=np.uint8).ctypes.data % LARGE_PAGE

    def lend(self) -> Bytes:
        """All of it, as an array that every slice of it refers to."""
        return np.frombuffer(self._mapping, dtype=np.uint8, count=self.nbytes, offset=self._start)

    def clear(self) -> Slab:
        """Let the system back it with memory: milliseconds, on the caller's thread."""
        with self._making:
            self._clear()
        return self

    def _clear(self) -> None:
        if not self._cleared:
            self.lend()[:: mmap.PAGESIZE] = 0
            self._cleared = True

    def make(self) -> None:
        """Have it cleared, and pin it if the driver allows, which would else clear it under its lock."""
        if self.made:
            return
        with self._making:
            if self.made or self._pin is None:
                return
            self._clear()
            memory = self.lend()
            unpin = self._pin(memory.ctypes.data, self.nbytes)
            if unpin is not None:
                weakref.finalize(self, unpin).atexit = False
            self.pinned = unpin is not None
            self.made = True


class Slabs:
    """Lends slabs, and keeps those that come back."""

    def __init__(
        self,
        stock: int = 0,
        size: int = SLAB_BYTES,
        pin: Pin | None = None,
        pause: float = PAUSE,
        quiet: float = QUIET,
        calm: float = CALM,
        apart: float = APART,
    ) -> None:
        """stock: slabs that are kept ready; pause: seconds before memory that was refused is asked for again; quiet and
        calm: seconds without a request before the stock is filled, and before memory is cleared for it; apart: seconds
        between two slabs that are made amid requests."""
        self.size = size
        self.refused = 0  # times that the system gave no memory for the stock, or the driver did not pin a slab
        self.late = 0  # slabs that were asked for when none was ready
        self.spare: Callable[[], int] = lambda: 0  # bytes that may lie idle beside the stock
        self.busy: Callable[[], bool] = lambda: False  # whether launches would wait for the driver now
        self._stock = stock
        self._driver = pin
        self._pin = None if pin is None else self._ask_driver
        self._pause, self._quiet, self._calm, self._apart = pause, quiet, calm, apart
        self._made_at = -apart  # when the last one was made for a stock that was low; by a monotonic clock
        self._taken_at = -max(quiet, calm)  # when a slab was asked for, or a load ended, last; by a monotonic clock
        self._readings = 0  # loads under way
        self._pinning = threading.Lock()  # one at a time: launches wait for the driver's own lock
        self._idle: dict[int, SimpleQueue[Slab]] = {}  # by size in bytes
        self._cleared: SimpleQueue[Slab] = SimpleQueue()  # of the usual size, to be pinned yet
        self._news: SimpleQueue[bool] = SimpleQueue()  # wakes the thread; False ends it
        self._stopped = False
        self._counting = threading.Lock()
        self._makers = ThreadPoolExecutor(SLAB_MAKERS, "rekindle-slab")
        self._thread: threading.Thread | None = None
        if stock or pin is not None:
            self._thread = threading.Thread(target=self._keep_stock, name="rekindle-slabs", daemon=True)
            self._thread.start()
            self.review()

    @property
    def idle_bytes(self) -> int:
        idle = sum(nbytes * slabs.qsize() for nbytes, slabs in self._idle.copy().items())
        return idle + self.size * self._cleared.qsize()

    def take(self, nbytes: int) -> SlabSlice:
        """A whole slab, or one of as many times its size as is needed. Never waits: it may still have to be made."""
        whole = max(1, -(-nbytes // self.size)) * self.size
        slab, self._taken_at = self._find(whole) or self._new(whole), time.monotonic()
        memory = slab.lend()
        weakref.finalize(memory, self._came_back, slab).atexit = False
        self.review()
        return SlabSlice(memory, slab)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """While slabs are filled from files: the stock waits, unless it is low."""
        with self._counting:
            self._readings += 1
        try:
            yield
        finally:
            with self._counting:
                self._readings -= 1
            self._taken_at = time.monotonic()
            self.review()

    def _find(self, nbytes: int) -> Slab | None:
        try:
            return self._idle[nbytes].get_nowait()
        except (KeyError, Empty):
            return None

    def _new(self, nbytes: int) -> Slab:
        self.late += 1
        return self._cleared_one() or Slab(nbytes, self._pin) if nbytes == self.size else Slab(nbytes, self._pin)

    def _cleared_one(self) -> Slab | None:
        try:
            return self._cleared.get_nowait()
        except Empty:
            return None

    def _came_back(self, slab: Slab) -> None:
        """Called where the last reference is dropped, perhaps by the garbage collector at any point: takes no lock."""
        if self._stopped:
            return
        # One that was never made would be as slow as a new one.
        if slab.made:
            self._keep(slab)
        self.review()

    def _keep(self, slab: Slab) -> None:
        self._idle.setdefault(slab.nbytes, SimpleQueue()).put(slab)

    def review(self) -> None:
        """After a change: give back what may not stay idle, and fill the stock."""
        if self._thread is None:
            self._trim()
        else:
            self._news.put(True)

    def _trim(self) -> None:
        """What is cleared alone goes first, then odd sizes."""
        while self._too_much and self._cleared_one() is not None:
            pass
        for nbytes in sorted(self._idle.copy(), reverse=True):
            while self._too_much and self._find(nbytes) is not None:
                pass

    @property
    def _too_much(self) -> bool:
        return self.idle_bytes > self._most_idle

    @property
    def _most_idle(self) -> int:
        """Bytes."""
        return self._stock * self.size + max(0, self.spare())

    # The stock

    def _keep_stock(self) -> None:
        while not self._stopped and self._news.get():
            while not self._stopped and (missing := self._wanted() - self._ready()) > 0:
                if LOW_PART * self._ready() < self._stock:
                    self._restock_low(missing)
                elif (wait := self._until_quiet_for(self._calm)) > 0:
                    self._trim()
                    self._rest(wait)
                elif (wait := self._until_quiet_for(self._quiet)) > 0 or self.busy():
                    self._trim()
                    if self._cleared.qsize() < missing and self.idle_bytes + self.size <= self._most_idle:
                        self._restock(1, self._clear)
                    else:
                        self._rest(wait if wait > 0 else self._quiet)
                else:
                    self._restock(1)  # a request may come any moment
            self._trim()

    def _restock_low(self, missing: int) -> None:
        calm = not self.busy() and self._until_quiet_for(self._calm) <= 0
        if calm or SPACED_PART * self._ready() < self._stock:
            self._restock(missing)
        elif (wait := self._made_at + self._apart - time.monotonic()) > 0:
            self._trim()
            self._rest(wait)
        else:
            self._restock(1)
            self._made_at = time.monotonic()

    def _until_quiet_for(self, seconds: float) -> float:
        """Seconds until nobody has asked for memory for so long, at the earliest."""
        return seconds if self._readings else self._taken_at + seconds - time.monotonic()

    def _rest(self, seconds: float) -> None:
        """Until then, or until there is news."""
        with contextlib.suppress(Empty):
            if not self._news.get(timeout=seconds):
                self._news.put(False)  # `stop` was called: for `_keep_stock`

    def _wanted(self) -> int:
        """Slabs of the usual size that should lie ready."""
        ahead = max(0, self.spare()) // SPARE_PART if self._stock else 0
        return self._stock + ahead // self.size

    def _ready(self) -> int:
        return self._idle[self.size].qsize() if self.size in self._idle else 0

    def _restock(self, missing: int, make: Callable[[], None] | None = None) -> None:
        """Some at a time, each on a thread of its own: the system clears memory for several at once."""
        try:
            making = [self._makers.submit(make or self._make) for _ in range(min(missing, SLAB_MAKERS))]
        except RuntimeError:  # the interpreter ends, and nobody has called `stop`
            self._stopped = True
            return
        errors = [error for each in making if (error := each.exception()) is not None]
        for error in errors:
            if not isinstance(error, (OSError, MemoryError)):
                self._stopped = self._interpreter_ends()
                if self._stopped:
                    return
                raise error
        if errors:  # the system may have memory again soon
            self._count_refusal(f"no memory for the stock, asking again every {self._pause:g} s: {errors[0]}")
            self._trim()  # what the RAM tier needs back does not wait for the stock
            self._rest(self._pause)

    def _interpreter_ends(self) -> bool:
        """No executor takes work any more: not ours, and not the one on whose thread the driver is asked."""
        try:
            self._makers.submit(int)
        except RuntimeError:
            return True
        return False

    def _make(self) -> None:
        slab = self._cleared_one() or Slab(self.size, self._pin)
        slab.make()
        self._keep(slab)

    def _clear(self) -> None:
        self._cleared.put(Slab(self.size, self._pin).clear())

    def _ask_driver(self, address: int, nbytes: int) -> Callable[[], object] | None:
        with self._pinning:
            unpin = None if self._driver is None else self._driver(address, nbytes)
        if unpin is None:
            self._count_refusal("the system pins no more memory: restores from RAM will be slower")
        return unpin

    def _count_refusal(self, words: str) -> None:
        with self._counting:
            self.refused += 1
            first = self.refused == 1
        if first:
            log.warning("%s", words)

    def stop(self) -> None:
        """End the thread and give back what is idle. What is lent stays good, and more can be had."""
        self._stopped = True
        if self._thread is not None:
            self._news.put(False)
            self._thread.join()
            self._thread = None
        self._makers.shutdown()
        for nbytes in self._idle.copy():
            while self._find(nbytes) is not None:
                pass
        while self._cleared_one() is not None:
            pass


@dataclass(frozen=True, slots=True, eq=False)
class SlabSlice:
    """Memory cut from a slab, and that slab."""

    memory: Bytes
    slab: Slab


class Cuts:
    """Cuts slabs in order, for memory of about equal lifetime. Keeps no reference to any of it."""

    def __init__(self, slabs: Slabs) -> None:
        self._slabs = slabs
        self._lock = threading.Lock()
        self._current: tuple[weakref.ref[Bytes], weakref.ref[Slab]] | None = None  # a slab in use
        self._used = 0  # bytes of it

    def cut(self, nbytes: int) -> SlabSlice:
        """`nbytes` bytes, on an EDGE. A larger request than a slab gets memory of its own."""
        with self._lock:
            whole = self._rest()
            if whole is None or self._used + nbytes > self._slabs.size:
                whole = self._slabs.take(nbytes)
                if nbytes > self._slabs.size:
                    return SlabSlice(whole.memory[:nbytes], whole.slab)
                self._current, self._used = (weakref.ref(whole.memory), weakref.ref(whole.slab)), 0
            start, self._used = self._used, self._used + -(-nbytes // EDGE) * EDGE
            return SlabSlice(whole.memory[start : start + nbytes], whole.slab)

    def fitting(self, nbytes: int) -> int:
        """How many pieces of `nbytes` the next cut can hold: in the rest of the slab in use, or in a whole one."""
        with self._lock:
            left = 0 if self._rest() is None else (self._slabs.size - self._used) // nbytes
            return left or max(1, self._slabs.size // nbytes)

    def _rest(self) -> SlabSlice | None:
        """The slab in use; None if nothing of it is referred to any more."""
        if self._current is None:
            return None
        memory, slab = self._current[0](), self._current[1]()
        return None if memory is None or slab is None else SlabSlice(memory, slab)

"""Copies in host memory that nobody waits for.

On a GPU what is to be copied is set apart on the device, in the order of the layers' own work, and travels to pinned
memory on a stream of its own while the layers go on. Whoever reads it on the host first asks `Ready`.

Pinned memory is dear to allocate (milliseconds for a few megabytes, with a lock that launches wait for), so it is cut
from slabs that a thread keeps in stock. It stays pinned while a snapshot holds it: a GPU reads it back at the speed of
the link, where it would read ordinary memory at a fraction of that.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from rekindle.snapshots.files import raw
from rekindle.snapshots.types import Ready

SLAB = 16 << 20  # bytes; a power of two, since torch rounds pinned memory up to one
RING = 4  # slabs through which memory that is not pinned goes up
FILLERS = max(1, min((os.cpu_count() or 1) // 2, 8))  # threads that fill them
STOCK = 8  # slabs that wait to be used, where the plan does not say
EDGE = 256  # bytes on which every copy begins

PAUSE = 1.0  # seconds before the stock asks again for memory that it was refused

log = logging.getLogger(__name__)


class Passed:
    """Done when everything that was handed to the stream so far has passed."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event: torch.cuda.Event | None = stream.record_event()

    @property
    def done(self) -> bool:
        if self._event is not None and self._event.query():
            self._event = None
        return self._event is None

    def wait(self) -> None:
        if (event := self._event) is not None:
            event.synchronize()
            self._event = None


class HostCopies:
    """Takes tensors of one device to host memory, and back."""

    def __init__(self, device: torch.device, stock: int) -> None:
        """stock: slabs of pinned memory that wait to be used."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._use(Slabs(stock), lambda: Passed(torch.cuda.current_stream(device)))

    def _use(self, slabs: Slabs, passed: Callable[[], Ready]) -> None:
        self._slabs = slabs
        # Pages outlive the own parts of the snapshots beside them: in one slab they would keep each other's memory.
        self._own, self._pages = Cuts(slabs), Cuts(slabs)
        self._uploads = Uploads(slabs.next, passed)

    @property
    def pinned(self) -> bool:
        return self._stream is not None

    def take_rows(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """The rows of each in host memory, complete once `ready` is: pages, which lie behind each other and fill the
        slabs. The tensors are contiguous and written by nobody else."""
        if not self.pinned:
            return [list(tensor.unbind()) for tensor in tensors]
        runs = [self._pages.rows(tensor) for tensor in tensors]
        self._copy(runs, tensors)
        return [[row for run in its_runs for row in run.unbind()] for its_runs in runs]

    def _copy(self, runs: Sequence[Sequence[torch.Tensor]], tensors: Sequence[torch.Tensor]) -> None:
        """Each tensor to the places for its rows, a run at a time, on the stream for it."""
        assert self._stream is not None, "beside a CPU nothing is copied"
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for its_runs, tensor in zip(runs, tensors, strict=True):
                for run, rows in zip(its_runs, tensor.split([len(run) for run in its_runs]), strict=True):
                    run.copy_(rows, non_blocking=True)
                tensor.record_stream(self._stream)  # its memory is not given to others before it has been read

    def take_live(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the tensors hold now, though they are written again: set apart first, many in one buffer, since a
        launch for each would cost the caller more than the copies."""
        if not self.pinned:
            return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        groups = list(in_groups(tensors, SLAB))
        buffers = [torch.empty(size_of(group), dtype=torch.uint8, device=self._device) for group in groups]
        for group, buffer in zip(groups, buffers, strict=True):
            copy_all(cut(buffer, group), group)
        copies = [self._own.like(buffer) for buffer in buffers]
        self._copy([[copy] for copy in copies], buffers)
        return [tensor for group, copy in zip(groups, copies, strict=True) for tensor in cut(copy, group)]

    def send(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Host memory to the device, (to, from) each, on the current stream."""
        ordinary = list[tuple[torch.Tensor, torch.Tensor]]()
        for to, tensor in pairs:
            if self.pinned and not tensor.is_pinned():
                ordinary.append((to, tensor))
            else:
                to.copy_(tensor, non_blocking=True)
        targets = iter([to for to, _ in ordinary])
        for group in self.through([tensor for _, tensor in ordinary]) if ordinary else ():
            for tensor in group:
                next(targets).copy_(tensor, non_blocking=True)

    def through(self, tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """What `Uploads.through` says."""
        assert self.pinned, "only what goes to a GPU goes through pinned memory"
        return self._uploads.through(tensors)

    def ready(self) -> Ready | None:
        """Of all that was taken so far; None where nothing is waited for."""
        return None if self._stream is None else Passed(self._stream)

    def join(self) -> None:
        """What the device runs from now on finds every copy complete."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def stop(self) -> None:
        """End the threads. What was taken stays good."""
        if self.pinned:
            self._slabs.stop()
            self._uploads.stop()


def in_one_piece(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of one shape as one; a view where they lie behind each other, as in an object that was read from disk."""
    first, last = tensors[0], tensors[-1]
    start, nbytes = first.data_ptr(), first.nbytes
    behind = all(tensor.data_ptr() == start + i * nbytes for i, tensor in enumerate(tensors))
    # What lies between the first and the last is in their memory too.
    if not behind or first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return torch.stack(list(tensors))
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


def allocate_pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes that `cut` needs."""
    return sum(-(-tensor.nbytes // EDGE) * EDGE for tensor in tensors)


def cut(memory: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Places for contiguous copies of the tensors, each on an EDGE of the memory."""
    views, start = list[torch.Tensor](), 0
    for tensor in tensors:
        place = memory[start : start + tensor.nbytes].view(tensor.dtype)
        views.append(place.view(tensor.shape))
        start += size_of([tensor])
    return views


def in_groups(tensors: Iterable[torch.Tensor], most: int) -> Iterator[list[torch.Tensor]]:
    """In order, as many at a time as `most` bytes hold; one that is larger goes alone."""
    group, size = list[torch.Tensor](), 0
    for tensor in tensors:
        if group and size + size_of([tensor]) > most:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += size_of([tensor])
    if group:
        yield group


def copy_all(to: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    """On one device. What lies in one piece is copied by one launch for all of a type."""
    kinds: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for place, tensor in zip(to, tensors, strict=True):
        if tensor.is_contiguous() and tensor.nbytes:
            places, sources = kinds.setdefault(tensor.dtype, ([], []))
            places.append(place)
            sources.append(tensor)
        else:
            place.copy_(tensor)
    for places, sources in kinds.values():
        torch._foreach_copy_(places, sources)


class Uploads:
    """Host memory that is not pinned, on its way to the device.

    A copy from there takes the driver through small buffers of its own, on the caller's thread, at a fraction of the
    link's speed. Here threads fill some pinned slabs while others travel; a slab is filled again only after its copies
    have passed.
    """

    def __init__(self, slab: Callable[[], torch.Tensor], passed: Callable[[], Ready]) -> None:
        """slab: gives a new one; passed: done when everything handed to the current stream so far has passed."""
        self._slab = slab
        self._passed = passed
        self._idle: deque[tuple[torch.Tensor, Ready]] = deque()  # slabs, and until when their copies are under way
        self._made = 0
        self._threads = ThreadPoolExecutor(FILLERS, "rekindle-upload")

    def through(self, tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """The same in pinned memory, in order, a group at a time. A group is to be read by what is handed to the
        current stream before the next group is asked for, and by nothing else."""
        filling: deque[_Filling] = deque()
        try:
            for group in in_groups(tensors, SLAB):
                if len(filling) == RING:
                    yield from self._arrive(filling.popleft())
                filling.append(self._fill(group))
            while filling:
                yield from self._arrive(filling.popleft())
        finally:
            for given_up in filling:  # whoever reads them failed
                wait(given_up.work)
                self._idle.append((given_up.slab, self._passed()))

    def stop(self) -> None:
        self._threads.shutdown()

    def _fill(self, group: list[torch.Tensor]) -> _Filling:
        slab = self._next()
        if size_of(group) > slab.nbytes:  # a single one, larger than any slab: the driver copies it before it returns
            return _Filling(slab, group, [])
        places = cut(slab, group)
        stripes = [(places[i::FILLERS], group[i::FILLERS]) for i in range(min(FILLERS, len(group)))]
        return _Filling(slab, places, [self._threads.submit(_fill_places, *stripe) for stripe in stripes])

    def _arrive(self, filling: _Filling) -> Iterator[list[torch.Tensor]]:
        try:
            wait(filling.work)
            for work in filling.work:
                work.result()
            yield filling.places
        finally:
            self._idle.append((filling.slab, self._passed()))

    def _next(self) -> torch.Tensor:
        if self._made < RING:
            self._made += 1
            return self._slab()
        slab, passed = self._idle.popleft()
        passed.wait()
        return slab


@dataclass(frozen=True, slots=True, eq=False)
class _Filling:
    slab: torch.Tensor
    places: list[torch.Tensor]
    work: list[Future[None]]


def _fill_places(places: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
    # Not by torch, whose copies would call threads of their own.
    for place, tensor in zip(places, tensors, strict=True):
        np.copyto(raw(place), raw(tensor))


class Slabs:
    """Pinned memory in pieces of one size, some of which a thread keeps in stock. A slab is given back when nothing
    cut from it is held any more."""

    def __init__(
        self,
        stock: int,
        size: int = SLAB,
        allocate: Callable[[int], torch.Tensor] = allocate_pinned,
        pause: float = PAUSE,
    ) -> None:
        """pause: seconds before memory that was refused is asked for again."""
        self.size = size
        self.allocate = allocate
        self.refused = 0  # times that the stock did not get memory
        self._pause = pause
        self._stock: queue.Queue[torch.Tensor] = queue.Queue(max(1, stock))  # a queue for 0 has no end
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._restock, name="rekindle-pinned", daemon=True)
        self._thread.start()

    def _restock(self) -> None:
        while not self._stopped.is_set():
            try:
                slab = self.allocate(self.size)
            except RuntimeError as error:  # the system's answer may be another one soon
                if not self.refused:
                    log.warning("no pinned memory for the stock, asking again every %g s: %s", self._pause, error)
                self.refused += 1
                self._stopped.wait(self._pause)
                continue
            self._stock.put(slab)

    def next(self) -> torch.Tensor:
        """A whole one."""
        try:
            return self._stock.get_nowait()
        except queue.Empty:
            return self.allocate(self.size)

    def stop(self) -> None:
        """Give back the stock. Whoever asks from now on waits for the system."""
        self._stopped.set()
        self._empty()  # the thread may wait for room; it puts one slab more at most
        self._thread.join()
        self._empty()

    def _empty(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._stock.get_nowait()


class Cuts:
    """Memory cut from slabs, in order, for what lives about equally long."""

    def __init__(self, slabs: Slabs) -> None:
        self._slabs = slabs
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory for a contiguous copy of the tensor."""
        if not tensor.numel():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        return self._cut(tensor.nbytes).view(tensor.dtype).view(tensor.shape)

    def rows(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The same in runs of rows: as many as the slab in use still holds, then as many as the next one does."""
        runs, left, nbytes = list[torch.Tensor](), tensor, tensor[0].nbytes
        while len(left):
            fitting = (self._slab.nbytes - self._used) // nbytes or self._slabs.size // nbytes or 1
            runs.append(self.like(left[:fitting]))
            left = left[fitting:]
        return runs

    def _cut(self, nbytes: int) -> torch.Tensor:
        if nbytes > self._slabs.size:
            return self._slabs.allocate(nbytes)
        if self._used + nbytes > self._slab.nbytes:
            self._slab, self._used = self._slabs.next(), 0
        cut = self._slab[self._used : self._used + nbytes]
        self._used += -(-nbytes // EDGE) * EDGE
        return cut

"""Copies in host memory that nobody waits for.

On a GPU what is written again is set apart on the device, in the order of the layers' own work; pages are sealed, and
read where they lie. Both travel to slabs of pinned memory on a stream of their own while the layers go on. Whoever
reads them on the host first asks `Ready`. Where no slab is ready a thread makes one and hands over the copies, so the
caller never waits for memory.

Memory that a GPU may read or write is held here until it has, since a slab that nobody holds is used again.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from rekindle.errors import CopyFailed
from rekindle.kernels.paging import fetch_pages
from rekindle.pool.homes import sent
from rekindle.snapshots.files import raw
from rekindle.snapshots.slabs import EDGE, Cuts, Piece, Slabs
from rekindle.snapshots.types import Page, Ready

AT_ONCE = 64  # pages that are gathered on the device at a time, on their way to the host
RING = 4  # slabs through which memory that is not pinned goes up
FILLERS = max(1, min((os.cpu_count() or 1) // 2, 8))  # threads that fill them
STOCK = 8  # slabs that wait to be used, where the plan does not say

IN_FLIGHT = 2  # captures that lie apart on the device until they are copied, as the plan counts

PORTABLE = 1  # cudaHostRegister: for every GPU of this process


class Passed:
    """Done when everything that was handed to the stream so far has passed."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event: torch.cuda.Event | None = stream.record_event()

    @property
    def done(self) -> bool:
        event = self._event  # another thread may ask as well
        if event is not None and event.query():
            self._event = event = None
        return event is None

    def wait(self) -> None:
        if (event := self._event) is not None:
            event.synchronize()
            self._event = None


class Later:
    """Copies that a thread hands over when it has memory for them."""

    def __init__(self, handed_over: Future[Ready]) -> None:
        self.handed_over = handed_over

    @property
    def failed(self) -> bool:
        """Some of them never come; others may be under way all the same."""
        return self.handed_over.done() and self.handed_over.exception() is not None

    @property
    def done(self) -> bool:
        return self.failed or (self.handed_over.done() and self.handed_over.result().done)

    def wait(self) -> None:
        if (error := self.handed_over.exception()) is not None:
            raise CopyFailed(f"copies to host memory could not be handed to the device: {error}") from error
        self.handed_over.result().wait()


@dataclass(frozen=True, slots=True, eq=False)
class Together:
    """Copies that were taken at several times."""

    takings: tuple[Ready, ...]

    @property
    def done(self) -> bool:
        return all(taking.done for taking in self.takings)

    def wait(self) -> None:
        for taking in self.takings:
            taking.wait()


def has_failed(taking: Ready | None) -> bool:
    return isinstance(taking, Later) and taking.failed


class HostCopies:
    """Takes tensors of one device to host memory, and back."""

    def __init__(self, device: torch.device, stock: int) -> None:
        """stock: slabs of pinned memory that wait to be used."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self.slabs: Slabs | None = None
        self._apart: torch.Tensor | None = None  # where pages are gathered on their way to the host
        self._last: Ready | None = None  # of the copies to the host that were asked for last
        self._joined: Ready | None = None  # those that the current stream waits for already
        self._in_use: list[object] = []  # what the current stream may have been told to read …
        self._held: deque[tuple[Ready, object]] = deque()  # … and what a GPU reads or writes, and until when
        self._set_apart: deque[Ready] = deque()  # captures whose own parts lie apart on the device
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._use(Slabs(stock, pin=partial(pin, device)))
            none = torch.empty(1, 0, dtype=torch.int64, device=device)
            fetch_pages(none, none, 16 * EDGE)  # compiled now, not by the first capture

    def _use(self, slabs: Slabs) -> None:
        self.slabs = slabs
        # Pages outlive the own parts of the snapshots beside them: in one slab they would keep each other's memory.
        self._own, self._pages = Cuts(slabs), Cuts(slabs)
        self._uploads = Uploads(partial(_whole, slabs), self._passed, slabs.size)
        self._thread = ThreadPoolExecutor(1, "rekindle-copies")

    @property
    def pinned(self) -> bool:
        return self.slabs is not None

    # To the host

    def take_pages(self, layers: Sequence[torch.Tensor], places: Sequence[int]) -> list[tuple[Page, ...]]:
        """Copies of sealed pages [2, PAGE, kv_heads, row] by place, one per layer, the layers of a page behind each
        other; complete once `ready` is. Nobody writes the places before the current stream has joined."""
        if not self.pinned:
            index = torch.tensor(places)
            return list(zip(*(Page.all_of(layer[index], None) for layer in layers), strict=True))
        groups = [places[start : start + AT_ONCE] for start in range(0, len(places), AT_ONCE)]
        nbytes, shape = layers[0][0].nbytes, layers[0].shape[1:]
        if self._apart is None:
            size = AT_ONCE * len(layers) * nbytes
            self._apart = torch.empty(size, dtype=torch.uint8, device=layers[0].device)
        addresses = self._addresses(layers, groups)
        pieces = [_cut_rows(self._pages, len(group), len(layers) * nbytes) for group in groups]
        self._copy([piece for its in pieces for piece in its], lambda: self._gather(addresses, nbytes, pieces))
        copies = list[Page]()
        for piece in (piece for its_pieces in pieces for piece in its_pieces):
            copies += Page.all_of(_rows_of(piece, layers[0].dtype, shape), piece.slab)
        return [tuple(copies[i : i + len(layers)]) for i in range(0, len(copies), len(layers))]

    def _addresses(self, layers: Sequence[torch.Tensor], groups: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Where the pages of each group lie and where they are gathered, int64 [2, layers, pages] on the device. Sent
        by the caller, though on the stream of the copies, so that their thread asks the device for no memory."""
        assert self._apart is not None, "whoever asks for pages makes it"
        nbytes, sent_groups = layers[0][0].nbytes, list[torch.Tensor]()
        bases = torch.tensor([layer.data_ptr() for layer in layers])
        with torch.cuda.stream(self._stream):
            for places in groups:
                sources = bases[:, None] + torch.tensor(places) * nbytes  # [layers, pages]
                targets = torch.arange(sources.numel()).view(len(places), -1).T * nbytes + self._apart.data_ptr()
                sent_groups.append(sent(torch.stack((sources, targets)), self._apart.device))
        return sent_groups

    def _gather(self, addresses: Sequence[torch.Tensor], nbytes: int, pieces: Sequence[Sequence[Piece]]) -> None:
        """Pages by address to pieces of host memory, through one buffer on the device: its stream keeps the order."""
        assert self._apart is not None, "whoever asks for pages makes it"
        for (sources, targets), its_pieces in zip(addresses, pieces, strict=True):
            fetch_pages(targets, sources, nbytes)
            _bring(its_pieces, self._apart)

    def take_live(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the tensors hold now, though they are written again: those of one shape are set apart together, since a
        launch for each would cost the caller more than the copies."""
        if not self.pinned:
            return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]
        alike: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
        for number, tensor in enumerate(tensors):
            alike.setdefault((tensor.dtype, tensor.shape), []).append(number)
        self._await_room_apart()
        taken: dict[int, torch.Tensor] = {}
        apart, pieces = list[torch.Tensor](), list[list[Piece]]()
        for (dtype, shape), numbers in alike.items():
            rows = torch.stack([tensors[number] for number in numbers])
            if not rows.numel():
                taken |= dict.fromkeys(numbers, torch.empty(shape, dtype=dtype))
                continue
            apart.append(rows)
            pieces.append(_cut_rows(self._own, len(numbers), rows[0].nbytes))
            copies = (copy for piece in pieces[-1] for copy in _rows_of(piece, dtype, shape).unbind())
            taken |= zip(numbers, copies, strict=True)
        taking = self._copy([piece for its in pieces for piece in its], lambda: self._bring_all(pieces, apart))
        self._set_apart.append(taking)
        return [taken[number] for number in range(len(tensors))]

    def _await_room_apart(self) -> None:
        """Until the device has room to set one more capture apart: only so many are counted in the plan."""
        while self._set_apart and self._set_apart[0].done:
            self._set_apart.popleft()
        if len(self._set_apart) == IN_FLIGHT:
            with contextlib.suppress(CopyFailed):  # said where that capture would be published
                self._set_apart.popleft().wait()

    def _bring_all(self, pieces: Sequence[Sequence[Piece]], apart: Sequence[torch.Tensor]) -> None:
        for its_pieces, rows in zip(pieces, apart, strict=True):
            if self._stream is not None:
                rows.record_stream(self._stream)  # its memory is not given to others before it has been read
            _bring(its_pieces, rows.flatten().view(torch.uint8))

    def _copy(self, pieces: Sequence[Piece], hand_over: Callable[[], None]) -> Ready:
        """Copies to the pieces, on the stream for it: now, or by the thread if some have yet to be made, or if it has
        earlier ones to hand over."""
        self.let_go()
        begin = self._after_current()
        waiting = any(isinstance(ready, Later) and not ready.handed_over.done() for ready, _ in self._held)
        if waiting or not all(piece.slab.pinned for piece in pieces):
            self._last = Later(self._thread.submit(self._make_and_copy, pieces, hand_over, begin))
            self._held.append((self._last, pieces))
            return self._last
        try:
            self._on_stream(hand_over, begin)
        finally:  # what was handed over before an error is under way all the same
            self._last = self._copied()
            self._held.append((self._last, pieces))
        return self._last

    def _make_and_copy(self, pieces: Sequence[Piece], hand_over: Callable[[], None], begin: Begin) -> Ready:
        for piece in pieces:
            piece.slab.make()
        self._on_stream(hand_over, begin)
        return self._copied()

    def _after_current(self) -> Begin:
        """Makes the copies' stream wait for all that was handed to the current one until now."""
        assert self._stream is not None, "beside a CPU nothing is copied"
        return partial(self._stream.wait_event, torch.cuda.current_stream(self._device).record_event())

    def _on_stream(self, hand_over: Callable[[], None], begin: Begin) -> None:
        with torch.cuda.stream(self._stream):
            begin()
            hand_over()

    def _copied(self) -> Ready:
        """Of all that was handed to the copies' stream so far."""
        assert self._stream is not None, "beside a CPU nothing is copied"
        return Passed(self._stream)

    def ready(self) -> Ready | None:
        """Of what was taken last; None where nothing is waited for."""
        return self._last

    def join(self) -> None:
        """What the device runs from now on finds every copy complete, if it comes at all, and may write what was
        copied."""
        if self._last is self._joined or self._last is None:
            return
        if isinstance(self._last, Later):
            wait([self._last.handed_over])
        self._follow_copies()
        self._joined = self._last

    def _follow_copies(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    # To the device

    def send(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Host memory to the device, (to, from) each, on the current stream."""
        ordinary = list[tuple[torch.Tensor, torch.Tensor]]()
        for to, tensor in pairs:
            if self.pinned and tensor.nbytes and not tensor.is_pinned():
                ordinary.append((to, tensor))
            else:
                self.hold(tensor)
                to.copy_(tensor, non_blocking=True)
        targets = iter([to for to, _ in ordinary])
        for group in self.through([tensor for _, tensor in ordinary]) if ordinary else ():
            for tensor in group:
                next(targets).copy_(tensor, non_blocking=True)

    def through(self, tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """What `Uploads.through` says."""
        assert self.pinned, "only what goes to a GPU goes through pinned memory"
        return self._uploads.through(tensors)

    # What a GPU still reads or writes

    def hold(self, memory: object) -> None:
        """Keep it until the device has done all that is handed to the current stream before the next `let_go`."""
        if self.pinned:
            self._in_use.append(memory)

    def let_go(self) -> None:
        """Of what the device has done with."""
        if self._in_use:
            self._held.append((self._passed(), self._in_use))
            self._in_use = []
        while self._held and self._held[0][0].done:
            ready, memory = self._held.popleft()
            if has_failed(ready):  # what it handed over before may be under way
                self._held.append((self._copied(), memory))

    def _passed(self) -> Ready:
        return Passed(torch.cuda.current_stream(self._device))

    def stop(self) -> None:
        """End the threads. What was taken stays good."""
        if self.slabs is not None:
            self._thread.shutdown()
            self.slabs.stop()
            self._uploads.stop()


Begin = Callable[[], object]


def pin(device: torch.device, address: int, nbytes: int) -> Callable[[], object] | None:
    """For every GPU of this process, at the same address.

    On a thread of its own: a refusal stays behind as the thread's last error, which the next launch on the caller's
    would take for its own.
    """
    with ThreadPoolExecutor(1, "rekindle-pin") as thread:
        return thread.submit(_register, device, address, nbytes).result()


def _register(device: torch.device, address: int, nbytes: int) -> Callable[[], object] | None:
    with torch.cuda.device(device):  # else the driver would set up the first GPU, which may be another's
        refused = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, PORTABLE))
    return None if refused else partial(_unregister, device, address)


def _unregister(device: torch.device, address: int) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)


def _whole(slabs: Slabs) -> torch.Tensor:
    """A slab, made."""
    piece = slabs.take(slabs.size)
    piece.slab.make()
    return torch.from_numpy(piece.memory)


def _cut_rows(cuts: Cuts, count: int, nbytes: int) -> list[Piece]:
    """For so many rows of such size, in as few pieces as can be."""
    pieces = list[Piece]()
    while count:
        fitting = min(count, cuts.fitting(nbytes))
        pieces.append(cuts.cut(fitting * nbytes))
        count -= fitting
    return pieces


def _rows_of(piece: Piece, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(piece.memory).view(dtype).view(-1, *shape)


def _bring(pieces: Sequence[Piece], data: torch.Tensor) -> None:
    """Bytes on the device, one behind the other, to the pieces; on the current stream."""
    start = 0
    for piece in pieces:
        stop = start + piece.memory.nbytes
        torch.from_numpy(piece.memory).copy_(data[start:stop], non_blocking=True)
        start = stop


def in_one_piece(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of one shape as one; a view where they lie behind each other, as in an object that was read from disk."""
    first, last = tensors[0], tensors[-1]
    start, nbytes = first.data_ptr(), first.nbytes
    behind = all(tensor.data_ptr() == start + i * nbytes for i, tensor in enumerate(tensors))
    # What lies between the first and the last is in their memory too.
    if not behind or first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return torch.stack(list(tensors))
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))


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


class Uploads:
    """Host memory that is not pinned, on its way to the device.

    A copy from there takes the driver through small buffers of its own, on the caller's thread, at a fraction of the
    link's speed. Here threads fill some pinned slabs while others travel; a slab is filled again only after its copies
    have passed.
    """

    def __init__(self, slab: Callable[[], torch.Tensor], passed: Callable[[], Ready], size: int) -> None:
        """slab: gives a new one of `size` bytes; passed: done when everything handed to the current stream so far has
        passed."""
        self._slab = slab
        self._size = size
        self._passed = passed
        self._idle: deque[tuple[torch.Tensor, Ready]] = deque()  # slabs, and until when their copies are under way
        self._made = 0
        self._threads = ThreadPoolExecutor(FILLERS, "rekindle-upload")

    def through(self, tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """The same in pinned memory, in order, a group at a time. A group is to be read by what is handed to the
        current stream before the next group is asked for, and by nothing else."""
        filling: deque[_Filling] = deque()
        try:
            for group in in_groups(tensors, self._size):
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
            slab = self._slab()
            self._made += 1
            return slab
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

"""Copies of the device's state in host memory, taken while the layers go on.

On a GPU, state that the next step overwrites is first copied on the device, in the order of the layers' own work; pages
are sealed, and read where they lie. Both travel to slabs of pinned memory on a stream of their own. The host reads them
once their `Ready` is done. Where no slab is ready the copy thread makes one and hands the copies over, so a capture
never waits for memory.

Memory that a GPU may still read or write is held here until it has, since a slab without holders is used again.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from rekindle.buffers import CAPTURED_PAGES, IN_FLIGHT, SLAB_BYTES, UPLOAD_SLABS
from rekindle.errors import CopyFailed
from rekindle.kernels.paging import fetch_pages
from rekindle.kernels.pinning import pin
from rekindle.kernels.upload import CopyThreads, Passed, Uploads
from rekindle.pool.page_addresses import sent
from rekindle.pool.ready import Later, has_failed
from rekindle.snapshots.slabs import EDGE, Cuts, Slabs, SlabSlice
from rekindle.snapshots.types import Page, Ready

FETCHED = 128  # bytes; of what is fetched by address, as many times these
UPLOAD_THREADS = max(1, min((os.cpu_count() or 1) // 2, 8))  # that fill them


Begin = Callable[[], object]  # makes the copies' stream wait for the work before them
Pair = tuple[torch.Tensor, torch.Tensor]  # to the device, from host memory
Stack = tuple[list[int], torch.Tensor]  # tensors of one shape by number, and copies of them on the device


class LiveCopy:
    """Tensors as they were. Those that lie on a device take room there until they are in host memory."""

    def __init__(self, taken: list[torch.Tensor] | Callable[[], tuple[list[torch.Tensor], Ready]]) -> None:
        """taken: in host memory by now, or what begins the copies."""
        self._send = taken if callable(taken) else None
        self._taken = None if callable(taken) else taken
        self.ready: Ready | None = None  # once they have begun; None: they are complete
        self._error: Exception | None = None  # why they could not begin, or came to nothing before anybody asked

    def to_host(self) -> list[torch.Tensor]:
        """In host memory, complete once `ready` is. Asked for once: their memory is the caller's."""
        if self._error is not None:
            raise self._error
        self._begin()
        taken, self._taken = self._taken, None
        assert taken is not None, "they were handed out"
        return taken

    def _begin(self) -> None:
        if self._send is not None:
            try:
                self._taken, self.ready = self._send()
            finally:
                self._send = None

    def make_way(self) -> None:
        """They begin, for the sake of others that need the room; what goes wrong is for who asks for these."""
        try:
            self._begin()
        except Exception as error:
            self._error = error

    @property
    def done(self) -> bool:
        return self._send is None and (self.ready is None or self.ready.done)

    def wait(self) -> None:
        """Until the room on the device is free."""
        self.make_way()
        try:
            if self.ready is not None:
                self.ready.wait()
        except CopyFailed as error:
            self._error = error


class HostCopies:
    """Copies tensors of one device to host memory, and back."""

    def __init__(self, device: torch.device, stock: int) -> None:
        """stock: slabs of pinned memory that are kept ready."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        self.slabs: Slabs | None = None
        self._gathered: torch.Tensor | None = None  # pages on the device, on their way to the host
        self._last: Ready | None = None  # of the copies to the host that were asked for last
        self._joined: Ready | None = None  # those that the current stream waits for already
        self._in_use: list[object] = []  # memory that launches on the current stream may read …
        self._held: deque[tuple[Ready, object]] = deque()  # … and memory that a GPU reads or writes, and until when
        self._in_flight: deque[LiveCopy] = deque()  # captures whose state is still copied on the device …
        self.most_in_flight = IN_FLIGHT  # … at most
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)
            self._use(Slabs(stock, pin=partial(pin, device)))
            none = torch.empty(1, 0, dtype=torch.int64, device=device)
            fetch_pages(none, none, 16 * EDGE)  # compiled now, not by the first capture

    def _use(self, slabs: Slabs) -> None:
        self.slabs = slabs
        # Pages outlive the other state of their snapshots: in one slab they would keep its memory.
        self._own, self._pages = Cuts(slabs), Cuts(slabs)
        fillers = CopyThreads(UPLOAD_THREADS)
        self._uploads = Uploads(partial(_whole, slabs), self._passed, slabs.size, UPLOAD_SLABS, fillers)
        self._thread = ThreadPoolExecutor(1, "rekindle-copies")

    @property
    def pinned(self) -> bool:
        return self.slabs is not None

    # To the host

    def take_pages(self, layers: Sequence[torch.Tensor], places: Sequence[int]) -> list[tuple[Page, ...]]:
        """Copies of sealed pages [2, PAGE, kv_heads, row] by place, one per layer, the layers of a page contiguous;
        complete once `ready` is. The places must not be written before the current stream has joined."""
        if not self.pinned:
            index = torch.tensor(places)
            return list(zip(*(Page.all_of(layer[index], None) for layer in layers), strict=True))
        groups = [places[start : start + CAPTURED_PAGES] for start in range(0, len(places), CAPTURED_PAGES)]
        nbytes, shape = layers[0][0].nbytes, layers[0].shape[1:]
        if self._gathered is None:
            size = CAPTURED_PAGES * len(layers) * nbytes
            self._gathered = torch.empty(size, dtype=torch.uint8, device=layers[0].device)
        addresses = self._addresses(layers, groups)
        slices = [_cut_rows(self._pages, len(group), len(layers) * nbytes) for group in groups]
        flat = [target for targets in slices for target in targets]
        self._copy(flat, lambda: self._gather(addresses, nbytes, slices))
        copies = list[Page]()
        for target in flat:
            copies += Page.all_of(_rows_of(target, layers[0].dtype, shape), target.slab)
        return [tuple(copies[i : i + len(layers)]) for i in range(0, len(copies), len(layers))]

    def _addresses(self, layers: Sequence[torch.Tensor], groups: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Where the pages of each group lie and where they are gathered, int64 [2, layers, pages] on the device. Sent
        by the caller, though on the stream of the copies, so that the copy thread allocates no device memory."""
        assert self._gathered is not None, "made before pages are gathered"
        nbytes, to = layers[0][0].nbytes, self._gathered.data_ptr()
        bases = np.array([layer.data_ptr() for layer in layers])
        found = [_gathering(bases, np.array(places), nbytes, to) for places in groups]
        with torch.cuda.stream(self._stream):
            return [sent(torch.from_numpy(each), self._gathered.device) for each in found]

    def _gather(self, addresses: Sequence[torch.Tensor], nbytes: int, slices: Sequence[Sequence[SlabSlice]]) -> None:
        """Pages by address to host memory, through one buffer on the device: the stream keeps the order."""
        assert self._gathered is not None, "made before pages are gathered"
        for (sources, targets), to in zip(addresses, slices, strict=True):
            fetch_pages(targets, sources, nbytes)
            _copy_to_slabs(to, self._gathered)

    def copy_live(self, tensors: Sequence[torch.Tensor]) -> LiveCopy:
        """What the tensors hold now, though the next step overwrites them: copied on the device alone, since what is to
        be done for the host takes the caller longer, and may wait. Tensors of one shape are copied together, since a
        launch for each would cost more than the copies."""
        if not self.pinned:
            return LiveCopy([tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors])
        alike: dict[tuple[torch.dtype, torch.Size], list[int]] = {}
        for number, tensor in enumerate(tensors):
            alike.setdefault((tensor.dtype, tensor.shape), []).append(number)
        self._await_device_room()
        stacks = [(numbers, torch.stack([tensors[number] for number in numbers])) for numbers in alike.values()]
        copied = LiveCopy(partial(self._send_stacks, stacks, self._after_current()))
        self._in_flight.append(copied)
        return copied

    def _send_stacks(self, stacks: Sequence[Stack], begin: Begin) -> tuple[list[torch.Tensor], Ready]:
        """The rows of all stacks in host memory, by number, and when they are complete."""
        taken: dict[int, torch.Tensor] = {}
        full, slices = list[torch.Tensor](), list[list[SlabSlice]]()
        for numbers, rows in stacks:
            if not rows.numel():
                taken |= dict.fromkeys(numbers, torch.empty(rows.shape[1:], dtype=rows.dtype))
                continue
            full.append(rows)
            slices.append(_cut_rows(self._own, len(numbers), rows[0].nbytes))
            copies = (copy for target in slices[-1] for copy in _rows_of(target, rows.dtype, rows.shape[1:]).unbind())
            taken |= zip(numbers, copies, strict=True)
        flat = [target for targets in slices for target in targets]
        ready = self._copy(flat, lambda: self._copy_stacks(slices, full), begin)
        return [taken[number] for number in sorted(taken)], ready

    def has_room(self, others: int = 0) -> bool:
        """Whether fewer captures lie copied on the device than may, so many others counted: else the next one waits.
        From any thread."""
        return sum(not copied.done for copied in tuple(self._in_flight)) + others < self.most_in_flight

    def _await_device_room(self) -> None:
        while self._in_flight and self._in_flight[0].done:
            self._in_flight.popleft()
        if len(self._in_flight) >= self.most_in_flight:
            for copied in self._in_flight:
                copied.make_way()
            self._in_flight.popleft().wait()

    def _copy_stacks(self, slices: Sequence[Sequence[SlabSlice]], stacks: Sequence[torch.Tensor]) -> None:
        for to, rows in zip(slices, stacks, strict=True):
            if self._stream is not None:
                rows.record_stream(self._stream)  # torch gives its memory to others only after it has been read
            _copy_to_slabs(to, rows.flatten().view(torch.uint8))

    def _copy(self, slices: Sequence[SlabSlice], hand_over: Callable[[], None], begin: Begin | None = None) -> Ready:
        """Runs `hand_over` on the copies' stream: now, or on the copy thread where some slabs have yet to be made or
        that thread has earlier copies to hand over. begin: waits for what is copied; all that was launched if None."""
        self.let_go()
        begin = begin or self._after_current()
        waiting = any(isinstance(ready, Later) and not ready.handed_over.done() for ready, _ in self._held)
        if waiting or not all(target.slab.pinned for target in slices):
            self._last = Later(self._thread.submit(self._make_and_copy, slices, hand_over, begin))
            self._held.append((self._last, slices))
            return self._last
        try:
            self._on_stream(hand_over, begin)
        finally:  # what was handed over before an error is under way all the same
            self._last = self._copied()
            self._held.append((self._last, slices))
        return self._last

    def _make_and_copy(self, slices: Sequence[SlabSlice], hand_over: Callable[[], None], begin: Begin) -> Ready:
        for target in slices:
            target.slab.make()
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
        """Done when all that was handed to the copies' stream so far has passed."""
        assert self._stream is not None, "beside a CPU nothing is copied"
        return Passed(self._stream)

    def ready(self) -> Ready | None:
        """Of the copies that were taken last; None where nothing is waited for."""
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

    def send(self, pairs: Sequence[Pair]) -> None:
        """Host memory to the device, (to, from) each, on the current stream, in few calls, since they cost the caller
        more than bytes: the device itself reads all pinned tensors of one size; rows of open pages, which lie apart in
        it, go over in one copy where they lie side by side on the host, as captures leave them."""
        ordinary = list[Pair]()
        if self.pinned:
            pairs = self._fetch_alike(pairs)
        for run in _side_by_side(pairs) if self.pinned else [[pair] for pair in pairs]:
            first = run[0][1]
            if self.pinned and first.nbytes and not first.is_pinned():
                ordinary += run
                continue
            for _, tensor in run:
                self.hold(tensor)
            self._send_run([to for to, _ in run], first)
        targets = iter([to for to, _ in ordinary])
        for group in self.through([tensor for _, tensor in ordinary]) if ordinary else ():
            for tensor in group:
                next(targets).copy_(tensor, non_blocking=True)

    def _fetch_alike(self, pairs: Sequence[Pair]) -> list[Pair]:
        """One launch for all pinned tensors of a size; what is left."""
        alike, left, pinned = dict[int, list[Pair]](), list[Pair](), dict[int, bool]()
        for to, source in pairs:
            memory = source.untyped_storage().data_ptr()
            if memory not in pinned:
                pinned[memory] = source.is_pinned()
            if pinned[memory] and _can_be_fetched(to, source):
                alike.setdefault(source.nbytes, []).append((to, source))
            else:
                left.append((to, source))
        for nbytes, its in alike.items():
            self.hold(its)
            addresses = np.array([[[tensor.data_ptr() for tensor in tensors]] for tensors in zip(*its, strict=True)])
            targets, sources = sent(torch.from_numpy(addresses), self._device)
            fetch_pages(targets, sources, nbytes)
        return left

    def _send_run(self, targets: list[torch.Tensor], first: torch.Tensor) -> None:
        """first: of as many tensors side by side."""
        if len(targets) == 1:
            targets[0].copy_(first, non_blocking=True)
            return
        whole = first.as_strided((len(targets), *first.shape), (first.numel(), *first.stride()))
        torch._foreach_copy_(targets, list(whole.to(targets[0].device, non_blocking=True).unbind()))

    def through(self, tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
        """As `Uploads.through`."""
        assert self.pinned, "only what goes to a GPU goes through pinned memory"
        return self._uploads.through(tensors)

    # What a GPU still reads or writes

    def hold(self, memory: object) -> None:
        """Keeps it until the device has done all that is handed to the current stream before the next `let_go`."""
        if self.pinned:
            self._in_use.append(memory)

    def let_go(self) -> None:
        """Drops the memory that the device no longer reads or writes."""
        if self._in_use:
            self._held.append((self._passed(), self._in_use))
            self._in_use = []
        while self._held and self._held[0][0].done:
            ready, memory = self._held.popleft()
            if has_failed(ready):  # copies that were handed over before the failure may be under way
                self._held.append((self._copied(), memory))

    def _passed(self) -> Ready:
        return Passed(torch.cuda.current_stream(self._device))

    def stop(self) -> None:
        """End the threads. What was taken stays good."""
        if self.slabs is not None:
            self._thread.shutdown()
            self.slabs.stop()
            self._uploads.stop()


def _gathering(bases: np.ndarray, places: np.ndarray, nbytes: int, to: int) -> np.ndarray:
    """Addresses, int64 [2, layers, pages]: of pages by layer and place, and of the same from `to` on, page by page.
    Without torch, whose every call gives the interpreter's lock away."""
    targets = np.arange(len(bases) * len(places)).reshape(len(places), -1).T
    return np.stack((bases[:, None] + places * nbytes, targets * nbytes + to))


def _whole(slabs: Slabs) -> torch.Tensor:
    """A slab, made."""
    whole = slabs.take(slabs.size)
    whole.slab.make()
    return torch.from_numpy(whole.memory)


def _cut_rows(cuts: Cuts, count: int, nbytes: int) -> list[SlabSlice]:
    """For `count` rows of `nbytes`, in as few slices as possible."""
    slices = list[SlabSlice]()
    while count:
        fitting = min(count, cuts.fitting(nbytes))
        slices.append(cuts.cut(fitting * nbytes))
        count -= fitting
    return slices


def _rows_of(target: SlabSlice, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(target.memory).view(dtype).view(-1, *shape)


def _copy_to_slabs(slices: Sequence[SlabSlice], data: torch.Tensor) -> None:
    """Contiguous bytes on the device to the slices in order, on the current stream."""
    start = 0
    for target in slices:
        stop = start + target.memory.nbytes
        torch.from_numpy(target.memory).copy_(data[start:stop], non_blocking=True)
        start = stop


def _can_be_fetched(to: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether `fetch_pages` copies it, by the kernel that is compiled before the first request."""
    in_words = source.nbytes and not source.nbytes % FETCHED and not (to.data_ptr() | source.data_ptr()) % 16
    return bool(in_words) and to.dtype == source.dtype and to.is_contiguous() and source.is_contiguous()


def _side_by_side(pairs: Sequence[Pair]) -> list[list[Pair]]:
    """The pairs in runs whose sources have one shape and follow one another in one piece of memory; of a slab's bytes
    at most, since they lie apart on the device for a moment."""
    alike: dict[tuple[torch.dtype, torch.Size], list[Pair]] = {}
    for pair in pairs:
        alike.setdefault((pair[1].dtype, pair[1].shape), []).append(pair)
    runs = list[list[Pair]]()
    for its in alike.values():
        most = max(1, SLAB_BYTES // max(1, its[0][1].nbytes))
        runs.append(its[:1])
        for (_, last), pair in pairwise(its):
            if len(runs[-1]) < most and _follows(pair[1], last):
                runs[-1].append(pair)
            else:
                runs.append([pair])
    return runs


def _follows(tensor: torch.Tensor, last: torch.Tensor) -> bool:
    one_piece = tensor.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
    beside = bool(last.nbytes) and tensor.data_ptr() == last.data_ptr() + last.nbytes
    return one_piece and beside and tensor.is_contiguous() and last.is_contiguous()


def stack_or_view(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors of one shape, stacked; a view where they are contiguous in memory, as in an object read from disk."""
    first, last = tensors[0], tensors[-1]
    start, nbytes = first.data_ptr(), first.nbytes
    contiguous = all(tensor.data_ptr() == start + i * nbytes for i, tensor in enumerate(tensors))
    # Neighbours in memory may still be two allocations; then no view may span them.
    if not contiguous or first.untyped_storage().data_ptr() != last.untyped_storage().data_ptr():
        return torch.stack(list(tensors))
    return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))

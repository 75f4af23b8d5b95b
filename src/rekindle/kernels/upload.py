"""Host memory that is not pinned, copied to a GPU at the speed of the bus.

The driver copies such memory through small buffers of its own, on the caller's thread, at a fraction of the bus's
speed. Here threads fill a few pinned buffers while others travel; a buffer is filled again only after the copies out of
it have passed. `upload` sends weights while a model loads; the pool sends pages and states of restored sequences.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 256  # bytes: where a tensor begins in a buffer
PIECE = 4 << 20  # bytes that one thread copies at a time
LOAD_BUFFER = 64 << 20  # bytes of each of the buffers that weights go through …
LOAD_BUFFERS = 2
LOAD_THREADS = 8  # more of them only wait for the memory


class Awaitable(Protocol):
    def wait(self) -> None: ...


class Passed:
    """Done when everything that was handed to the stream so far has passed."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event: torch.cuda.Event | None = stream.record_event()

    @property
    def done(self) -> bool:
        event = self._event  # another thread may ask at the same time
        if event is not None and event.query():
            self._event = event = None
        return event is None

    def wait(self) -> None:
        if (event := self._event) is not None:
            event.synchronize()
            self._event = None


class Uploads:
    """Pinned buffers, each made when it is first needed, and threads that fill them."""

    def __init__(
        self,
        new_buffer: Callable[[], Tensor],
        passed: Callable[[], Awaitable],
        size: int,
        count: int,
        threads: CopyThreads,
    ) -> None:
        """new_buffer: makes one of `size` bytes, at most `count` times. passed: done when everything that was handed to
        the current stream so far has passed."""
        self._new_buffer = new_buffer
        self._passed = passed
        self._size, self._count = size, count
        self._threads = threads
        self._idle: deque[tuple[Tensor, Awaitable]] = deque()  # buffers, and until when copies out of them travel
        self._made = 0

    def through(self, tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
        """The same in pinned memory, in order, a group at a time. A group is to be read by what is handed to the
        current stream before the next group is asked for, and by nothing else."""
        filling: deque[_Filling] = deque()
        try:
            for group in in_groups(tensors, self._size):
                if len(filling) == self._count:
                    yield from self._filled(filling.popleft())
                filling.append(self._fill(group))
            while filling:
                yield from self._filled(filling.popleft())
        finally:
            for abandoned in filling:  # the reader failed
                wait(abandoned.work)
                self._idle.append((abandoned.buffer, self._passed()))

    def _fill(self, group: list[Tensor]) -> _Filling:
        buffer = self._next_buffer()
        if size_of(group) > buffer.nbytes:  # one tensor, larger than a buffer: the driver copies it before it returns
            return _Filling(buffer, group, [])
        places = cut(buffer, group)
        return _Filling(buffer, places, self._threads.fill(places, group))

    def _filled(self, filling: _Filling) -> Iterator[list[Tensor]]:
        try:
            wait(filling.work)
            for work in filling.work:
                work.result()
            yield filling.places
        finally:
            self._idle.append((filling.buffer, self._passed()))

    def _next_buffer(self) -> Tensor:
        if self._made < self._count:
            buffer = self._new_buffer()
            self._made += 1
            return buffer
        buffer, passed = self._idle.popleft()
        passed.wait()
        return buffer

    def stop(self) -> None:
        self._threads.stop()


@dataclass(frozen=True, slots=True, eq=False)
class _Filling:
    buffer: Tensor
    places: list[Tensor]
    work: list[Future[None]]


# Cutting buffers


def size_of(tensors: Iterable[Tensor]) -> int:
    """Bytes that `cut` needs."""
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)


def cut(buffer: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Places for contiguous copies of the tensors, each aligned."""
    views, start = list[Tensor](), 0
    for tensor in tensors:
        place = buffer[start : start + tensor.nbytes].view(tensor.dtype)
        views.append(place.view(tensor.shape))
        start += size_of([tensor])
    return views


def in_groups(tensors: Iterable[Tensor], most: int) -> Iterator[list[Tensor]]:
    """In order, as many at a time as `most` bytes hold; a larger tensor is a group of its own."""
    group, size = list[Tensor](), 0
    for tensor in tensors:
        if group and size + size_of([tensor]) > most:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += size_of([tensor])
    if group:
        yield group


class CopyThreads:
    """Threads that copy host memory. Not torch's own, which a copy by torch would start."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._threads = ThreadPoolExecutor(count, "rekindle-upload")

    def fill(self, places: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Future[None]]:
        """Copies the tensors to their contiguous places: in pieces, dealt out to the threads."""
        pieces = [piece for pair in zip(places, tensors, strict=True) for piece in _pieces(*pair)]
        return [self._threads.submit(_copy, pieces[i :: self._count]) for i in range(min(self._count, len(pieces)))]

    def stop(self) -> None:
        self._threads.shutdown()


def _pieces(place: Tensor, tensor: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    if tensor.nbytes <= PIECE or not tensor.is_contiguous():
        return [(place, tensor)]
    return zip(_bytes_of(place).split(PIECE), _bytes_of(tensor).split(PIECE), strict=True)


def _copy(pieces: Sequence[tuple[Tensor, Tensor]]) -> None:
    for place, tensor in pieces:
        np.copyto(_bytes_of(place).numpy(), _bytes_of(tensor).numpy())


def _bytes_of(tensor: Tensor) -> Tensor:
    """Flat uint8; a view of a contiguous tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# Weights


def upload(raw: np.ndarray, device: torch.device) -> Tensor:
    """raw uint8 [rows, bytes of a row] -> the same on the device."""
    if not any(raw.strides):  # one byte repeated, as in weights that are made up: nothing is read
        return torch.full(raw.shape, int(raw.flat[0]), dtype=torch.uint8, device=device)
    if device.type != "cuda":
        return torch.from_numpy(np.array(raw)).to(device)  # a copy: the caller may keep its bytes
    out = torch.empty(raw.shape, dtype=torch.uint8, device=device)
    _copy_through_pinned(torch.from_numpy(np.ascontiguousarray(raw).reshape(-1)), out.view(-1))
    return out


def _copy_through_pinned(raw: Tensor, out: Tensor) -> None:
    """Returns when all of `raw` has been read; torch keeps the buffers until the device has read them."""
    size, stream = min(LOAD_BUFFER, size_of([raw])), torch.cuda.current_stream(out.device)
    uploads = Uploads(
        lambda: torch.empty(size, dtype=torch.uint8, pin_memory=True),
        lambda: Passed(stream),
        size,
        LOAD_BUFFERS,
        _load_threads(),
    )
    targets = iter(out.split(size))
    for (part,) in uploads.through(raw.split(size)):
        next(targets).copy_(part, non_blocking=True)


@cache
def _load_threads() -> CopyThreads:
    return CopyThreads(min(LOAD_THREADS, len(os.sched_getaffinity(0))))

"""Host memory that is not pinned, copied to a GPU at the speed of the bus.

The driver copies such memory through small buffers of its own, on the caller's thread, at a fraction of the bus's
speed. Here threads fill a few pinned buffers while others travel; a buffer is filled again only after the copies out of
it have passed. `upload` sends weights while a model loads, and reads them straight from their file into the buffers;
the pool sends pages and states of restored sequences.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 256  # bytes: where a tensor begins in a buffer
PIECE = 4 << 20  # bytes that one thread copies at a time
LOAD_BUFFER = 32 << 20  # bytes of each of the buffers that weights go through …
LOAD_BUFFERS = 4  # … so many that threads fill some while others wait behind weights that the device still packs
LOAD_THREADS = 8  # more of them only wait for the memory

_loading = threading.Lock()  # the buffers for weights are one tensor's at a time


class Unread(Protocol):
    """uint8 [rows, bytes of a row] that still lie in a file."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def read(self) -> np.ndarray:
        """All of them, in an array of their own."""
        ...

    def read_into(self, target: np.ndarray, start: int) -> None:
        """Fills the flat target with the bytes from `start` on."""
        ...


Raw = np.ndarray | Unread  # stored rows, uint8 [rows, bytes of a row]


def as_array(raw: Raw) -> np.ndarray:
    return raw if isinstance(raw, np.ndarray) else raw.read()


@dataclass(frozen=True, slots=True)
class FilePart:
    """Bytes of a file, to be copied like those of a tensor."""

    raw: Unread
    start: int
    nbytes: int

    @property
    def shape(self) -> tuple[int]:
        return (self.nbytes,)

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    def split(self, size: int) -> list[FilePart]:
        starts = range(0, self.nbytes, size)
        return [FilePart(self.raw, self.start + at, min(size, self.nbytes - at)) for at in starts]


Source = Tensor | FilePart


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

    def through(self, tensors: Iterable[Source]) -> Generator[list[Tensor]]:
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

    def _fill(self, group: list[Source]) -> _Filling:
        buffer = self._next_buffer()
        if size_of(group) > buffer.nbytes:  # one tensor, larger than a buffer: the driver copies it before it returns
            (tensor,) = group
            assert isinstance(tensor, Tensor), "bytes of a file come in parts that fit"
            return _Filling(buffer, [tensor], [])
        try:
            places = cut(buffer, group)
            return _Filling(buffer, places, self._threads.fill(places, group))
        except BaseException:
            self._idle.append((buffer, self._passed()))
            raise

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


def size_of(tensors: Iterable[Source]) -> int:
    """Bytes that `cut` needs."""
    return sum(-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in tensors)


def cut(buffer: Tensor, tensors: Sequence[Source]) -> list[Tensor]:
    """Places for contiguous copies of the tensors, each aligned."""
    views, start = list[Tensor](), 0
    for tensor in tensors:
        place = buffer[start : start + tensor.nbytes].view(tensor.dtype)
        views.append(place.view(tensor.shape))
        start += size_of([tensor])
    return views


def in_groups(tensors: Iterable[Source], most: int) -> Iterator[list[Source]]:
    """In order, as many at a time as `most` bytes hold; a larger tensor is a group of its own."""
    group, size = list[Source](), 0
    for tensor in tensors:
        if group and size + size_of([tensor]) > most:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += size_of([tensor])
    if group:
        yield group


class CopyThreads:
    """Threads that copy host memory, and read files. Not torch's own, which a copy by torch would start."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._threads = ThreadPoolExecutor(count, "rekindle-upload")

    def fill(self, places: Sequence[Tensor], tensors: Sequence[Source]) -> list[Future[None]]:
        """Copies the tensors to their contiguous places: in pieces, dealt out to the threads."""
        pieces = [piece for pair in zip(places, tensors, strict=True) for piece in _pieces(*pair)]
        return [self._threads.submit(_copy, pieces[i :: self._count]) for i in range(min(self._count, len(pieces)))]

    def stop(self) -> None:
        self._threads.shutdown()


def _pieces(place: Tensor, source: Source) -> Iterable[tuple[Tensor, Source]]:
    if isinstance(source, FilePart):
        return zip(place.split(PIECE), source.split(PIECE), strict=True)
    if source.nbytes <= PIECE or not source.is_contiguous():
        return [(place, source)]
    return zip(_bytes_of(place).split(PIECE), _bytes_of(source).split(PIECE), strict=True)


def _copy(pieces: Sequence[tuple[Tensor, Source]]) -> None:
    for place, source in pieces:
        if isinstance(source, FilePart):
            source.raw.read_into(place.numpy(), source.start)
        else:
            np.copyto(_bytes_of(place).numpy(), _bytes_of(source).numpy())


def _bytes_of(tensor: Tensor) -> Tensor:
    """Flat uint8; a view of a contiguous tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


# Weights


def upload(raw: Raw, device: torch.device) -> Tensor:
    """The same on the device. All of it has been read when this returns; the device may have to copy it yet."""
    if isinstance(raw, np.ndarray) and not any(raw.strides):
        # One byte repeated, as in weights that are made up: nothing is read.
        return torch.full(raw.shape, int(raw.flat[0]), dtype=torch.uint8, device=device)
    if device.type != "cuda":
        # A copy of what was read already: the caller may keep its bytes.
        return torch.from_numpy(np.array(raw) if isinstance(raw, np.ndarray) else raw.read()).to(device)
    out = torch.empty(raw.shape, dtype=torch.uint8, device=device)
    with _loading:
        copy_through(_load_uploads(device), raw, out.view(-1))
    return out


def copy_through(uploads: Uploads, raw: Raw, out: Tensor) -> None:
    """Into flat bytes of the device, a buffer at a time."""
    if isinstance(raw, np.ndarray):
        source: Source = torch.from_numpy(np.ascontiguousarray(raw).reshape(-1))
    else:
        source = FilePart(raw, 0, out.nbytes)
    targets = iter(out.split(LOAD_BUFFER))
    with closing(uploads.through(source.split(LOAD_BUFFER))) as groups:  # at once where a copy fails: buffers come back
        for (part,) in groups:
            next(targets).copy_(part, non_blocking=True)


def upload_values(values: np.ndarray, device: torch.device) -> Tensor:
    """A vector or another small tensor. Does not wait for what the device still packs, as a copy of memory that is not
    pinned would; torch keeps the pinned copy until the device has read it."""
    tensor = torch.from_numpy(np.array(values))  # the caller may keep its own
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


@cache
def _load_uploads(device: torch.device) -> Uploads:
    """Made once: fresh pinned memory is slow, and the device may still read the last tensor's."""
    return Uploads(
        lambda: torch.empty(LOAD_BUFFER, dtype=torch.uint8, device="cpu", pin_memory=True),
        lambda: Passed(torch.cuda.current_stream(device)),
        LOAD_BUFFER,
        LOAD_BUFFERS,
        CopyThreads(min(LOAD_THREADS, len(os.sched_getaffinity(0)))),
    )

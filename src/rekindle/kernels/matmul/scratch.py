"""Where quantised weights lie as values for the moment of a product.

A stage has one such buffer for all its products: they follow one another, those that are recorded on a stream of their
own too (a recorder waits for the stream that it stands beside, which then waits for it).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Scratch:
    """A buffer for one thread at a time, on one device. Made when it is first asked for."""

    def __init__(self, values: int = 0) -> None:
        """values: the most that will be asked for; it grows where that is not known."""
        self.values = values
        self._buffers: list[Tensor] = []  # the last one is in use; recorded steps may go on writing to the others

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers)

    def take(self, like: Tensor, rows: int, columns: int) -> Tensor:
        """[rows, columns] of like.dtype, which the next call overwrites."""
        size = rows * columns * like.itemsize
        if not self._buffers or self._buffers[-1].nbytes < size:
            least = self.values * like.itemsize
            self._buffers.append(torch.empty(max(size, least), dtype=torch.uint8, device=like.device))
        return self._buffers[-1][:size].view(like.dtype).view(rows, columns)


class _Current(threading.local):
    def __init__(self) -> None:
        self.given: Scratch | None = None
        self.own: dict[torch.device, Scratch] = {}  # of a thread to which none was given


_current = _Current()


@contextmanager
def expanding_into(scratch: Scratch) -> Iterator[None]:
    """Products of this thread use it, inside the block."""
    before, _current.given = _current.given, scratch
    try:
        yield
    finally:
        _current.given = before


def scratch(like: Tensor, rows: int, columns: int) -> Tensor:
    """A buffer [rows, columns] that the next call of this thread overwrites."""
    mine = _current.given or _current.own.setdefault(like.device, Scratch())
    return mine.take(like, rows, columns)

"""Host memory that the device reads by itself."""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from rekindle.errors import DoesNotFit


class HostMemory:
    """Pages of their own, which the device may read by itself: pinned as long as this object lives."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        # Private: shared memory gets no large pages. No child gets it, so that a fork makes none of its pages a copy.
        pages = mmap.mmap(-1, max(mmap.PAGESIZE, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a system without large pages is slower, not wrong
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(pages, dtype=torch.uint8)
        self._taken = 0
        if device.type == "cuda":
            _pin(self._bytes)
            weakref.finalize(self, _unpin, self._bytes.data_ptr()).atexit = False

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next piece, not yet filled."""
        nbytes = math.prod(shape) * dtype.itemsize
        start, self._taken = self._taken, self._taken + whole_lines(nbytes)
        assert self._taken <= len(self._bytes), (
            f"{self._taken} bytes of host memory taken, {len(self._bytes)} are there"
        )
        return self._bytes[start : start + nbytes].view(dtype).view(*shape)


def _pin(memory: Tensor) -> None:
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0))
    if code:
        raise DoesNotFit(
            f"{memory.nbytes} bytes of host memory for cold experts cannot be pinned (CUDA error {code}); "
            "the limit on locked memory may be too low"
        )


def _unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def whole_lines(nbytes: int) -> int:
    """Planes begin at whole 256 bytes."""
    return -(-nbytes // 256) * 256

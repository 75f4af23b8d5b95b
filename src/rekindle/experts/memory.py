"""Host memory that the device reads and writes itself: cold experts, and the mailbox of the CPU threads."""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from rekindle.errors import DoesNotFit
from rekindle.kernels.pinning import pin


class HostMemory:
    """Memory of its own, pinned as long as this object lives."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        # Private: shared memory gets no large pages. DONTFORK: a fork would make its pages copy-on-write.
        pages = mmap.mmap(-1, max(mmap.PAGESIZE, nbytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_DONTFORK)
        with contextlib.suppress(OSError):  # a system without large pages is slower, not wrong
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = torch.frombuffer(pages, dtype=torch.uint8)
        self._taken = 0
        if device.type == "cuda":
            self._pin(device)

    def _pin(self, device: torch.device) -> None:
        unpin = pin(device, self._bytes.data_ptr(), self._bytes.nbytes)
        if unpin is None:
            raise DoesNotFit(
                f"{self._bytes.nbytes} bytes of host memory for cold experts cannot be pinned; "
                "the limit on locked memory may be too low"
            )
        weakref.finalize(self, unpin).atexit = False

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The next tensor, not yet filled."""
        nbytes = math.prod(shape) * dtype.itemsize
        start, self._taken = self._taken, self._taken + whole_lines(nbytes)
        assert self._taken <= len(self._bytes), (
            f"{self._taken} bytes of host memory taken, {len(self._bytes)} are there"
        )
        return self._bytes[start : start + nbytes].view(dtype).view(*shape)


def whole_lines(nbytes: int) -> int:
    """Rounded up to 256 bytes, at which every tensor begins."""
    return -(-nbytes // 256) * 256

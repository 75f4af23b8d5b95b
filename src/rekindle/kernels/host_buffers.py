"""Host memory that a recorded step's inputs are laid out in, and copied from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

BUFFERS = 3  # in turn: a copy may still be under way while the next step is laid out


class HostBuffers:
    """Pinned beside a GPU; none is given again before its copy is done."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int32) -> None:
        gpu = device.type == "cuda"
        self._buffers = [torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=gpu) for _ in range(BUFFERS)]
        self._copied = [torch.cuda.Event() for _ in range(BUFFERS)] if gpu else []
        self._turn = 0

    @contextmanager
    def next(self) -> Iterator[torch.Tensor]:
        """A buffer to fill and to copy from, inside the block."""
        self._turn = (self._turn + 1) % BUFFERS
        if self._copied:
            self._copied[self._turn].synchronize()
        yield self._buffers[self._turn]
        if self._copied:
            self._copied[self._turn].record()

"""Semaphores by which the programs that share an output tile find out which of them is the last (split-K)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rekindle.kernels.device import stream_of


@triton.jit
def is_last_program(semaphore, expected):
    """True for the last of `expected` programs, which then sees what all of them stored; leaves the semaphore at 0."""
    tl.debug_barrier()  # every thread of this program has stored its share
    before = tl.atomic_add(semaphore, 1, sem="acq_rel", scope="gpu")
    last = before == expected - 1
    if last:
        tl.atomic_xchg(semaphore, 0)
    return last


_semaphores: dict[tuple[torch.device, int], Tensor] = {}


def semaphores(device: torch.device) -> Tensor:
    """Zeros that kernels count in and leave at zero. Concurrent launches must not share them, so every stream has its
    own: one stream may record a step while another runs one."""
    key = (device, stream_of(device))
    if key not in _semaphores:
        _semaphores[key] = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    return _semaphores[key]

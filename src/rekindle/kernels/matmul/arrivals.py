"""How the programs of a launch find out which of them is the last."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def all_arrived(counter, expected):
    """Count this program in; true for the last, which then sees what all of them stored. Leaves the counter at zero."""
    tl.debug_barrier()  # every thread of this program has stored its share
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    last = before == expected - 1
    if last:
        tl.atomic_xchg(counter, 0)
    return last


_counters: dict[torch.device, Tensor] = {}


def counters(device: torch.device) -> Tensor:
    """Zeros that kernels count in and leave at zero. Launches that use them follow one another on one stream."""
    if device not in _counters:
        _counters[device] = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    return _counters[device]

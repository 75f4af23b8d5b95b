"""How the programs of a launch find out which of them is the last."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rekindle.kernels.device import stream_of


@triton.jit
def all_arrived(counter, expected):
    """Count this program in; true for the last, which then sees what all of them stored. Leaves the counter at zero."""
    tl.debug_barrier()  # every thread of this program has stored its share
    before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
    last = before == expected - 1
    if last:
        tl.atomic_xchg(counter, 0)
    return last


_counters: dict[tuple[torch.device, int], Tensor] = {}


def counters(device: torch.device) -> Tensor:
    """Zeros that kernels count in and leave at zero. Launches that use the same ones must follow one another, so every
    stream has its own: a step may be recorded on one while another is at work."""
    key = (device, stream_of(device))
    if key not in _counters:
        _counters[key] = torch.zeros(1 << 16, dtype=torch.int32, device=device)
    return _counters[key]

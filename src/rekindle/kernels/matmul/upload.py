"""Bytes from a mapped file to a device, at the speed of the bus: two pinned buffers take turns."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

STAGING = 64 << 20  # bytes of one pinned buffer


def upload(raw: np.ndarray, device: torch.device) -> Tensor:
    """raw uint8 [rows, bytes of a row] -> the same on the device."""
    if device.type != "cuda":
        return torch.from_numpy(np.array(raw)).to(device)  # a copy: a mapped file is read-only, a tensor is not
    out = torch.empty(raw.shape, dtype=torch.uint8, device=device)
    _copy_through_pinned(np.ascontiguousarray(raw).reshape(-1), out.view(-1))
    return out


def _copy_through_pinned(raw: np.ndarray, out: Tensor) -> None:
    stream = torch.cuda.current_stream(out.device)
    buffers = [torch.empty(min(STAGING, raw.size), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    sent = [torch.cuda.Event() for _ in range(2)]
    for turn, at in enumerate(range(0, raw.size, STAGING)):
        part = raw[at : at + STAGING]
        buffer, event = buffers[turn % 2][: part.size], sent[turn % 2]
        event.synchronize()  # the copy that last used this buffer has left it
        buffer.numpy()[:] = part
        out[at : at + STAGING].copy_(buffer, non_blocking=True)
        event.record(stream)
    stream.synchronize()

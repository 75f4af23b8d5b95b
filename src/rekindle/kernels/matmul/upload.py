"""Bytes from a mapped file to a device, at the speed of the bus.

Reading mapped pages is the slow part, so several threads fill a pinned buffer together, while the one filled before it
is on its way to the device.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

STAGING = 64 << 20  # bytes of one pinned buffer
PIECE = 4 << 20  # bytes that one thread copies at a time
THREADS = 8  # more of them wait for the memory


def upload(raw: np.ndarray, device: torch.device) -> Tensor:
    """raw uint8 [rows, bytes of a row] -> the same on the device."""
    if not any(raw.strides):  # the same byte everywhere: nothing is read
        return torch.full(raw.shape, int(raw.flat[0]), dtype=torch.uint8, device=device)
    if device.type != "cuda":
        return torch.from_numpy(np.array(raw)).to(device)  # a copy: a mapped file is read-only, a tensor is not
    out = torch.empty(raw.shape, dtype=torch.uint8, device=device)
    _copy_through_pinned(np.ascontiguousarray(raw).reshape(-1), out.view(-1))
    return out


def _copy_through_pinned(raw: np.ndarray, out: Tensor) -> None:
    """Returns when all has been read; torch keeps the buffers until the device has them."""
    stream = torch.cuda.current_stream(out.device)
    buffers = [torch.empty(min(STAGING, raw.size), dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    sent = [torch.cuda.Event() for _ in range(2)]
    for turn, at in enumerate(range(0, raw.size, STAGING)):
        part = raw[at : at + STAGING]
        buffer, event = buffers[turn % 2][: part.size], sent[turn % 2]
        event.synchronize()  # the copy that last used this buffer has left it
        fill(buffer.numpy(), part)
        out[at : at + STAGING].copy_(buffer, non_blocking=True)
        event.record(stream)


def fill(target: np.ndarray, source: np.ndarray) -> None:
    """target[:] = source, both flat uint8 of one size."""
    pieces = [slice(at, at + PIECE) for at in range(0, source.size, PIECE)]
    list(_threads().map(lambda piece: np.copyto(target[piece], source[piece]), pieces))


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="upload")

"""The short convolution on a GPU.

A program takes a run of rows of one segment and a run of channels. Only the program with a segment's first rows reads
the window, and it alone writes the next one, so reading and writing never race between programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rekindle.kernels.ragged import Ragged

PREFILL = (32, 128, 4)  # rows, channels and warps of one program over longer segments
DECODE = (256, 2)  # channels and warps of one program over single rows


def conv_silu(u: Tensor, weight: Tensor, windows: Tensor, ragged: Ragged) -> Tensor:
    rows, channels = u.shape
    width = weight.shape[1]
    assert all((u.stride(1) == 1, weight.is_contiguous(), windows.is_contiguous())), "channels lie side by side"
    out = torch.empty((rows, channels), dtype=u.dtype, device=u.device)
    longest = max(ragged.lengths)
    if ragged.decodes:
        block_rows, (block, warps) = 1, DECODE
    else:
        most, block, warps = PREFILL
        block_rows = min(most, triton.next_power_of_2(max(longest, width - 1)))
    _conv_kernel[(triton.cdiv(channels, block), triton.cdiv(longest, block_rows), ragged.segments)](
        u, weight, windows, out, ragged.starts, ragged.slots, u.stride(0), channels,
        WIDTH=width, ROWS=block_rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out


@triton.jit
def _conv_kernel(
    u, weight, windows, out, starts, slots, u_row, channels,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    segment = tl.program_id(2)
    start = tl.load(starts + segment).to(tl.int64)
    length = tl.load(starts + segment + 1) - start
    first = tl.program_id(1) * ROWS
    if first >= length:
        return
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (channel < channels)[None, :]
    row = first + tl.arange(0, ROWS)  # inside the segment
    window = windows + tl.load(slots + segment).to(tl.int64) * (WIDTH - 1) * channels
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for i in tl.static_range(WIDTH):
        tap = row - (WIDTH - 1) + i  # negative: before the segment, in the window
        value = tl.load(
            u + (start + tap)[:, None] * u_row + channel[None, :],
            mask=((tap >= 0) & (row < length))[:, None] & inside, other=0.0,
        ).to(tl.float32)  # fmt: skip
        if first == 0:
            value += tl.load(
                window + (row + i)[:, None] * channels + channel[None, :], mask=(tap < 0)[:, None] & inside, other=0.0
            )
        factor = tl.load(weight + channel * WIDTH + i, mask=channel < channels, other=0.0).to(tl.float32)
        total += value * factor[None, :]
    at = out + (start + row)[:, None] * channels + channel[None, :]
    tl.store(at, (total * tl.sigmoid(total)).to(out.dtype.element_ty), mask=(row < length)[:, None] & inside)
    if first == 0:
        _move_window(u, window, start, length, u_row, channel, channels, WIDTH)


@triton.jit
def _move_window(u, window, start, length, u_row, channel, channels, WIDTH: tl.constexpr):
    """Row i of the next window is row length + i of [window ‖ rows]; ascending i reads ahead of what it wrote."""
    inside = channel < channels
    for i in tl.static_range(WIDTH - 1):
        tap = length - (WIDTH - 1) + i
        new = tl.load(u + (start + tap) * u_row + channel, mask=inside & (tap >= 0), other=0.0).to(tl.float32)
        old = tl.load(window + (length + i) * channels + channel, mask=inside & (tap < 0), other=0.0)
        tl.debug_barrier()  # every thread has read before any thread writes
        tl.store(window + i * channels + channel, new + old, mask=inside)

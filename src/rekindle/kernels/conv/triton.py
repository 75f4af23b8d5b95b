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
from rekindle.kernels.rewind_log import RewindLog

PREFILL = (32, 128, 4)  # rows, channels and warps of one program over longer segments
DECODE = (256, 2)  # channels and warps of one program over single rows


def conv_silu(u: Tensor, weight: Tensor, windows: Tensor, ragged: Ragged, log: RewindLog | None = None) -> Tensor:
    rows, channels = u.shape
    width = weight.shape[1]
    assert all((u.stride(1) == 1, weight.is_contiguous(), windows[0].is_contiguous())), "channels lie side by side"
    out = torch.empty((rows, channels), dtype=u.dtype, device=u.device)
    longest = max(ragged.lengths)
    if ragged.decodes:
        block_rows, (block, warps) = 1, DECODE
    else:
        most, block, warps = PREFILL
        block_rows = 16 if longest <= 16 else most  # two kernels for all lengths
    _conv_kernel[(triton.cdiv(channels, block), triton.cdiv(longest, block_rows), ragged.segments)](
        u, weight, windows, out, ragged.starts, ragged.slots,
        None if log is None else log.windows, None if log is None else log.inputs,
        u.stride(0), windows.stride(0), channels, 0 if log is None else log.rows,
        WIDTH=width, ROWS=block_rows, BLOCK=block, num_warps=warps,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["log_rows"])
def _conv_kernel(
    u, weight, windows, out, starts, slots, log_windows, log_inputs, u_row, window_slot, channels, log_rows,
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
    slot = tl.load(slots + segment).to(tl.int64)
    window = windows + slot * window_slot
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
    if log_inputs is not None:
        raw = tl.load(u + (start + row)[:, None] * u_row + channel[None, :], mask=(row < length)[:, None] & inside)
        to = log_inputs + (slot * log_rows + row)[:, None] * channels + channel[None, :]
        tl.store(to, raw.to(log_inputs.dtype.element_ty), mask=(row < length)[:, None] & inside)
    if first == 0:
        if log_windows is not None:
            _keep_window(window, log_windows + slot * (WIDTH - 1) * channels, channel, channels, WIDTH)
        _move_window(u, window, start, length, u_row, channel, channels, WIDTH)


@triton.jit
def _keep_window(window, to, channel, channels, WIDTH: tl.constexpr):
    for i in tl.static_range(WIDTH - 1):
        at = i * channels + channel
        tl.store(to + at, tl.load(window + at, mask=channel < channels), mask=channel < channels)


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

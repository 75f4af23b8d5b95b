"""A few rows through planes of any type, on any GPU: tiles are expanded in registers and multiplied by `tl.dot`."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels.device import LEAST, ORDINARY, filling, fitting, pdl_arguments
from rekindle.kernels.matmul.tile_semaphores import is_last_program, semaphores
from rekindle.kernels.matmul.tiles import dot_pair, load_weights
from rekindle.kernels.matmul.types import Packed, planes_of

PROGRAMS_EACH = 4  # on a multiprocessor, of a sum that is cut into parts


class RowsConfig(NamedTuple):
    """A few rows: output rows and blocks of a tile, parts the sum is cut into (0: as many as fill the card)."""

    out: int
    blocks: int
    split: int
    warps: int
    stages: int


ROWS = {ORDINARY: RowsConfig(64, 4, 0, 4, 3), LEAST: RowsConfig(64, 4, 0, 8, 2)}


@triton.jit
def _rows_kernel(
    x, x_stride, rows, out, partials, semaphores, width, nought,
    codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales, up_super_scales,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, PAIRED: tl.constexpr, SPLIT: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """A tile [BM rows of x, BN outputs], or its share of the sum over columns."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pid_n, pid_m, pid_k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    DTYPE: tl.constexpr = x.dtype.element_ty
    blocks: tl.constexpr = COLUMNS // 32
    n = pid_n * BN + tl.arange(0, BN)
    m = pid_m * BM + tl.arange(0, BM)
    row = tl.minimum(n, width - 1)
    p_x = x + tl.minimum(m, rows - 1)[:, None].to(tl.int64) * x_stride + tl.arange(0, BB * 32)[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    acc_up = acc
    share = tl.cdiv(tl.cdiv(blocks, BB), SPLIT) * BB
    for start in range(pid_k * share, tl.minimum(blocks, (pid_k + 1) * share), BB):
        b = start + tl.arange(0, BB)
        blk = b[:, None] + row[None, :] * blocks
        mask = (b < blocks)[:, None] & (row >= 0)[None, :]
        if MASKED:
            b_x = tl.load(p_x + start * 32, (start * 32 + tl.arange(0, BB * 32) < COLUMNS)[None, :], other=0.0)
        else:
            b_x = tl.load(p_x + start * 32)
        b_w = load_weights(codes, high_bits, scales, super_scales, blk, mask, nought, TYPE, DTYPE, MASKED)
        acc = dot_pair(b_w, b_x, acc, EXACT)
        if PAIRED:
            b_up = load_weights(
                up_codes, up_high_bits, up_scales, up_super_scales, blk, mask, nought, TYPE, DTYPE, MASKED
            )
            acc_up = dot_pair(b_up, b_x, acc_up, EXACT)
    if PAIRED:
        acc = acc * tl.sigmoid(acc) * acc_up
    y = tl.trans(acc)  # [BM, BN]
    o_y = m[:, None].to(tl.int64) * width + n[None, :]
    mask_y = (m < rows)[:, None] & (n < width)[None, :]
    if SPLIT == 1:
        tl.store(out + o_y, y, mask_y)
    else:
        tl.store(partials + tl.cast(pid_k, tl.int64) * rows * width + o_y, y, mask_y)
        if is_last_program(semaphores + pid_m * tl.num_programs(0) + pid_n, SPLIT):
            y = tl.zeros([BM, BN], tl.float32)
            for part in tl.static_range(SPLIT):  # always in this order: the sum is the same on every run
                y += tl.load(partials + part * rows * width + o_y, mask_y, other=0.0, cache_modifier=".cg")
            tl.store(out + o_y, y, mask_y)


def few_rows(
    x: Tensor,
    weight: Packed,
    up: Packed | None = None,
    config: RowsConfig | None = None,
) -> Tensor:
    """x [rows, in] -> [rows, out]; with `up`, silu(weight x) · (up x)."""
    rows, columns = x.shape
    width = weight.rows
    config = config or fitting(x.device, ROWS)
    tile = min(64, max(16, triton.next_power_of_2(rows)))
    grid = (triton.cdiv(width, config.out), triton.cdiv(rows, tile))
    split = 1 if up is not None else config.split or _parts(grid[0] * grid[1], columns // 32 // config.blocks, x.device)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    partials = out if split == 1 else torch.empty(split, rows, width, dtype=torch.float32, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    _rows_kernel[(*grid, split)](
        x, x.stride(0), rows, out, partials, semaphores(x.device), width, 0,
        *planes_of(weight), *planes_of(weight if up is None else up),
        columns, weight.type, PAIRED=up is not None, SPLIT=split, BN=config.out, BM=tile,
        BB=config.blocks, MASKED=columns % (32 * config.blocks) != 0, EXACT=x.dtype == torch.float32,
        num_warps=config.warps, num_stages=config.stages, **pdl_arguments(x.device),
    )  # fmt: skip
    return out


def _parts(tiles: int, steps: int, device: torch.device) -> int:
    """Parts of the sum that fill the card with programs: a power of two, with two steps at least in each."""
    split, most = 1, filling(device, PROGRAMS_EACH)
    while tiles * split * 2 <= most and steps >= 4 * split and split < 16:
        split *= 2
    return split

"""Routed experts on any GPU with pairs grouped by expert: an expert's weights are read once per tile of its pairs.

For very many rows the experts are first expanded, as many at a time as fit the scratch buffer.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.buffers import SCRATCH
from rekindle.kernels.device import LEAST, ORDINARY, fitting, pdl_arguments
from rekindle.kernels.matmul.expand import expand
from rekindle.kernels.matmul.scratch import scratch
from rekindle.kernels.matmul.tiles import dot_pair, load_weights
from rekindle.kernels.matmul.types import Packed, planes_of, row_slab
from rekindle.kernels.moe.types import ExpertStack


class GroupConfig(NamedTuple):
    """Tile of the grouped kernels: outputs, pairs, blocks of columns; warps and stages."""

    out: int
    pairs: int
    blocks: int
    warps: int
    stages: int


EXPANDED = {ORDINARY: GroupConfig(128, 128, 2, 8, 3), LEAST: GroupConfig(64, 64, 2, 8, 2)}
PAIRS_TILES = 16, 32, 64  # of quantised experts
QUANTISED = {ORDINARY: GroupConfig(64, 64, 4, 4, 3), LEAST: GroupConfig(64, 64, 4, 8, 2)}  # of as many pairs at most


def group_config(device: torch.device, pairs_per_expert: int, expanded: bool) -> GroupConfig:
    if expanded:
        return fitting(device, EXPANDED)
    return fitting(device, QUANTISED)._replace(pairs=pairs_tile(pairs_per_expert))


def pairs_tile(pairs_per_expert: int) -> int:
    return next((tile for tile in PAIRS_TILES if tile >= pairs_per_expert), PAIRS_TILES[-1])


@triton.jit
def _tile_weights(
    codes, high_bits, scales, super_scales, row, start, nought,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, DTYPE: tl.constexpr, BB: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Weights [BN, 32 · BB] of the rows `row` (counted over all experts) from block `start` on."""
    if TYPE == "dense":
        k = start * 32 + tl.arange(0, BB * 32)
        p_w = codes + row[:, None] * COLUMNS + k[None, :]
        if MASKED:
            return tl.load(p_w, (k < COLUMNS)[None, :], other=0.0)
        else:
            return tl.load(p_w)
    else:
        blocks: tl.constexpr = COLUMNS // 32
        b = start + tl.arange(0, BB)
        blk = b[:, None] + row[None, :] * blocks
        mask = (b < blocks)[:, None] & (row >= 0)[None, :]
        return load_weights(codes, high_bits, scales, super_scales, blk, mask, nought, TYPE, DTYPE, MASKED)


@triton.jit(do_not_specialize=["first"])
def _grouped_kernel(
    x, order, starts, weights, out, first, width, nought,
    codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales, up_super_scales,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, UP_TYPE: tl.constexpr, PAIRED: tl.constexpr, USED: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """All pairs of one expert for BN outputs.

    PAIRED: x is by row, out [pairs, width] in the order of `order` gets silu(gate x) · (up x).
    Otherwise x is in the order of `order`, and out [pairs, width] by pair gets weight · (down x).
    """
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    DTYPE: tl.constexpr = x.dtype.element_ty
    expert = tl.program_id(1)
    begin = tl.load(starts + first + expert)
    end = tl.load(starts + first + expert + 1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = expert.to(tl.int64) * width + tl.minimum(n, width - 1)
    for at in range(begin, end, BM):
        m = at + tl.arange(0, BM)
        pair = tl.load(order + m, m < end, other=0)
        source = pair // USED if PAIRED else tl.minimum(m, end - 1)
        p_x = x + source[:, None].to(tl.int64) * COLUMNS + tl.arange(0, BB * 32)[None, :]
        acc = tl.zeros([BN, BM], tl.float32)
        acc_up = acc
        for start in range(0, COLUMNS // 32, BB):
            if MASKED:
                b_x = tl.load(p_x + start * 32, (start * 32 + tl.arange(0, BB * 32) < COLUMNS)[None, :], other=0.0)
            else:
                b_x = tl.load(p_x + start * 32)
            b_w = _tile_weights(
                codes, high_bits, scales, super_scales, row, start, nought, COLUMNS, TYPE, DTYPE, BB, MASKED
            )
            acc = dot_pair(b_w, b_x, acc, EXACT)
            if PAIRED:
                b_up = _tile_weights(
                    up_codes,
                    up_high_bits,
                    up_scales,
                    up_super_scales,
                    row,
                    start,
                    nought,
                    COLUMNS,
                    UP_TYPE,
                    DTYPE,
                    BB,
                    MASKED,
                )
                acc_up = dot_pair(b_up, b_x, acc_up, EXACT)
        mask = (m < end)[:, None] & (n < width)[None, :]
        if PAIRED:
            acc = acc * tl.sigmoid(acc) * acc_up
            tl.store(out + m[:, None].to(tl.int64) * width + n[None, :], tl.trans(acc), mask)
        else:
            y = tl.trans(acc) * tl.load(weights + pair, m < end, other=0.0)[:, None]
            tl.store(out + pair[:, None].to(tl.int64) * width + n[None, :], y, mask)


def run_grouped(
    x: Tensor, order: Tensor, starts: Tensor, weights: Tensor, out: Tensor, stacks: list[ExpertStack],
    used: int, tile: GroupConfig, expanding: bool, start: int = 0,
) -> None:  # fmt: skip
    """One launch over all experts, or one per handful of experts that fits the scratch once expanded. The pairs of the
    stacks' first expert begin at starts[start]."""
    stack = stacks[0]
    size = stack.rows * stack.columns
    step = max(1, SCRATCH // (len(stacks) * size)) if expanding else stack.experts
    for first in range(0, stack.experts, step):
        count = min(step, stack.experts - first)
        parts: list[Packed | Tensor] = [s.planes for s in stacks]
        if expanding:
            values = scratch(x, len(stacks) * count * stack.rows, stack.columns).chunk(len(stacks))
            slabs = [row_slab(s.planes, first * s.rows, (first + count) * s.rows) for s in stacks]
            parts = [expand(slab, out=view) for slab, view in zip(slabs, values, strict=True)]
        types = ["dense" if isinstance(part, Tensor) else part.type for part in parts]
        _grouped_kernel[(triton.cdiv(stack.rows, tile.out), count)](
            x, order, starts, weights, out, start + first, stack.rows, 0, *planes_of(parts[0]), *planes_of(parts[-1]),
            COLUMNS=stack.columns, TYPE=types[0], UP_TYPE=types[-1], PAIRED=len(stacks) == 2, USED=used,
            BN=tile.out, BM=tile.pairs, BB=tile.blocks, MASKED=stack.columns % (32 * tile.blocks) != 0,
            EXACT=x.dtype == torch.float32, num_warps=tile.warps, num_stages=tile.stages, **pdl_arguments(x.device),
        )  # fmt: skip

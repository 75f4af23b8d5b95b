"""Routed experts on any GPU where every pair, a row and one of its experts, reads its own weights: for few rows.

One launch for gate and up, one for down and the weighted sum.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels.device import pdl_arguments
from rekindle.kernels.matmul.tiles import block_numbers, dot_blocks, either
from rekindle.kernels.matmul.types import Packed, planes_of


class PairConfig(NamedTuple):
    """Tile of the pair kernels: rows of a matrix, warps (32 blocks of a row each)."""

    rows: int
    warps: int


UP_PAIRS = PairConfig(8, 2)
DOWN_PAIRS = PairConfig(4, 4)


@triton.jit
def _up_tile(
    x, codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales, up_super_scales, base, at, rows,
    nought,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr,
    BN: tl.constexpr, BB: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """silu(gate x) · (up x) for BN outputs [at, at + BN) of the expert whose rows begin at `base`."""
    blocks: tl.constexpr = COLUMNS // 32
    t = tl.arange(0, 2 * BN)
    row = base + tl.minimum(at + t // 2, rows - 1)
    is_up = (t % 2 == 1)[None, :]
    p_codes = either(is_up, up_codes, codes)
    p_high_bits = either(is_up, up_high_bits, high_bits)
    p_scales = either(is_up, up_scales, scales)
    p_super_scales = either(is_up, up_super_scales, super_scales)
    acc = tl.zeros([BB, 2 * BN], tl.float32)
    for start in range(0, blocks, BB):
        b = start + tl.arange(0, BB)
        b_mask = b < blocks
        blk = block_numbers(b, row, blocks)
        mask = b_mask[:, None] & (row >= 0)[None, :]
        acc += dot_blocks(x, p_codes, p_high_bits, p_scales, p_super_scales, b, b_mask, blk, mask, nought, TYPE, MASKED)
    gate, up = tl.split(tl.sum(acc, 0).reshape(BN, 2))
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _up_rows_kernel(
    h, ids, inner, share, scale, rows, nought,
    codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales, up_super_scales,
    s_codes, s_high_bits, s_scales, s_super_scales, s_up_codes, s_up_high_bits, s_up_scales, s_up_super_scales,
    USED: tl.constexpr, SHARED: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, S_TYPE: tl.constexpr,
    BN: tl.constexpr, BB: tl.constexpr, MASKED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """inner[row, place, :] for a chosen expert; place USED is the shared expert, which also leaves its share."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(2)
    place = tl.program_id(1)
    at = tl.program_id(0) * BN
    x = h + row * COLUMNS
    n = at + tl.arange(0, BN)
    p_out = inner + (row * (USED + SHARED) + place) * rows + n
    if place < USED:
        base = tl.load(ids + row * USED + place).to(tl.int64) * rows
        y = _up_tile(
            x, codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales, up_super_scales, base, at,
            rows, nought,
            COLUMNS, TYPE, BN, BB, MASKED,
        )  # fmt: skip
        tl.store(p_out, y, n < rows)
    elif SHARED:
        y = _up_tile(
            x, s_codes, s_high_bits, s_scales, s_super_scales, s_up_codes, s_up_high_bits, s_up_scales,
            s_up_super_scales,
            tl.zeros([], tl.int64), at, rows, nought, COLUMNS, S_TYPE, BN, BB, MASKED,
        )  # fmt: skip
        tl.store(p_out, y, n < rows)
        if at == 0:
            acc = tl.zeros([BB * 32], tl.float32)
            for start in range(0, COLUMNS, BB * 32):
                k = start + tl.arange(0, BB * 32)
                acc += (
                    tl.load(x + k, k < COLUMNS, other=0.0).to(tl.float32)
                    * tl.load(scale + k, k < COLUMNS, other=0.0).to(tl.float32)
                )  # fmt: skip
            tl.store(share + row, tl.sigmoid(tl.sum(acc, 0)))


@triton.jit
def _down_rows_kernel(
    inner, ids, weights, share, out, rows, nought,
    codes, high_bits, scales, super_scales, s_codes, s_high_bits, s_scales, s_super_scales,
    USED: tl.constexpr, SHARED: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, S_TYPE: tl.constexpr,
    BN: tl.constexpr, BB: tl.constexpr, SB: tl.constexpr, MASKED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BN outputs of one row: the chosen experts' blocks behind one another are one long sum, then the shared one's."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    o_n = tl.minimum(n, rows - 1)
    blocks: tl.constexpr = COLUMNS // 32
    x = inner + row * (USED + SHARED) * COLUMNS
    acc = tl.zeros([BB, BN], tl.float32)
    for start in range(0, USED * blocks, BB):
        b = start + tl.arange(0, BB)
        b_mask = b < USED * blocks
        place = b // blocks
        expert = tl.load(ids + row * USED + place, b_mask, other=0).to(tl.int64)
        weight = tl.load(weights + row * USED + place, b_mask, other=0.0)
        blk = tl.max_contiguous((expert * rows * blocks + b % blocks)[:, None] + (o_n * blocks)[None, :], (1, 1))
        mask = b_mask[:, None] & (o_n >= 0)[None, :]
        part = dot_blocks(x, codes, high_bits, scales, super_scales, b, b_mask, blk, mask, nought, TYPE, MASKED)
        acc += weight[:, None] * part
    y = tl.sum(acc, 0)
    if SHARED:
        x += USED * COLUMNS
        s_acc = tl.zeros([SB, BN], tl.float32)
        for start in range(0, blocks, SB):
            b = start + tl.arange(0, SB)
            b_mask = b < blocks
            blk = block_numbers(b, o_n, blocks)
            mask = b_mask[:, None] & (o_n >= 0)[None, :]
            s_acc += dot_blocks(
                x, s_codes, s_high_bits, s_scales, s_super_scales, b, b_mask, blk, mask, nought, S_TYPE, True
            )
        y += tl.load(share + row) * tl.sum(s_acc, 0)
    tl.store(out + row * rows + n, y, n < rows)


def by_pair(
    h: Tensor, ids: Tensor, weights: Tensor, gate: Packed, up: Packed, down: Packed, width: int,
    shared: tuple[Packed, Packed, Packed, Tensor] | None,
    up_tile: PairConfig | None = None, down_tile: PairConfig | None = None,
) -> Tensor:  # fmt: skip
    """Two launches for everything; gate and up are of one type, and so are the shared expert's."""
    rows, hidden = h.shape
    used = ids.shape[1]
    up_tile, down_tile = up_tile or UP_PAIRS, down_tile or DOWN_PAIRS
    s_gate, s_up, s_down, scale = shared or (gate, up, down, h)
    places = used + (shared is not None)
    inner = torch.empty(rows, places, width, dtype=torch.float32, device=h.device)
    share = torch.empty(rows, dtype=torch.float32, device=h.device)
    up_warps, down_warps = _warps(up_tile, hidden), _warps(down_tile, used * width)
    half, blocks = up_tile.rows // 2, 32 * up_warps
    _up_rows_kernel[(triton.cdiv(width, half), places, rows)](
        h.contiguous(), ids, inner, share, scale, width, 0, *planes_of(gate), *planes_of(up), *planes_of(s_gate),
        *planes_of(s_up), USED=used, SHARED=shared is not None, COLUMNS=hidden, TYPE=gate.type, S_TYPE=s_gate.type,
        BN=half, BB=blocks, MASKED=hidden % (32 * blocks) != 0, num_warps=up_warps, **pdl_arguments(h.device),
    )  # fmt: skip
    out = torch.empty(rows, hidden, dtype=h.dtype, device=h.device)
    blocks = 32 * down_warps
    _down_rows_kernel[(triton.cdiv(hidden, down_tile.rows), rows)](
        inner, ids, weights, share, out, hidden, 0,
        *planes_of(down), *planes_of(s_down),
        USED=used, SHARED=shared is not None, COLUMNS=width, TYPE=down.type, S_TYPE=s_down.type, BN=down_tile.rows,
        BB=blocks, SB=min(blocks, triton.next_power_of_2(width // 32)), MASKED=used * width % (32 * blocks) != 0,
        num_warps=down_warps, **pdl_arguments(h.device),
    )  # fmt: skip
    return out


def _warps(tile: PairConfig, columns: int) -> int:
    """No more warps than cover the columns."""
    return min(tile.warps, triton.next_power_of_2(triton.cdiv(columns, 1024)))

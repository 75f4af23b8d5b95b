"""Routed experts in NVIDIA's matrix units, for few rows: `matmul.mma` holds the pieces.

By pair, every chosen expert of every row reads its own weights. By group, an expert's weights are read once for up to
8 · NT of its pairs. In both, a program gives 16 outputs, and its warps lie side by side along the columns.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rekindle.kernels.matmul.mma import (
    gated_over_warps,
    load_one,
    load_step_single,
    over_warps,
    single_address,
    single_gated_over_warps,
    single_over_warps,
    step_products_single,
    store_single,
    store_tile,
    threads,
    tile_products,
    tile_products_single,
)
from rekindle.kernels.matmul.types import Packed

Planes = tuple[Tensor, Tensor, Tensor, Tensor]


class UnitsConfig(NamedTuple):
    """Warps of a program for gate and up (half for each) and for down; whether up asks for its next step ahead."""

    up_warps: int
    down_warps: int
    ahead: bool


PAIRS = UnitsConfig(8, 8, False)
GROUPS = UnitsConfig(4, 1, True)


# ---- every pair for itself ---------------------------------------------------------------------------------------


@triton.jit
def _gated_row(
    x, out, base, at, width, codes, high, scales, supers, up_codes, up_high, up_scales, up_supers,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """silu(gate x) · (up x) for 16 outputs from `at` on, of the expert whose rows begin at `base`."""
    g, _, warp = threads(WARPS)
    row = base + tl.minimum(at + g, width - 1).to(tl.int64)
    row2 = base + tl.minimum(at + g + 8, width - 1).to(tl.int64)
    is_up = warp % 2 == 1
    acc = tile_products_single(
        single_address(x, WARPS), tl.where(is_up, up_codes, codes), tl.where(is_up, up_high, high),
        tl.where(is_up, up_scales, scales), tl.where(is_up, up_supers, supers), row, row2, warp // 2,
        COLUMNS, TYPE, WARPS // 2, AHEAD, False,
    )  # fmt: skip
    store_single(out, out, single_gated_over_warps(acc, WARPS), at, width, False)


@triton.jit
def _up_pairs_kernel(
    h, ids, inner, share, scale, width,
    codes, high, scales, supers, up_codes, up_high, up_scales, up_supers,
    s_codes, s_high, s_scales, s_supers, s_up_codes, s_up_high, s_up_scales, s_up_supers,
    USED: tl.constexpr, SHARED: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, S_TYPE: tl.constexpr,
    WARPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """inner[row, place, :] for a chosen expert; place USED is the shared expert, which also leaves its share."""
    row = tl.program_id(2)
    place = tl.program_id(1)
    at = tl.program_id(0) * 16
    x = h + row.to(tl.int64) * COLUMNS
    out = inner + (row * (USED + SHARED) + place).to(tl.int64) * width
    if place < USED:
        base = tl.load(ids + row * USED + place).to(tl.int64) * width
        _gated_row(
            x, out, base, at, width, codes, high, scales, supers, up_codes, up_high, up_scales, up_supers,
            COLUMNS, TYPE, WARPS, AHEAD,
        )  # fmt: skip
    elif SHARED:
        _gated_row(
            x, out, 0, at, width, s_codes, s_high, s_scales, s_supers, s_up_codes, s_up_high, s_up_scales,
            s_up_supers, COLUMNS, S_TYPE, WARPS, AHEAD,
        )  # fmt: skip
        if at == 0:
            k = tl.arange(0, 256)
            dot = tl.zeros([256], tl.float32)
            for start in range(0, COLUMNS, 256):
                dot += tl.load(x + start + k).to(tl.float32) * tl.load(scale + start + k).to(tl.float32)
            tl.store(share + row, tl.sigmoid(tl.sum(dot, 0)))


@triton.jit
def _down_pairs_kernel(
    inner, ids, weights, share, residual, out, width,
    codes, high, scales, supers, s_codes, s_high, s_scales, s_supers,
    USED: tl.constexpr, SHARED: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, S_TYPE: tl.constexpr,
    ADD: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """16 outputs of one row: the steps of all its experts are dealt to the warps, then the shared expert's."""
    source = tl.program_id(1)
    at = tl.program_id(0) * 16
    steps: tl.constexpr = COLUMNS // 256
    g, t, warp = threads(WARPS)
    n = tl.minimum(at + g, width - 1).to(tl.int64)
    n2 = tl.minimum(at + g + 8, width - 1).to(tl.int64)
    x = single_address(inner + source.to(tl.int64) * (USED + SHARED) * COLUMNS, WARPS)
    nought = tl.zeros(warp.shape, tl.float32)
    acc = (nought, nought)
    for start in range(0, USED * steps, WARPS):
        turn = start + warp
        live = turn < USED * steps
        place = tl.minimum(turn // steps, USED - 1)
        step = turn % steps
        first = tl.load(ids + source * USED + place).to(tl.int64) * width
        weight = tl.load(weights + source * USED + place)
        a = load_step_single(codes, high, scales, supers, first + n, step, live, t, COLUMNS, TYPE)
        b = load_step_single(codes, high, scales, supers, first + n2, step, live, t, COLUMNS, TYPE)
        acc = step_products_single(acc, a, b, x + place * (2 * COLUMNS) + step * 512, g, weight, TYPE)
    if SHARED:
        part = tl.load(share + source)
        for start in range(0, steps, WARPS):
            step = start + warp
            live = step < steps
            a = load_step_single(s_codes, s_high, s_scales, s_supers, n, step, live, t, COLUMNS, S_TYPE)
            b = load_step_single(s_codes, s_high, s_scales, s_supers, n2, step, live, t, COLUMNS, S_TYPE)
            address = x + USED * 2 * COLUMNS + tl.minimum(step, steps - 1) * 512
            acc = step_products_single(acc, a, b, address, g, part, S_TYPE)
    to = source.to(tl.int64) * width
    store_single(out + to, residual + to, single_over_warps(acc, WARPS), at, width, ADD)


def by_pair(
    h: Tensor, ids: Tensor, weights: Tensor, gate: Packed, up: Packed, down: Packed, width: int,
    shared: tuple[Packed, Packed, Packed, Tensor] | None, residual: Tensor | None, config: UnitsConfig = PAIRS,
) -> Tensor:  # fmt: skip
    """Two launches for everything; gate and up are of one type, and so are the shared expert's."""
    rows, hidden = h.shape
    used = ids.shape[1]
    h = h.contiguous()
    s_gate, s_up, s_down, scale = shared or (gate, up, down, h)
    places = used + (shared is not None)
    inner = torch.empty(rows, places, width, dtype=h.dtype, device=h.device)
    share = torch.empty(rows, dtype=torch.float32, device=h.device)
    _up_pairs_kernel[(triton.cdiv(width, 16), places, rows)](
        h, ids, inner, share, scale, width, *planes(gate), *planes(up), *planes(s_gate), *planes(s_up),
        USED=used, SHARED=shared is not None, COLUMNS=hidden, TYPE=gate.type, S_TYPE=s_gate.type,
        WARPS=config.up_warps, AHEAD=config.ahead, num_warps=config.up_warps, num_stages=1,
    )  # fmt: skip
    out = torch.empty(rows, hidden, dtype=h.dtype if residual is None else residual.dtype, device=h.device)
    _down_pairs_kernel[(triton.cdiv(hidden, 16), rows)](
        inner, ids, weights, share, out if residual is None else residual, out, hidden,
        *planes(down), *planes(s_down), USED=used, SHARED=shared is not None, COLUMNS=width, TYPE=down.type,
        S_TYPE=s_down.type, ADD=residual is not None, WARPS=config.down_warps, num_warps=config.down_warps,
        num_stages=1,
    )  # fmt: skip
    return out


# ---- grouped by expert -------------------------------------------------------------------------------------------


@triton.jit
def _up_groups_kernel(
    h, order, starts, inner, width, codes, high, scales, supers, up_codes, up_high, up_scales, up_supers,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, USED: tl.constexpr,
    NT: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """inner [pairs, width] in the order of `order`, for the pairs of one expert."""
    expert = tl.program_id(1)
    begin = tl.load(starts + expert)
    end = tl.load(starts + expert + 1)
    at = tl.program_id(0) * 16
    g, t, warp = threads(WARPS)
    row = expert.to(tl.int64) * width + tl.minimum(at + g, width - 1)
    row2 = expert.to(tl.int64) * width + tl.minimum(at + g + 8, width - 1)
    for m_first in range(begin, end, 8 * NT):
        m = m_first + 8 * tl.arange(0, NT)[:, None] + g
        pair = load_one(order + tl.minimum(m, end - 1))
        address = (h + (pair // USED).to(tl.int64) * COLUMNS + 4 * t).to(tl.int64)
        is_up = warp % 2 == 1
        acc = tile_products(
            address, tl.where(is_up, up_codes, codes), tl.where(is_up, up_high, high),
            tl.where(is_up, up_scales, scales), tl.where(is_up, up_supers, supers), row, row2, warp // 2,
            COLUMNS, TYPE, WARPS // 2, AHEAD, False,
        )  # fmt: skip
        acc = gated_over_warps(acc, NT, WARPS)
        store_tile(inner, inner, acc, m_first, end, at, width, NT, False)


@triton.jit
def _down_groups_kernel(
    inner, order, starts, weights, shares, width, codes, high, scales, supers,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, NT: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """shares [pairs, width] by pair: weight · (down inner), for the pairs of one expert."""
    expert = tl.program_id(1)
    begin = tl.load(starts + expert)
    end = tl.load(starts + expert + 1)
    at = tl.program_id(0) * 16
    g, t, warp = threads(WARPS)
    row = expert.to(tl.int64) * width + tl.minimum(at + g, width - 1)
    row2 = expert.to(tl.int64) * width + tl.minimum(at + g + 8, width - 1)
    for m_first in range(begin, end, 8 * NT):
        m = m_first + 8 * tl.arange(0, NT)[:, None] + g
        address = (inner + tl.minimum(m, end - 1).to(tl.int64) * COLUMNS + 4 * t).to(tl.int64)
        acc = tile_products(
            address, codes, high, scales, supers, row, row2, warp, COLUMNS, TYPE, WARPS, False, False
        )  # fmt: skip
        c0, c1, c2, c3 = over_warps(acc, NT, WARPS)
        lane = tl.arange(0, 32)[None, :]
        to = m_first + 8 * tl.arange(0, NT)[:, None] + lane % 4 * 2
        _store_share(shares, order, weights, c0, c2, to, end, at + lane // 4, width)
        _store_share(shares, order, weights, c1, c3, to + 1, end, at + lane // 4, width)


@triton.jit
def _store_share(shares, order, weights, value, value2, m, end, n, width):
    pair = tl.load(order + m, m < end, other=0)
    weight = tl.load(weights + pair, m < end, other=0.0)
    p = shares + pair.to(tl.int64) * width + n
    tl.store(p, value * weight, (m < end) & (n < width))
    tl.store(p + 8, value2 * weight, (m < end) & (n + 8 < width))


def grouped_shares(
    h: Tensor, order: Tensor, starts: Tensor, weights: Tensor, gate: Packed, up: Packed, down: Packed, width: int,
    eights: int, config: UnitsConfig = GROUPS,
) -> Tensor:  # fmt: skip
    """weight · expert(h) for every pair: float32 [pairs, hidden]."""
    hidden, pairs, experts = h.shape[1], order.shape[0], starts.shape[0] - 1
    inner = torch.empty(pairs, width, dtype=h.dtype, device=h.device)
    shares = torch.empty(pairs, hidden, dtype=torch.float32, device=h.device)
    used = weights.shape[1]
    _up_groups_kernel[(triton.cdiv(width, 16), experts)](
        h, order, starts, inner, width, *planes(gate), *planes(up), COLUMNS=hidden, TYPE=gate.type, USED=used,
        NT=eights, WARPS=config.up_warps, AHEAD=config.ahead, num_warps=config.up_warps, num_stages=1,
    )  # fmt: skip
    _down_groups_kernel[(triton.cdiv(hidden, 16), experts)](
        inner, order, starts, weights, shares, hidden, *planes(down), COLUMNS=width, TYPE=down.type,
        NT=eights, WARPS=config.down_warps, num_warps=config.down_warps, num_stages=1,
    )  # fmt: skip
    return shares


def planes(weight: Packed) -> Planes:
    assert weight.supers is not None, f"{weight.type} has supers"
    return weight.codes, weight.codes if weight.high is None else weight.high, weight.scales, weight.supers

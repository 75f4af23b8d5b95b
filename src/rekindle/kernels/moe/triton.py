"""Routed experts on a GPU.

A pair is a row and one of its experts. For a few rows every pair reads its own weights: one launch for gate and up, one
for down and the weighted sum. From there on pairs are grouped by expert, so that each expert's weights are read once
per tile of its rows; for very many rows the experts are first expanded, some at a time. Both have a faster form on
NVIDIA's cards, in `nvidia`, and groups of a pair or two one in `integers`.
"""

from __future__ import annotations

from typing import NamedTuple, TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels import matmul
from rekindle.kernels.device import starting_early
from rekindle.kernels.matmul.arrivals import all_arrived, counters
from rekindle.kernels.matmul.mma import ask_for
from rekindle.kernels.matmul.scratch import scratch
from rekindle.kernels.matmul.tiles import block_numbers, dot_blocks, dot_pair, load_weights
from rekindle.kernels.matmul.triton import SCRATCH, by_units, expand, planes_of, row_slab
from rekindle.kernels.matmul.types import Packed
from rekindle.kernels.moe import integers, nvidia
from rekindle.kernels.moe.cold import Missing
from rekindle.kernels.moe.grouping import group
from rekindle.kernels.moe.naive import LEAST_SUM
from rekindle.kernels.moe.types import ExpertStack, SharedExpert

Three = tuple[Packed, Packed, Packed]

FEW_ROWS = 4  # up to here every pair reads its own weights
UNITS_PAIR_ROWS = 8  # the same, where `nvidia` does it
INTEGER_ROWS = 32  # up to here the groups take the way of `integers`, whose experts have a pair or two
BESIDE_ROWS = 64  # up to here the shared expert runs in the launches of the others
UNITS_ROWS = 256  # up to here the groups take the way of `nvidia`
MANY_ROWS = 1024  # from here on experts are expanded
ROUTED_ROWS = 64  # up to here the router is a launch of ours


class PairConfig(NamedTuple):
    """Tile of the pair kernels: rows of a matrix, warps (32 blocks of a row each)."""

    rows: int
    warps: int


class GroupConfig(NamedTuple):
    """Tile of the grouped kernels: outputs, pairs, blocks of columns; warps and stages."""

    out: int
    pairs: int
    blocks: int
    warps: int
    stages: int


UP_PAIRS = PairConfig(8, 2)
DOWN_PAIRS = PairConfig(4, 4)


def up_config(pairs_per_expert: int, expanded: bool) -> GroupConfig:
    if expanded:
        return GroupConfig(128, 128, 2, 8, 3)
    return GroupConfig(64, pairs_tile(pairs_per_expert), 4, 4, 3)


def down_config(pairs_per_expert: int, expanded: bool) -> GroupConfig:
    if expanded:
        return GroupConfig(128, 128, 2, 8, 3)
    return GroupConfig(64, pairs_tile(pairs_per_expert), 4, 4, 3)


def pairs_tile(pairs_per_expert: int) -> int:
    return min(64, max(16, triton.next_power_of_2(pairs_per_expert)))


# ---- choosing ----------------------------------------------------------------------------------------------------


@triton.jit
def chosen(logits, experts, least, USED: tl.constexpr, E: tl.constexpr, PLACES: tl.constexpr):
    """(ids, weights), both [PLACES], of the USED largest of one row's logits, largest first: each round takes the
    largest key that is left.

    A key orders by logit (its bits, made to rise with the number), then by the lowest id.
    """
    e = tl.arange(0, E)
    logit = tl.load(logits + e, e < experts, other=float("-inf"), cache_modifier=".cg") + 0.0  # no minus zero
    top = tl.max(logit, 0)
    every = tl.sum(tl.exp(logit - top), 0)
    bits = logit.to(tl.int32, bitcast=True)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    taken = tl.full([E], -0x8000000000000000, tl.int64)
    key = tl.where(e < experts, (rising.to(tl.int64) << 32) | (E - 1 - e).to(tl.int64), taken)
    place = tl.arange(0, PLACES)
    keys = tl.zeros([PLACES], tl.int64)
    for p in tl.static_range(USED):
        best = tl.max(key, 0)
        keys = tl.where(place == p, best, keys)
        key = tl.where(key == best, taken, key)
    rising = (keys >> 32).to(tl.int32)
    logit = (rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    chance = tl.where(place < USED, tl.exp(logit - top) / every, 0.0)
    total = tl.maximum(tl.sum(chance, 0), least)
    return E - 1 - (keys & 0xFFFFFFFF).to(tl.int32), chance / total


@triton.jit
def _choose(logits, ids, weights, experts, least, USED: tl.constexpr, E: tl.constexpr, PLACES: tl.constexpr):
    place = tl.arange(0, PLACES)
    id, weight = chosen(logits, experts, least, USED, E, PLACES)
    tl.store(ids + place, id, place < USED)
    tl.store(weights + place, weight, place < USED)


@triton.jit
def store_logits(
    h, router, logits, rows, experts, hidden,
    BE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BE logits of BM rows, in float32."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    p_w = router + tl.minimum(e, experts - 1)[:, None, None] * hidden
    p_x = h + tl.minimum(m, rows - 1)[None, :, None] * hidden
    acc = tl.zeros([BE, BM, BK], tl.float32)
    if EARLY:
        first = tl.arange(0, BK // 32)[None, None, :] * 32  # 128 bytes apart
        ask_for(p_w + first, (first < hidden).to(tl.int32))
        gdc_wait()
    for start in tl.range(0, hidden, BK, num_stages=1 if BM == 1 else 3):
        k = start + tl.arange(0, BK)[None, None, :]
        w = tl.load(p_w + k, k < hidden, other=0.0).to(tl.float32)
        x = tl.load(p_x + k, k < hidden, other=0.0).to(tl.float32)
        acc += w * x
    to = logits + m[None, :] * experts + e[:, None]
    tl.store(to, tl.sum(acc, 2), (e < experts)[:, None] & (m < rows)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _route_kernel(
    h, router, logits, ids, weights, arrived, rows, experts, hidden, least,
    USED: tl.constexpr, E: tl.constexpr, PLACES: tl.constexpr,
    BE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BE logits of BM rows; of a single row the last program chooses."""
    if EARLY:
        gdc_launch_dependents()
    store_logits(h, router, logits, rows, experts, hidden, BE, BM, BK, EARLY)
    if BM == 1:  # noqa: SIM102 (known when it is compiled, the other is not)
        if all_arrived(arrived, tl.num_programs(0)):
            _choose(logits, ids, weights, experts, least, USED, E, PLACES)


@triton.jit
def _choose_kernel(
    logits, ids, weights, experts, least, USED: tl.constexpr, E: tl.constexpr, PLACES: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    _choose(logits + row * experts, ids + row * USED, weights + row * USED, experts, least, USED, E, PLACES)


class RouteConfig(NamedTuple):
    """Experts, rows and columns of a program's tile, and its warps. With one row the choosing is part of the launch."""

    experts: int
    rows: int
    columns: int
    warps: int


def route_config(rows: int) -> RouteConfig:
    if rows == 1:
        return RouteConfig(1, 1, 2048, 4)
    return RouteConfig(2, 16, 512, 8) if rows > 8 else RouteConfig(2, 4, 256, 2)


def route(h: Tensor, router: Tensor, used: int, config: RouteConfig | None = None) -> tuple[Tensor, Tensor]:
    """Ids int32 and weights float32 [rows, used] of the chosen experts."""
    rows, hidden = h.shape
    experts = router.shape[0]
    config = config or route_config(rows)
    ids = torch.empty(rows, used, dtype=torch.int32, device=h.device)
    weights = torch.empty(rows, used, dtype=torch.float32, device=h.device)
    choice = {"USED": used, "E": triton.next_power_of_2(experts), "PLACES": triton.next_power_of_2(used)}
    early = starting_early(h.device)
    if rows > ROUTED_ROWS:
        logits = h.float() @ router.float().T
    else:
        logits = torch.empty(rows, experts, dtype=torch.float32, device=h.device)
        _route_kernel[(triton.cdiv(experts, config.experts), triton.cdiv(rows, config.rows))](
            h.contiguous(), router, logits, ids, weights, counters(h.device), rows, experts, hidden, LEAST_SUM,
            BE=config.experts, BM=config.rows, BK=min(config.columns, triton.next_power_of_2(hidden)),
            num_warps=config.warps, **choice, **early,
        )  # fmt: skip
    if rows > 1:
        _choose_kernel[(rows,)](logits, ids, weights, experts, LEAST_SUM, num_warps=1, **choice, **early)
    return ids, weights


# ---- every pair for itself ---------------------------------------------------------------------------------------


@triton.jit
def _up_tile(
    x, codes, high, scales, supers, up_codes, up_high, up_scales, up_supers, base, at, rows, nought,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr,
    BN: tl.constexpr, BB: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """silu(gate x) · (up x) for BN outputs [at, at + BN) of the expert whose rows begin at `base`."""
    blocks: tl.constexpr = COLUMNS // 32
    t = tl.arange(0, 2 * BN)
    row = base + tl.minimum(at + t // 2, rows - 1)
    is_up = (t % 2 == 1)[None, :]
    p_codes = tl.where(is_up, up_codes, codes)
    p_high = tl.where(is_up, up_high, high)
    p_scales = tl.where(is_up, up_scales, scales)
    p_supers = tl.where(is_up, up_supers, supers)
    acc = tl.zeros([BB, 2 * BN], tl.float32)
    for start in range(0, blocks, BB):
        b = start + tl.arange(0, BB)
        b_mask = b < blocks
        blk = block_numbers(b, row, blocks)
        mask = b_mask[:, None] & (row >= 0)[None, :]
        acc += dot_blocks(x, p_codes, p_high, p_scales, p_supers, b, b_mask, blk, mask, nought, TYPE, MASKED)
    gate, up = tl.split(tl.sum(acc, 0).reshape(BN, 2))
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _up_rows_kernel(
    h, ids, inner, share, scale, rows, nought,
    codes, high, scales, supers, up_codes, up_high, up_scales, up_supers,
    s_codes, s_high, s_scales, s_supers, s_up_codes, s_up_high, s_up_scales, s_up_supers,
    USED: tl.constexpr, SHARED: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, S_TYPE: tl.constexpr,
    BN: tl.constexpr, BB: tl.constexpr, MASKED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """inner[row, place, :] for a chosen expert; place USED is the shared expert, which also leaves its share."""
    if EARLY:
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
            x, codes, high, scales, supers, up_codes, up_high, up_scales, up_supers, base, at, rows, nought,
            COLUMNS, TYPE, BN, BB, MASKED,
        )  # fmt: skip
        tl.store(p_out, y, n < rows)
    elif SHARED:
        y = _up_tile(
            x, s_codes, s_high, s_scales, s_supers, s_up_codes, s_up_high, s_up_scales, s_up_supers,
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
    inner, ids, weights, share, residual, out, rows, nought,
    codes, high, scales, supers, s_codes, s_high, s_scales, s_supers,
    USED: tl.constexpr, SHARED: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, S_TYPE: tl.constexpr,
    BN: tl.constexpr, BB: tl.constexpr, SB: tl.constexpr, MASKED: tl.constexpr, ADD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """BN outputs of one row: the chosen experts' blocks behind one another are one long sum, then the shared one's."""
    if EARLY:
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
        part = dot_blocks(x, codes, high, scales, supers, b, b_mask, blk, mask, nought, TYPE, MASKED)
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
            s_acc += dot_blocks(x, s_codes, s_high, s_scales, s_supers, b, b_mask, blk, mask, nought, S_TYPE, True)
        y += tl.load(share + row) * tl.sum(s_acc, 0)
    if ADD:
        y += tl.load(residual + row * rows + n, n < rows, other=0.0).to(tl.float32)
    tl.store(out + row * rows + n, y, n < rows)


def by_pair(
    h: Tensor, ids: Tensor, weights: Tensor, gate: Packed, up: Packed, down: Packed, width: int,
    shared: tuple[Packed, Packed, Packed, Tensor] | None, residual: Tensor | None,
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
        BN=half, BB=blocks, MASKED=hidden % (32 * blocks) != 0, num_warps=up_warps, **starting_early(h.device),
    )  # fmt: skip
    out = torch.empty(rows, hidden, dtype=h.dtype if residual is None else residual.dtype, device=h.device)
    blocks = 32 * down_warps
    _down_rows_kernel[(triton.cdiv(hidden, down_tile.rows), rows)](
        inner, ids, weights, share, out if residual is None else residual, out, hidden, 0,
        *planes_of(down), *planes_of(s_down),
        USED=used, SHARED=shared is not None, COLUMNS=width, TYPE=down.type, S_TYPE=s_down.type, BN=down_tile.rows,
        BB=blocks, SB=min(blocks, triton.next_power_of_2(width // 32)), MASKED=used * width % (32 * blocks) != 0,
        ADD=residual is not None, num_warps=down_warps, **starting_early(h.device),
    )  # fmt: skip
    return out


def _warps(tile: PairConfig, columns: int) -> int:
    """No more warps than cover the columns."""
    return min(tile.warps, triton.next_power_of_2(triton.cdiv(columns, 1024)))


# ---- grouped by expert -------------------------------------------------------------------------------------------


@triton.jit
def _tile_weights(
    codes, high, scales, supers, row, start, nought,
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
        return load_weights(codes, high, scales, supers, blk, mask, nought, TYPE, DTYPE, MASKED)


@triton.jit
def _grouped_kernel(
    x, order, starts, weights, out, first, width, nought,
    codes, high, scales, supers, up_codes, up_high, up_scales, up_supers,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, UP_TYPE: tl.constexpr, PAIRED: tl.constexpr, USED: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """All pairs of one expert for BN outputs.

    PAIRED: x is by row, out [pairs, width] in the order of `order` gets silu(gate x) · (up x).
    Otherwise x is in the order of `order`, and out [pairs, width] by pair gets weight · (down x).
    """
    if EARLY:
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
            b_w = _tile_weights(codes, high, scales, supers, row, start, nought, COLUMNS, TYPE, DTYPE, BB, MASKED)
            acc = dot_pair(b_w, b_x, acc, EXACT)
            if PAIRED:
                b_up = _tile_weights(
                    up_codes, up_high, up_scales, up_supers, row, start, nought, COLUMNS, UP_TYPE, DTYPE, BB, MASKED
                )
                acc_up = dot_pair(b_up, b_x, acc_up, EXACT)
        mask = (m < end)[:, None] & (n < width)[None, :]
        if PAIRED:
            acc = acc * tl.sigmoid(acc) * acc_up
            tl.store(out + m[:, None].to(tl.int64) * width + n[None, :], tl.trans(acc), mask)
        else:
            y = tl.trans(acc) * tl.load(weights + pair, m < end, other=0.0)[:, None]
            tl.store(out + pair[:, None].to(tl.int64) * width + n[None, :], y, mask)


@triton.jit
def _combine_kernel(
    shares, h, scale, shared, residual, out, hidden,
    USED: tl.constexpr, SHARED: tl.constexpr, ADD: tl.constexpr, B: tl.constexpr, H: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """out[row] = Σ over places of shares[row, place], plus the shared expert by its share, plus residual.

    Everything is asked for at once: H, a power of two, is at least hidden."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * B + tl.arange(0, B)
    mask = n < hidden
    total = tl.zeros([B], tl.float32)
    for place in tl.static_range(USED):
        total += tl.load(shares + (row * USED + place) * hidden + n, mask, other=0.0)
    if SHARED:
        k = tl.arange(0, H)
        x = tl.load(h + row * hidden + k, k < hidden, other=0.0).to(tl.float32)
        share = tl.sigmoid(tl.sum(x * tl.load(scale + k, k < hidden, other=0.0).to(tl.float32), 0))
        total += share * tl.load(shared + row * hidden + n, mask, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(residual + row * hidden + n, mask, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + n, total, mask)


def by_group(
    h: Tensor, ids: Tensor, weights: Tensor, gate: ExpertStack, up: ExpertStack, down: ExpertStack,
    shared: SharedExpert | None, residual: Tensor | None, expanding: bool,
    up_tile: GroupConfig | None = None, down_tile: GroupConfig | None = None,
) -> Tensor:  # fmt: skip
    """Each expert's weights are read once per tile of its pairs; `expanding` turns them into values beforehand."""
    hidden = h.shape[1]
    used, pairs = ids.shape[1], ids.numel()
    h = h.contiguous()
    density = triton.cdiv(2 * pairs, gate.experts)
    order, starts = group(ids, gate.experts)
    inner = torch.empty(pairs, gate.rows, dtype=h.dtype, device=h.device)
    shares = torch.empty(pairs, hidden, dtype=torch.float32, device=h.device)
    tile = up_tile or up_config(density, expanding)
    run_grouped(h, order, starts, weights, inner, [gate, up], used, tile, expanding)
    tile = down_tile or down_config(density, expanding)
    run_grouped(inner, order, starts, weights, shares, [down], used, tile, expanding)
    return _combined(h, shares, used, shared, residual)


def by_integers(
    h: Tensor, ids: Tensor, weights: Tensor, gate: ExpertStack, up: ExpertStack, down: ExpertStack,
    shared: SharedExpert | None, residual: Tensor | None,
) -> Tensor:  # fmt: skip
    """The same through `integers`, for rows so few that most experts have a pair or two."""
    h = h.contiguous()
    beside = _beside(h, shared, gate.rows)
    planes = gate.planes, up.planes, down.planes
    shares = integers.run_experts(h, ids, weights, *planes, gate.experts, beside)
    extra = shares[ids.numel() :] if beside is not None else None
    return _combined(h, shares, ids.shape[1], shared, residual, extra)


def by_units_group(
    h: Tensor, ids: Tensor, weights: Tensor, gate: ExpertStack, up: ExpertStack, down: ExpertStack,
    shared: SharedExpert | None, residual: Tensor | None,
    eights: int | None = None, config: nvidia.UnitsConfig | None = None,
) -> Tensor:  # fmt: skip
    """The same through `nvidia`, for rows few enough that an expert has a handful of pairs."""
    h = h.contiguous()
    rows, used = ids.shape
    if eights is None:
        density = triton.cdiv(2 * ids.numel(), gate.experts)
        eights = min(2, triton.next_power_of_2(triton.cdiv(density, 8)))
    order, starts = group(ids, gate.experts)
    beside = _beside(h, shared, gate.rows) if rows <= BESIDE_ROWS else None
    shares = nvidia.grouped_shares(
        h, order, starts, weights, gate.planes, up.planes, down.planes, gate.rows, beside, eights,
        config or nvidia.EIGHTS,
    )  # fmt: skip
    extra = shares[ids.numel() :] if beside is not None else None
    return _combined(h, shares, used, shared, residual, extra)


def _beside(h: Tensor, shared: SharedExpert | None, width: int) -> Three | None:
    """The shared expert's planes, where it can run in the launches of the others."""
    if shared is None:
        return None
    packed = shared.gate.packed, shared.up.packed, shared.down.packed
    return packed if _fits_pairs(packed, width) and by_units(h, *packed) else None


def _combined(
    h: Tensor, shares: Tensor, used: int, shared: SharedExpert | None, residual: Tensor | None,
    extra: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The pairs' shares [pairs, hidden] added up by row, with the shared expert and the residual. `extra`: what the
    shared expert gives, if it is known."""
    rows, hidden = h.shape
    if shared is not None and extra is None:
        extra = matmul.multiply(matmul.swiglu(h, shared.gate, shared.up), shared.down)
    out = torch.empty(rows, hidden, dtype=h.dtype if residual is None else residual.dtype, device=h.device)
    whole = triton.next_power_of_2(hidden)
    block = min(512, whole)
    _combine_kernel[(rows, triton.cdiv(hidden, block))](
        shares, h, h if shared is None else shared.scale, h if extra is None else extra,
        out if residual is None else residual, out, hidden,
        USED=used, SHARED=shared is not None, ADD=residual is not None, B=block, H=whole, num_warps=4,
        **starting_early(h.device),
    )  # fmt: skip
    return out


def run_grouped(
    x: Tensor, order: Tensor, starts: Tensor, weights: Tensor, out: Tensor, stacks: list[ExpertStack],
    used: int, tile: GroupConfig, expanding: bool,
) -> None:  # fmt: skip
    """One launch over all experts, or one per handful of experts that fits the scratch once expanded."""
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
            x, order, starts, weights, out, first, stack.rows, 0, *planes_of(parts[0]), *planes_of(parts[-1]),
            COLUMNS=stack.columns, TYPE=types[0], UP_TYPE=types[-1], PAIRED=len(stacks) == 2, USED=used,
            BN=tile.out, BM=tile.pairs, BB=tile.blocks, MASKED=stack.columns % (32 * tile.blocks) != 0,
            EXACT=x.dtype == torch.float32, num_warps=tile.warps, num_stages=tile.stages, **starting_early(x.device),
        )  # fmt: skip


# ---- the door ----------------------------------------------------------------------------------------------------


def takes_missing(h: Tensor, gate: ExpertStack, up: ExpertStack, down: ExpertStack, shared: SharedExpert) -> bool:
    """One row may go to `moe_missing`."""
    packed = shared.gate.packed, shared.up.packed, shared.down.packed
    if h.shape[0] != 1 or gate.planes.type != up.planes.type or not _fits_pairs(packed, gate.rows):
        return False
    return by_units(h, gate.planes, up.planes, down.planes) and by_units(h, *packed)


def moe_missing(
    h: Tensor, slots: Tensor, weights: Tensor, gate: ExpertStack, up: ExpertStack, down: ExpertStack,
    shared: SharedExpert, missing: Missing,
) -> Tensor:  # fmt: skip
    """The chosen experts of one row, some of which are brought to their slots first, and the shared one."""
    packed = shared.gate.packed, shared.up.packed, shared.down.packed
    assert _fits_pairs(packed, gate.rows), "asked of takes_missing before"
    planes = gate.planes, up.planes, down.planes
    beside = (*packed, shared.scale)
    return nvidia.by_pair(h, slots, weights, *planes, gate.rows, beside, None, missing=missing)


def moe(
    h: Tensor, ids: Tensor, weights: Tensor, gate: ExpertStack, up: ExpertStack, down: ExpertStack,
    shared: SharedExpert | None = None, residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The chosen experts, weighted, and the shared one: [rows, hidden]."""
    rows = h.shape[0]
    units = gate.planes.type == up.planes.type and by_units(h, gate.planes, up.planes, down.planes)
    if rows <= (UNITS_PAIR_ROWS if units else FEW_ROWS) and gate.planes.type == up.planes.type:
        packed = None if shared is None else (shared.gate.packed, shared.up.packed, shared.down.packed)
        planes = gate.planes, up.planes, down.planes
        if shared is None or packed is None:
            run = nvidia.by_pair if units else by_pair
            return run(h, ids, weights, *planes, gate.rows, None, residual)
        if _fits_pairs(packed, gate.rows):
            run = nvidia.by_pair if units and by_units(h, *packed) else by_pair
            return run(h, ids, weights, *planes, gate.rows, (*packed, shared.scale), residual)
    if units and rows <= INTEGER_ROWS:
        return by_integers(h, ids, weights, gate, up, down, shared, residual)
    if units and rows <= UNITS_ROWS:
        return by_units_group(h, ids, weights, gate, up, down, shared, residual)
    return by_group(h, ids, weights, gate, up, down, shared, residual, expanding=rows >= MANY_ROWS)


def _fits_pairs(packed: tuple[Packed | None, Packed | None, Packed | None], width: int) -> TypeGuard[Three]:
    """The shared expert can run as one more pair: quantised, gate and up alike, as wide as the others."""
    gate, up, down = packed
    if gate is None or up is None or down is None:
        return False
    return gate.type == up.type and gate.rows == width

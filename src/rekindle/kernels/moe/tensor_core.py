"""Routed experts in NVIDIA's tensor cores, for few rows; `matmul.mma` has the products.

By pair, every chosen expert of every row reads its own weights. By group, an expert's weights are read once for
8 · N_TILES of its pairs. A program gives 16 outputs, and its warps lie side by side along the columns.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels.device import pdl_arguments, shared_memory_carveout
from rekindle.kernels.matmul.gemv import gemv_products
from rekindle.kernels.matmul.mma import gated_over_warps, over_warps, store_tile, tile_products
from rekindle.kernels.matmul.mma_row import (
    group_products_single,
    load_super_scales,
    load_tile_single,
    single_address,
    single_gated_over_warps,
    single_over_warps,
    store_single,
)
from rekindle.kernels.matmul.ptx import load_one, threads
from rekindle.kernels.matmul.types import Packed
from rekindle.kernels.moe.bring import answered, bring_part, take_answer, when_stored
from rekindle.kernels.moe.cold import Missing

Planes = tuple[Tensor, Tensor, Tensor, Tensor]


class TensorCoreConfig(NamedTuple):
    """Warps of a program for gate and up (half for each) and for down. By pair only: registers
    that a thread may take (0: as many as it likes)."""

    up_warps: int
    down_warps: int
    registers: int = 0

    @property
    def limit(self) -> dict[str, int]:
        return {"maxnreg": self.registers} if self.registers else {}


def groups_config(rows: int) -> TensorCoreConfig:
    """Grouped by expert; the fastest of those timed on an H200 (docs/LOG.md)."""
    return TensorCoreConfig(4, 1) if rows < 128 else TensorCoreConfig(2, 1)


def pairs_config(rows: int) -> TensorCoreConfig:
    return TensorCoreConfig(8, 16, registers=80) if rows == 1 else TensorCoreConfig(8, 8)


# ---- every pair for itself ---------------------------------------------------------------------------------------


@triton.jit
def _gated_row(
    x, out, base, at, width, codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales, up_super_scales,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """silu(gate x) · (up x) for 16 outputs from `at` on, of the expert whose rows begin at `base`."""
    g, _, warp = threads(WARPS)
    row = base + (at + g).to(tl.int64)  # down's types have it that width is a multiple of 256
    is_up = warp % 2 == 1
    codes = tl.where(is_up, up_codes, codes)
    high_bits = tl.where(is_up, up_high_bits, high_bits)
    scales = tl.where(is_up, up_scales, scales)
    super_scales = tl.where(is_up, up_super_scales, super_scales)
    acc = gemv_products(
        single_address(x, WARPS), codes, high_bits, scales, super_scales, row, warp // 2, 0,
        COLUMNS, TYPE, WARPS // 2, 1, PDL,
    )  # fmt: skip
    store_single(out, single_gated_over_warps(acc, WARPS), at, width)


@shared_memory_carveout
@triton.jit(do_not_specialize=["count"])
def _up_pairs_kernel(
    h, ids, inner, share, scale, width,
    codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales, up_super_scales,
    s_codes, s_high_bits, s_scales, s_super_scales, s_up_codes, s_up_high_bits, s_up_scales, s_up_super_scales,
    sources, pieces, count, asked, answer, number, gone, done, lost, theirs, patience,
    USED: tl.constexpr, SHARED: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, S_TYPE: tl.constexpr,
    WORDS: tl.constexpr, HELPED: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """inner[row, place, :] for a chosen expert; place USED is the shared expert, which also leaves its share.

    WORDS, unless 0: an expert with a source is brought to its slot first, in pieces of so many words. HELPED: the host
    may compute some, whose pairs are multiplied here too but with no weight; a program of the last place takes its
    answer in.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(2)
    place = tl.program_id(1)
    at = tl.program_id(0) * 16
    x = h + row.to(tl.int64) * COLUMNS
    out = inner + (row * (USED + SHARED) + place).to(tl.int64) * width
    if place < USED:
        if PDL:
            gdc_wait()
        slot = tl.load(ids + row * USED + place).to(tl.int64)
        base = slot * width
        if WORDS > 0:
            source = tl.load(sources + row * USED + place).to(tl.int64)
            if source >= 0:
                bring_part(pieces, count, tl.program_id(0), source, slot, WORDS)
                base = when_stored(base, WARPS)
        _gated_row(
            x, out, base, at, width, codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales,
            up_super_scales,
            COLUMNS, TYPE, WARPS, False,
        )  # fmt: skip
    elif SHARED:
        _gated_row(
            x, out, 0, at, width, s_codes, s_high_bits, s_scales, s_super_scales, s_up_codes, s_up_high_bits,
            s_up_scales,
            s_up_super_scales, COLUMNS, S_TYPE, WARPS, PDL,
        )  # fmt: skip
        if at == 0:
            k = tl.arange(0, 256)
            dot = tl.zeros([256], tl.float32)
            for start in range(0, COLUMNS, 256):
                dot += tl.load(x + start + k).to(tl.float32) * tl.load(scale + start + k).to(tl.float32)
            tl.store(share + row, tl.sigmoid(tl.sum(dot, 0)))
    if HELPED and (place == USED + SHARED - 1) & (at == 0):
        take_answer(answer, asked, number, gone, done, lost, theirs, patience, COLUMNS)


@triton.jit
def _load_turn(
    ids, weights, planes, source, n, n2, x, turn, width,
    USED: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """A group of one of the row's experts, the expert's weight, and where the group's x is."""
    codes, high_bits, scales, super_scales = planes
    groups: tl.constexpr = COLUMNS // 128
    live = turn < USED * groups
    turn = tl.minimum(turn, USED * groups - 1)
    place = turn // groups
    group = turn % groups
    t = threads(turn.shape[1] // 32)[1]
    first = tl.load(ids + source * USED + place).to(tl.int64) * width
    both = load_super_scales(super_scales, first + n, first + n2, group, live, COLUMNS)
    tile = load_tile_single(codes, high_bits, scales, both, first + n, first + n2, group, live, t, COLUMNS, TYPE)
    return tile, tl.load(weights + source * USED + place), x + turn * 256


@shared_memory_carveout
@triton.jit
def _down_pairs_kernel(
    inner, ids, weights, share, out, width,
    codes, high_bits, scales, super_scales, s_codes, s_high_bits, s_scales, s_super_scales, asked, answer,
    USED: tl.constexpr, SHARED: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, S_TYPE: tl.constexpr,
    HELPED: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """16 outputs of one row: the steps of all its experts are dealt to the warps, then the shared expert's. HELPED: the
    host may have computed some of them."""
    if PDL:
        gdc_launch_dependents()
    source = tl.program_id(1)
    at = tl.program_id(0) * 16
    groups: tl.constexpr = COLUMNS // 128
    g, t, warp = threads(WARPS)
    n = tl.minimum(at + g, width - 1).to(tl.int64)
    n2 = tl.minimum(at + g + 8, width - 1).to(tl.int64)
    x = single_address(inner + source.to(tl.int64) * (USED + SHARED) * COLUMNS, WARPS)
    nought = tl.zeros(warp.shape, tl.float32)
    acc = (nought, nought, nought, nought)
    if SHARED:  # asked for before the wait
        live = warp < groups
        both = load_super_scales(s_super_scales, n, n2, warp, live, COLUMNS)
        tile = load_tile_single(s_codes, s_high_bits, s_scales, both, n, n2, warp, live, t, COLUMNS, S_TYPE)
    if PDL:
        gdc_wait()
    if HELPED:
        was_asked, is_first = tl.load(asked) > 0, (warp == 0) & (t == 0)
        upper = answered(answer, was_asked, at + g, is_first, width)
        acc = (upper, nought, answered(answer, was_asked, at + g + 8, is_first, width), nought)
    if SHARED:
        part = tl.load(share + source)
        for start in range(0, groups, WARPS):
            group = start + warp
            address = x + USED * 2 * COLUMNS + tl.minimum(group, groups - 1) * 256
            acc = group_products_single(acc, tile, address, g, part, S_TYPE)
            group += WARPS
            live = group < groups
            both = load_super_scales(s_super_scales, n, n2, group, live, COLUMNS)
            tile = load_tile_single(s_codes, s_high_bits, s_scales, both, n, n2, group, live, t, COLUMNS, S_TYPE)
    planes = codes, high_bits, scales, super_scales
    turn = warp
    tile, weight, address = _load_turn(ids, weights, planes, source, n, n2, x, turn, width, USED, COLUMNS, TYPE)
    for _ in range(0, USED * groups, WARPS):
        now, factor, here = tile, weight, address
        turn += WARPS
        tile, weight, address = _load_turn(ids, weights, planes, source, n, n2, x, turn, width, USED, COLUMNS, TYPE)
        acc = group_products_single(acc, now, here, g, factor, TYPE)
    to = source.to(tl.int64) * width
    store_single(out + to, single_over_warps(acc, WARPS), at, width)


def by_pair(
    h: Tensor, ids: Tensor, weights: Tensor, gate: Packed, up: Packed, down: Packed, width: int,
    shared: tuple[Packed, Packed, Packed, Tensor] | None,
    config: TensorCoreConfig | None = None, missing: Missing | None = None,
) -> Tensor:  # fmt: skip
    """Two launches for everything; gate and up are of one type, and so are the shared expert's. `missing`: of one row,
    whose experts have distinct slots."""
    rows, hidden = h.shape
    assert missing is None or rows == 1, f"{rows} rows may bring an expert twice"
    config = config or pairs_config(rows)
    early = pdl_arguments(h.device)
    used = ids.shape[1]
    h = h.contiguous()
    s_gate, s_up, s_down, scale = shared or (gate, up, down, h)
    places = used + (shared is not None)
    inner = torch.empty(rows, places, width, dtype=h.dtype, device=h.device)
    share = torch.empty(rows, dtype=torch.float32, device=h.device)
    answer = None if missing is None else missing.answer
    _up_pairs_kernel[(triton.cdiv(width, 16), places, rows)](
        h, ids, inner, share, scale, width, *planes(gate), *planes(up), *planes(s_gate), *planes(s_up),
        *((ids, ids, 0) if missing is None else missing.arguments),
        *((ids, h, ids, ids, 0, 0, 0, 0) if answer is None else (answer.count, answer.here, *answer.waiting)),
        USED=used, SHARED=shared is not None, COLUMNS=hidden, TYPE=gate.type, S_TYPE=s_gate.type,
        WORDS=0 if missing is None else missing.parts.words, HELPED=answer is not None, WARPS=config.up_warps,
        num_warps=config.up_warps, num_stages=1,
        **config.limit, **early,
    )  # fmt: skip
    out = torch.empty(rows, hidden, dtype=h.dtype, device=h.device)
    _down_pairs_kernel[(triton.cdiv(hidden, 16), rows)](
        inner, ids, weights, share, out, hidden,
        *planes(down), *planes(s_down), *((ids, h) if answer is None else (answer.count, answer.here)),
        USED=used, SHARED=shared is not None, COLUMNS=width, TYPE=down.type, S_TYPE=s_down.type,
        HELPED=answer is not None, WARPS=config.down_warps,
        num_warps=config.down_warps, num_stages=1, **config.limit, **early,
    )  # fmt: skip
    return out


# ---- grouped by expert -------------------------------------------------------------------------------------------
#
# The pairs of expert e are order[starts[e] : starts[e + 1]]; programs of an expert without pairs end at once. `inner`
# holds the pairs in the order of `order` and, behind them, the rows that pass the shared expert, whose programs begin
# first where it takes part, since they have most to do.


@triton.jit
def _gated_group(
    h, order, inner, begin, end, base, at, width,
    codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales, up_super_scales,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, USED: tl.constexpr, N_TILES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """inner[begin:end] for 16 outputs of the expert whose rows begin at `base`. USED 0: every row is a pair."""
    g, t, warp = threads(WARPS)
    row = base + tl.minimum(at + g, width - 1).to(tl.int64)
    row2 = base + tl.minimum(at + g + 8, width - 1).to(tl.int64)
    is_up = warp % 2 == 1
    codes = tl.where(is_up, up_codes, codes)
    high_bits = tl.where(is_up, up_high_bits, high_bits)
    scales = tl.where(is_up, up_scales, scales)
    super_scales = tl.where(is_up, up_super_scales, super_scales)
    for m_first in range(begin, end, 8 * N_TILES):
        m = tl.minimum(m_first + 8 * tl.arange(0, N_TILES)[:, None] + g, end - 1)
        source = load_one(order + m) // USED if USED > 0 else m - begin
        address = (h + source.to(tl.int64) * COLUMNS + 4 * t).to(tl.int64)
        acc, _acc2 = tile_products(
            address, codes, high_bits, scales, super_scales, row, row2, row, row2, warp // 2,
            COLUMNS, TYPE, WARPS // 2, 1, False, False,
        )  # fmt: skip
        store_tile(inner, gated_over_warps(acc, N_TILES, WARPS), m_first, end, at, width, N_TILES)


@triton.jit(do_not_specialize=["rows", "pairs"])
def _up_groups_kernel(
    h, order, starts, inner, rows, pairs, width,
    codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales, up_super_scales,
    s_codes, s_high_bits, s_scales, s_super_scales, s_up_codes, s_up_high_bits, s_up_scales, s_up_super_scales,
    USED: tl.constexpr, SHARED: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, S_TYPE: tl.constexpr,
    N_TILES: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """silu(gate h) · (up h) of the pairs of one expert, for 16 outputs."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(1) - SHARED
    at = tl.program_id(0) * 16
    if expert >= 0:
        begin, end = tl.load(starts + expert), tl.load(starts + expert + 1)
        _gated_group(
            h, order, inner, begin, end, expert.to(tl.int64) * width, at, width,
            codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales, up_super_scales,
            COLUMNS, TYPE, USED, N_TILES, WARPS,
        )  # fmt: skip
    elif SHARED:
        _gated_group(
            h, order, inner, pairs, pairs + rows, 0, at, width,
            s_codes, s_high_bits, s_scales, s_super_scales, s_up_codes, s_up_high_bits, s_up_scales, s_up_super_scales,
            COLUMNS, S_TYPE, 0, N_TILES, WARPS,
        )  # fmt: skip


@triton.jit
def _down_group(
    inner, order, weights, shares, begin, end, base, at, width, codes, high_bits, scales, super_scales,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, WEIGHTED: tl.constexpr, N_TILES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """down inner[begin:end] of the expert whose rows begin at `base`; WEIGHTED: times the pair's weight, and to its
    own place in `shares`."""
    g, t, warp = threads(WARPS)
    row = base + tl.minimum(at + g, width - 1).to(tl.int64)
    row2 = base + tl.minimum(at + g + 8, width - 1).to(tl.int64)
    for m_first in range(begin, end, 8 * N_TILES):
        m = m_first + 8 * tl.arange(0, N_TILES)[:, None] + g
        address = (inner + tl.minimum(m, end - 1).to(tl.int64) * COLUMNS + 4 * t).to(tl.int64)
        acc, _acc2 = tile_products(
            address, codes, high_bits, scales, super_scales, row, row2, row, row2, warp,
            COLUMNS, TYPE, WARPS, 1, False, False,
        )  # fmt: skip
        acc = over_warps(acc, N_TILES, WARPS)
        if WEIGHTED:
            c0, c1, c2, c3 = acc
            lane = tl.arange(0, 32)[None, :]
            to = m_first + 8 * tl.arange(0, N_TILES)[:, None] + lane % 4 * 2
            _store_share(shares, order, weights, c0, c2, to, end, at + lane // 4, width)
            _store_share(shares, order, weights, c1, c3, to + 1, end, at + lane // 4, width)
        else:
            store_tile(shares, acc, m_first, end, at, width, N_TILES)


@triton.jit
def _store_share(shares, order, weights, value, value2, m, end, n, width):
    pair = tl.load(order + m, m < end, other=0)
    weight = tl.load(weights + pair, m < end, other=0.0)
    p = shares + pair.to(tl.int64) * width + n
    tl.store(p, value * weight, (m < end) & (n < width))
    tl.store(p + 8, value2 * weight, (m < end) & (n + 8 < width))


@triton.jit(do_not_specialize=["rows", "pairs"])
def _down_groups_kernel(
    inner, order, starts, weights, shares, rows, pairs, width,
    codes, high_bits, scales, super_scales, s_codes, s_high_bits, s_scales, s_super_scales,
    SHARED: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, S_TYPE: tl.constexpr,
    N_TILES: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """shares: weight · (down inner) by pair, and behind the pairs what the shared expert gives, by row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert = tl.program_id(1) - SHARED
    at = tl.program_id(0) * 16
    if expert >= 0:
        begin, end = tl.load(starts + expert), tl.load(starts + expert + 1)
        _down_group(
            inner, order, weights, shares, begin, end, expert.to(tl.int64) * width, at, width,
            codes, high_bits, scales, super_scales, COLUMNS, TYPE, True, N_TILES, WARPS,
        )  # fmt: skip
    elif SHARED:
        _down_group(
            inner, order, weights, shares, pairs, pairs + rows, 0, at, width,
            s_codes, s_high_bits, s_scales, s_super_scales, COLUMNS, S_TYPE, False, N_TILES, WARPS,
        )  # fmt: skip


def grouped_shares(
    h: Tensor, order: Tensor, starts: Tensor, weights: Tensor, gate: Packed, up: Packed, down: Packed, width: int,
    shared: tuple[Packed, Packed, Packed] | None, n_tiles: int, config: TensorCoreConfig,
) -> Tensor:  # fmt: skip
    """weight · expert(h) for every pair, then shared(h) for every row if it is given: float32 [pairs (+ rows), hidden].

    An expert's weights are read for 8 · `n_tiles` pairs at a time.
    """
    rows, hidden = h.shape
    pairs, experts = order.shape[0], starts.shape[0] - 1
    s_gate, s_up, s_down = shared or (gate, up, down)
    extra = shared is not None
    inner = torch.empty(pairs + rows * extra, width, dtype=h.dtype, device=h.device)
    shares = torch.empty(pairs + rows * extra, hidden, dtype=torch.float32, device=h.device)
    common = {"SHARED": extra, "N_TILES": n_tiles, "num_stages": 1, **pdl_arguments(h.device)}
    _up_groups_kernel[(triton.cdiv(width, 16), experts + extra)](
        h, order, starts, inner, rows, pairs, width,
        *planes(gate), *planes(up), *planes(s_gate), *planes(s_up),
        USED=weights.shape[1], COLUMNS=hidden, TYPE=gate.type, S_TYPE=s_gate.type, WARPS=config.up_warps,
        num_warps=config.up_warps, **common,
    )  # fmt: skip
    _down_groups_kernel[(triton.cdiv(hidden, 16), experts + extra)](
        inner, order, starts, weights, shares, rows, pairs, hidden, *planes(down), *planes(s_down),
        COLUMNS=width, TYPE=down.type, S_TYPE=s_down.type, WARPS=config.down_warps,
        num_warps=config.down_warps, **common,
    )  # fmt: skip
    return shares


def planes(weight: Packed) -> Planes:
    assert weight.super_scales is not None, f"{weight.type} has super_scales"
    return (
        weight.codes,
        weight.codes if weight.high_bits is None else weight.high_bits,
        weight.scales,
        weight.super_scales,
    )

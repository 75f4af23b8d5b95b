"""Routed experts in NVIDIA's tensor cores for tens to thousands of rows; `matmul.stream_k` has loads and products.

The warps of a program stand along the outputs of one expert and read the same x at about the same time, so that it
comes to the L1 once. A warp has all columns of TILES tiles: 16 outputs of down, or 8 of gate and the same 8 of up. It
takes 8 · N_TILES pairs of the expert at a time, so that weights are expanded once for all of them.

x lies in planes whose rows are those of h, or the pairs:
    values  bfloat16 [rows, blocks, 4, 8]     number 16·s + 4·t + k of a block at 8·t + 4·s + k: one piece a thread
    sums    bfloat16 [rows, blocks / 2, 2, 2]  −128 · Σ x of two blocks side by side, then the same for what rounding
                                               took off: 16 bits of each

A code q enters as 128 + q. What that adds to a product, and the minima of the types that have them, are one number for
a row of weights and a block, times Σ x: also a product, of 8 blocks with as many sums, for the tensor core. The numbers
are in two parts, as the sums are, one behind the other along its 16 columns.
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
from rekindle.kernels.matmul.fragments import load_piece
from rekindle.kernels.matmul.mma import expanded_pairs, factors, scales_at
from rekindle.kernels.matmul.packing import BLOCK
from rekindle.kernels.matmul.ptx import in_two_parts, load_one, load_two, mma, store_half, store_word, threads
from rekindle.kernels.matmul.stream_k import block_products, hold, load_step, moved_on, planes_at
from rekindle.kernels.matmul.tiles import bits_of, has_minimum
from rekindle.kernels.matmul.types import Packed
from rekindle.kernels.moe.grouping import looked_at, place_pairs
from rekindle.kernels.moe.tensor_core import planes

Three = tuple[Packed, Packed, Packed]

FEW_PAIRS, SOME_PAIRS = 4.5, 14.0  # of an expert: up to these one n-tile at once is enough for most, or two
LAID = tl.constexpr(64)  # blocks of x that a program lays out


class AlongConfig(NamedTuple):
    """Warps of a program; tiles of 16 outputs of a warp, 1 or 2, for codes of 4 bits (longer ones have 1); n-tiles (of
    eight pairs) that it multiplies at once, at most; programs that share the pairs of an expert; registers that a
    thread may take for codes of 4 bits, and for longer ones."""

    warps: int
    tiles: int
    n_tiles: int
    spread: int
    registers: int
    long_registers: int

    def of(self, type: str) -> tuple[int, dict[str, int]]:
        """Tiles of a warp, and the arguments of a launch."""
        short = bits_of(type) == 4
        tiles, registers = (self.tiles, self.registers) if short else (1, self.long_registers)
        return tiles, {
            "N_TILES": self.n_tiles, "TILES": tiles, "SPREAD": self.spread, "WARPS": self.warps,
            "num_warps": self.warps, "num_stages": 1, "maxnreg": registers,
        }  # fmt: skip


def along_config(pairs_per_expert: float) -> AlongConfig:
    """The fastest of those timed on an H200 (docs/LOG.md)."""
    if pairs_per_expert <= FEW_PAIRS:
        return AlongConfig(4, 2, 1, 2, 128, 128)
    if pairs_per_expert <= SOME_PAIRS:
        return AlongConfig(4, 2, 2, 2, 168, 128)
    return AlongConfig(4, 2, 4, 2, 255, 168)


# ---- x in the order of registers -----------------------------------------------------------------------------------


@triton.jit
def _half_sum(word):
    """The two bfloat16 numbers of 32 bits added up."""
    low = (word << 16).to(tl.float32, bitcast=True)
    return low + (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _lay_out(x, values, sums, number, blocks):
    """LAID blocks of x, counted over all rows; x and values as words of four numbers."""
    block = number * LAID + tl.arange(0, LAID)
    here = (block < blocks)[:, None]
    word = tl.arange(0, 8)[None, :]
    first = block.to(tl.int64)[:, None] * 8
    four = tl.load(x + first + word, here, other=0)
    tl.store(values + first + word % 4 * 2 + word // 4, four, here)
    total = tl.sum(_half_sum(four.to(tl.int32)) + _half_sum((four >> 32).to(tl.int32)), 1)
    store_sums(sums, total, block, block < blocks)


@triton.jit
def store_sums(sums, total, block, live):
    """Of the blocks with these numbers, counted over all rows."""
    total *= -128.0
    nearest = total.to(tl.bfloat16)
    to = sums + block.to(tl.int64) // 2 * 4 + block % 2
    tl.store(to, nearest, live)
    tl.store(to + 2, total - nearest.to(tl.float32), live)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _prepare_kernel(
    ids, order, starts, pairs, experts, x, values, sums, blocks, B: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Pairs are sorted by expert, and x is laid out: neither waits for the other."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.program_id(0)
    if e <= experts:
        place_pairs(ids, order, starts, pairs, e, experts, B)
    else:
        _lay_out(x, values, sums, e - experts - 1, blocks)


def prepare(h: Tensor, ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """h laid out, its sums, the pairs sorted by expert and where each expert's begin (`grouping.group`)."""
    blocks, pairs = h.numel() // BLOCK, ids.numel()
    values, sums = torch.empty_like(h), torch.empty(blocks, 2, dtype=h.dtype, device=h.device)
    order = torch.empty(pairs, dtype=torch.int32, device=h.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=h.device)
    _prepare_kernel[(experts + 1 + triton.cdiv(blocks, LAID.value),)](
        ids, order, starts, pairs, experts, h.view(torch.int64), values.view(torch.int64), sums, blocks,
        B=looked_at(pairs), num_warps=4, **pdl_arguments(h.device),
    )  # fmt: skip
    return values, sums, order, starts


# ---- products ------------------------------------------------------------------------------------------------------
#
# The rows of a tile, g and g + 8 of its 16, are both of down, eight apart, or one of gate and the same one of up.


@triton.jit
def _rows_on(planes, rows: tl.constexpr, COLUMNS: tl.constexpr):
    """A constant distance, which the loads carry."""
    c, h, e, s = planes
    return c + rows * COLUMNS // 8, h + rows * COLUMNS // 32, e + rows * COLUMNS // 32, s + rows * COLUMNS // 256


@triton.jit
def _load_tiles(
    first, second, group, ahead: tl.constexpr,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, TILES: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """As `stream_k.load_step`, of one or two tiles."""
    end = tl.full([], COLUMNS // 128, tl.int32)
    tile = load_step(first, second, group, end, ahead, TYPE)
    if TILES == 1:
        return tile, tile
    else:
        first, second = _rows_on(first, APART, COLUMNS), _rows_on(second, APART, COLUMNS)
        return tile, load_step(first, second, group, end, ahead, TYPE)


@triton.jit
def _block_products(acc, tile, factor, factor2, b, i: tl.constexpr, TYPE: tl.constexpr):
    """As `stream_k.block_products`; of types with minima, what is left to `_offsets` is not in it."""
    if has_minimum(TYPE):
        first, second = tile
        c0, c1, c2, c3 = acc
        word: tl.constexpr = 4 + i // 2
        byte: tl.constexpr = 2 * (i % 2)
        p0, p1, p2, p3 = expanded_pairs(first[i], first[7], i, TYPE)
        q0, q1, q2, q3 = expanded_pairs(second[i], second[7], i, TYPE)
        a, _ = scales_at(first[word], byte, factor[0], factor[1], TYPE)
        a2, _ = scales_at(second[word], byte, factor2[0], factor2[1], TYPE)
        nought = tl.zeros(c0.shape, tl.float32)
        y0, y1, y2, y3 = mma(p0, q0, p1, q1, b[0], b[1], nought, nought, nought, nought)
        y0, y1, y2, y3 = mma(p2, q2, p3, q3, b[2], b[3], y0, y1, y2, y3)
        return c0 + a * y0, c1 + a * y1, c2 + a2 * y2, c3 + a2 * y3
    else:
        return block_products(acc, tile, factor, factor2, b, (b[0], b[1]), i, TYPE)


@triton.jit
def _group_products(acc, acc2, tile, tile2, x, TYPE: tl.constexpr, TILES: tl.constexpr):
    """acc, and acc2 where there are two tiles, += a group of them times x, without offsets."""
    f, f2 = factors(tile[0][6], TYPE), factors(tile[1][6], TYPE)
    f3, f4 = factors(tile2[0][6], TYPE), factors(tile2[1][6], TYPE)
    for i in tl.static_range(4):
        b = load_piece(x + 64 * i)
        acc = _block_products(acc, tile, f, f2, b, i, TYPE)
        if TILES == 2:
            acc2 = _block_products(acc2, tile2, f3, f4, b, i, TYPE)
    return acc, acc2


@triton.jit
def _offsets(word, super, TYPE: tl.constexpr):
    """What is taken off for the blocks 2 · t and 2 · t + 1 of a turn, whose scales are in the word, by way of
    −128 · Σ x: in two parts."""
    d, m = factors(super, TYPE)
    a, n = scales_at(word, 0, d, m, TYPE)
    a2, n2 = scales_at(word, 2, d, m, TYPE)
    return in_two_parts(a + n, a2 + n2)


@triton.jit
def _turn_offsets(acc, words, tile, z, TYPE: tl.constexpr):
    """acc += the offsets of a turn, two groups, times the sums z of x. words: of both rows, as `_offsets` has them."""
    upper, upper_rest = _offsets(words[0], tile[0][6], TYPE)
    lower, lower_rest = _offsets(words[1], tile[1][6], TYPE)
    c0, c1, c2, c3 = acc
    c0, c1, c2, c3 = mma(upper, lower, upper_rest, lower_rest, z[0], z[0], c0, c1, c2, c3)
    return mma(upper, lower, upper_rest, lower_rest, z[1], z[1], c0, c1, c2, c3)


@triton.jit
def _words_of(tile, tile2, t):
    """The scales of two groups are four words: word t of both rows."""
    upper = tl.where(t < 2, tl.where(t < 1, tile[0][4], tile[0][5]), tl.where(t < 3, tile2[0][4], tile2[0][5]))
    lower = tl.where(t < 2, tl.where(t < 1, tile[1][4], tile[1][5]), tl.where(t < 3, tile2[1][4], tile2[1][5]))
    return upper, lower


@triton.jit
def _products(
    x, row, rows,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, TILES: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """One or two tiles of outputs, APART rows apart, times the rows `row` (int64 [N_TILES, threads]) of x over all
    columns: twice four [N_TILES, threads]. The next group is on its way while this one is multiplied."""
    t = threads(row.shape[1] // 32)[1]
    values = (x[0] + row * COLUMNS + 8 * t).to(tl.int64)
    sums = (x[1] + row * (COLUMNS // 16) + 4 * t).to(tl.int64)
    first, second = rows
    nought = tl.zeros(row.shape, tl.float32)
    acc = (nought, nought, nought, nought)
    acc2 = acc
    tile, tile2 = _load_tiles(first, second, 0, 0, COLUMNS, TYPE, TILES, APART)
    other, other2 = _load_tiles(first, second, 0, 1, COLUMNS, TYPE, TILES, APART)
    hold(t)
    for group in range(0, COLUMNS // 128, 2):  # columns come in blocks of 256
        acc, acc2 = _group_products(acc, acc2, tile, tile2, values + group * 256, TYPE, TILES)
        words, words2 = _words_of(tile, other, t), _words_of(tile2, other2, t)
        tile, tile2 = _load_tiles(first, second, group, 2, COLUMNS, TYPE, TILES, APART)
        hold(t)
        acc, acc2 = _group_products(acc, acc2, other, other2, values + group * 256 + 256, TYPE, TILES)
        if has_minimum(TYPE):
            z = load_two(sums + group * 16)
            acc = _turn_offsets(acc, words, other, z, TYPE)
            if TILES == 2:
                acc2 = _turn_offsets(acc2, words2, other2, z, TYPE)
        other, other2 = _load_tiles(first, second, group, 3, COLUMNS, TYPE, TILES, APART)
        hold(t)
        first = moved_on(first, 2)
        second = moved_on(second, 2)
    return acc, acc2


# ---- experts -------------------------------------------------------------------------------------------------------
#
# The pairs of an expert are dealt in pieces of 8 · N_TILES to SPREAD programs, and what is left to fewer n-tiles; a
# program without pairs ends at once. `inner` holds the pairs in the order of `order` and, behind them, the rows that
# pass the shared expert, where it takes part: its pieces have a program each, and these begin first.


@triton.jit
def _share_of(starts, shared, rows, pairs, SPREAD: tl.constexpr, PIECE: tl.constexpr):
    """(expert, or -1 for the shared one; first pair; end of the pairs; distance of this program's pieces)."""
    number = tl.program_id(1)
    expert = tl.where(number < shared, -1, (number - shared) // SPREAD)
    known = tl.maximum(expert, 0)
    begin = tl.where(expert < 0, pairs + number * PIECE, tl.load(starts + known) + (number - shared) % SPREAD * PIECE)
    end = tl.where(expert < 0, pairs + rows, tl.load(starts + known + 1))
    return expert, begin, end, tl.where(expert < 0, shared, SPREAD) * PIECE


@triton.jit
def _up_piece(
    x, order, to, m_first, end, pairs, at, width, tile,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, USED: tl.constexpr, N_TILES: tl.constexpr, TILES: tl.constexpr,
    SUMMED: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """inner of up to 8 · N_TILES pairs from m_first on, for the outputs from `at` on."""
    g, t, warp = threads(WARPS)
    eight = m_first + 8 * tl.arange(0, N_TILES)[:, None]
    m = eight + 2 * t
    inner, inner_sums = to
    row = _row_of(order, eight + g, end, pairs, USED)
    acc, acc2 = _products(x, row, tile, COLUMNS, TYPE, TILES, 8)
    n = at + 8 * TILES * warp + g
    total, total2 = _store_gated(inner, acc, m, end, n, width)
    if TILES == 2:
        more, more2 = _store_gated(inner, acc2, m, end, n + 8, width)
        total += more
        total2 += more2
    if SUMMED:
        _sums_of_piece(inner_sums, total, m_first, end, at, width, 0, TILES, WARPS)
        _sums_of_piece(inner_sums, total2, m_first, end, at, width, 1, TILES, WARPS)


@triton.jit
def _store_gated(inner, acc, m, end, n, width):
    """silu(gate) · up of the pairs at m and m + 1, laid out as `values`; and those numbers."""
    y, y2 = _gated(acc[0], acc[2]).to(tl.bfloat16), _gated(acc[1], acc[3]).to(tl.bfloat16)
    to = inner + m.to(tl.int64) * width + (n // 32 * 32 + n % 16 // 4 * 8 + n % 32 // 16 * 4 + n % 4)
    store_half(to, y.to(tl.int16, bitcast=True).to(tl.int32), m < end)
    store_half(to + width, y2.to(tl.int16, bitcast=True).to(tl.int32), m + 1 < end)
    return y.to(tl.float32), y2.to(tl.float32)


@triton.jit
def _sums_of_piece(sums, y, m_first, end, at, width, which: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr):
    """Of the blocks that a program gives, whose outputs lie along g and 4 / TILES warps: y [N_TILES, threads]."""
    BLOCKS: tl.constexpr = TILES * WARPS // 4
    total = tl.sum(tl.reshape(y, (y.shape[0], BLOCKS, 32 // TILES, 4)), 2)
    eight, t = tl.arange(0, y.shape[0])[:, None, None], tl.arange(0, 4)[None, None, :]
    m = m_first + 8 * eight + 2 * t + which
    block = at // 32 + tl.arange(0, BLOCKS)[None, :, None]
    store_sums(sums, total, m.to(tl.int64) * (width // 32) + block, m < end)


@triton.jit
def _gated(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _row_of(order, m, end, pairs, USED: tl.constexpr):
    """The row of h that the pair at place m passes with; past the pairs the rows themselves."""
    m = tl.minimum(m, end - 1)
    row = load_one(order + tl.minimum(m, pairs - 1)) // USED
    return tl.where(m < pairs, row, m - pairs).to(tl.int64)


@shared_memory_carveout
@triton.jit(do_not_specialize=["rows", "pairs", "shared"])
def _up_along_kernel(
    values, sums, order, starts, inner, inner_sums, rows, pairs, shared, width,
    codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales, up_super_scales,
    s_codes, s_high_bits, s_scales, s_super_scales, s_up_codes, s_up_high_bits, s_up_scales, s_up_super_scales,
    USED: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, SUMMED: tl.constexpr,
    N_TILES: tl.constexpr, TILES: tl.constexpr, SPREAD: tl.constexpr,
    WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """silu(gate x) · (up x) of pairs of one expert for 8 · TILES · WARPS outputs. SUMMED: the sums
    of `inner` too, as down wants them."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert, begin, end, apart = _share_of(starts, shared, rows, pairs, SPREAD, 8 * N_TILES)
    g, t, warp = threads(WARPS)
    at = tl.program_id(0) * (8 * TILES * WARPS)
    row = tl.maximum(expert, 0) * width + at + 8 * TILES * warp + g
    if expert < 0:
        codes, high_bits, scales, super_scales = s_codes, s_high_bits, s_scales, s_super_scales
        up_codes, up_high_bits, up_scales, up_super_scales = s_up_codes, s_up_high_bits, s_up_scales, s_up_super_scales
    first = planes_at(codes, high_bits, scales, super_scales, row, 0, t, COLUMNS)
    second = planes_at(up_codes, up_high_bits, up_scales, up_super_scales, row, 0, t, COLUMNS)
    x, to, tile = (values, sums), (inner, inner_sums), (first, second)
    for m_first in range(begin, end, apart):
        left = end - m_first
        if N_TILES > 1 and left <= 8:
            _up_piece(x, order, to, m_first, end, pairs, at, width, tile, COLUMNS, TYPE, USED, 1, TILES, SUMMED, WARPS)
        elif N_TILES > 2 and left <= 16:
            _up_piece(x, order, to, m_first, end, pairs, at, width, tile, COLUMNS, TYPE, USED, 2, TILES, SUMMED, WARPS)
        elif N_TILES > 4 and left <= 32:
            _up_piece(x, order, to, m_first, end, pairs, at, width, tile, COLUMNS, TYPE, USED, 4, TILES, SUMMED, WARPS)
        else:
            _up_piece(
                x,
                order,
                to,
                m_first,
                end,
                pairs,
                at,
                width,
                tile,
                COLUMNS,
                TYPE,
                USED,
                N_TILES,
                TILES,
                SUMMED,
                WARPS,
            )


@triton.jit
def _down_piece(
    x, order, weights, shares, m_first, end, pairs, at, width, tile,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, N_TILES: tl.constexpr, TILES: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """weight · (down inner) of up to 8 · N_TILES pairs from m_first on, for the outputs from `at` on."""
    g, t, warp = threads(WARPS)
    eight = m_first + 8 * tl.arange(0, N_TILES)[:, None]
    row = tl.minimum(eight + g, end - 1).to(tl.int64)
    acc, acc2 = _products(x, row, tile, COLUMNS, TYPE, TILES, 16)
    n = at + 16 * TILES * warp + g
    _store_shares(shares, order, weights, acc, acc2, eight + 2 * t, end, pairs, n, width, 0, TILES)
    _store_shares(shares, order, weights, acc, acc2, eight + 2 * t, end, pairs, n, width, 1, TILES)


@triton.jit
def _store_shares(
    shares, order, weights, acc, acc2, m, end, pairs, n, width, which: tl.constexpr, TILES: tl.constexpr
):  # fmt: skip
    """Of one pair, the one at m or the next; the shared expert's have no weight here."""
    m += which
    here = m < end
    routed = m < pairs
    pair = load_one(order + tl.minimum(m, tl.minimum(end, pairs) - 1))
    weight = tl.where(routed, load_one(weights + pair).to(tl.float32, bitcast=True), 1.0)
    to = shares + tl.where(routed, pair, m).to(tl.int64) * width + n
    store_word(to, (acc[which] * weight).to(tl.int32, bitcast=True), here)
    store_word(to + 8, (acc[2 + which] * weight).to(tl.int32, bitcast=True), here)
    if TILES == 2:
        store_word(to + 16, (acc2[which] * weight).to(tl.int32, bitcast=True), here)
        store_word(to + 24, (acc2[2 + which] * weight).to(tl.int32, bitcast=True), here)


@shared_memory_carveout
@triton.jit(do_not_specialize=["rows", "pairs", "shared"])
def _down_along_kernel(
    inner, sums, order, starts, weights, shares, rows, pairs, shared, width,
    codes, high_bits, scales, super_scales, s_codes, s_high_bits, s_scales, s_super_scales,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr,
    N_TILES: tl.constexpr, TILES: tl.constexpr, SPREAD: tl.constexpr,
    WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """shares: weight · (down inner) by pair, and behind the pairs what the shared expert gives, by row; 16 ·
    TILES · WARPS outputs of pairs of one expert."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    expert, begin, end, apart = _share_of(starts, shared, rows, pairs, SPREAD, 8 * N_TILES)
    g, t, warp = threads(WARPS)
    at = tl.program_id(0) * (16 * TILES * WARPS)
    row = tl.maximum(expert, 0) * width + at + 16 * TILES * warp + g
    if expert < 0:
        codes, high_bits, scales, super_scales = s_codes, s_high_bits, s_scales, s_super_scales
    first = planes_at(codes, high_bits, scales, super_scales, row, 0, t, COLUMNS)
    second = _rows_on(first, 8, COLUMNS)
    x, tile = (inner, sums), (first, second)
    for m_first in range(begin, end, apart):
        left = end - m_first
        if N_TILES > 1 and left <= 8:
            _down_piece(x, order, weights, shares, m_first, end, pairs, at, width, tile, COLUMNS, TYPE, 1, TILES, WARPS)
        elif N_TILES > 2 and left <= 16:
            _down_piece(x, order, weights, shares, m_first, end, pairs, at, width, tile, COLUMNS, TYPE, 2, TILES, WARPS)
        elif N_TILES > 4 and left <= 32:
            _down_piece(x, order, weights, shares, m_first, end, pairs, at, width, tile, COLUMNS, TYPE, 4, TILES, WARPS)
        else:
            _down_piece(
                x,
                order,
                weights,
                shares,
                m_first,
                end,
                pairs,
                at,
                width,
                tile,
                COLUMNS,
                TYPE,
                N_TILES,
                TILES,
                WARPS,
            )


def grouped_shares(
    h: Tensor, ids: Tensor, weights: Tensor, gate: Packed, up: Packed, down: Packed, experts: int,
    shared: Three | None, config: AlongConfig,
) -> Tensor:  # fmt: skip
    """weight · expert(h) for every pair, then shared(h) for every row if it is given: float32 [pairs (+ rows), hidden].

    Of contiguous h [rows, hidden]; gate and up are of one type, and the shared expert is of the others' types.
    """
    (rows, hidden), pairs, width = h.shape, ids.numel(), gate.rows // experts
    extra = rows if shared is not None else 0
    s_gate, s_up, s_down = shared or (gate, up, down)
    pieces = triton.cdiv(extra, 8 * config.n_tiles)
    values, sums, order, starts = prepare(h, ids, experts)
    inner = torch.empty(pairs + extra, width, dtype=h.dtype, device=h.device)
    inner_sums = torch.empty(pairs + extra, width // BLOCK, 2, dtype=h.dtype, device=h.device)
    shares = torch.empty(pairs + extra, hidden, dtype=torch.float32, device=h.device)
    programs, launch = experts * config.spread + pieces, pdl_arguments(h.device)
    tiles, common = config.of(gate.type)
    _up_along_kernel[(width // (8 * tiles * config.warps), programs)](
        values, sums, order, starts, inner, inner_sums, rows, pairs, pieces, width,
        *planes(gate), *planes(up), *planes(s_gate), *planes(s_up),
        USED=ids.shape[1], COLUMNS=hidden, TYPE=gate.type, SUMMED=has_minimum(down.type), **common, **launch,
    )  # fmt: skip
    tiles, common = config.of(down.type)
    _down_along_kernel[(hidden // (16 * tiles * config.warps), programs)](
        inner, inner_sums, order, starts, weights, shares, rows, pairs, pieces, hidden, *planes(down), *planes(s_down),
        COLUMNS=width, TYPE=down.type, **common, **launch,
    )  # fmt: skip
    return shares

"""Routed experts in NVIDIA's integer tensor cores, where an expert has a few pairs: few instructions per weight.

Codes enter as bytes, three instructions for eight of them. A block of 32 values of x enters as integers of 16 bits
times the block's factor, which is finer than bfloat16 but for values below a hundredth of the block's largest; an
integer v is 256 · upper + lower, both a signed byte.

As for one row in `matmul.mma`, the eight columns of a matrix instruction hold the four blocks of a group, two columns
each: block i of x stands in columns 2 · i and 2 · i + 1 and the other blocks' is not there, so that one quad of
registers collects the sums of four blocks, block t in thread t. The two columns of a block are its upper and its lower
bytes; or, for types whose half blocks have scales of their own, its halves, and the bytes take two instructions.
A warp multiplies 16 rows of a matrix, or 8 of gate and the same 8 of up, by all columns of PAIRS rows of x.

x lies in two planes:
    values   int8 [rows, blocks, 2, 32]  upper, then lower bytes; number 16·s + 4·t + 2·u + h at 8·t + 4·u + 2·h + s
    entries  int32 [rows, blocks, 4]     the bits of the factor and of −Σ x; −32 · Σ v over either half
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
from rekindle.kernels.matmul.mma import scales_at, shifted
from rekindle.kernels.matmul.packing import BLOCK
from rekindle.kernels.matmul.ptx import load_one, load_two, threads, with_bits
from rekindle.kernels.matmul.tiles import bits_of, half_at, has_minimum
from rekindle.kernels.matmul.types import Packed
from rekindle.kernels.moe.grouping import looked_at
from rekindle.kernels.moe.tensor_core import planes

Three = tuple[Packed, Packed, Packed]

WARPS = 4  # of a program: with 8 outputs each they give a whole block for the next product
PAIRS = tl.constexpr(2)  # of a tile, at most 3
REGISTERS = 80, 96  # that a thread may take, for up and for down; left alone, the compiler puts loads off to save some
MOST = tl.constexpr(32512.0)  # 127 · 256: the upper byte of anything rounded up to it is at most 127


class Whole(NamedTuple):
    """Rows of x as integers."""

    values: Tensor
    entries: Tensor


# ---- instructions ------------------------------------------------------------------------------------------------


@triton.jit
def load_entry(address):
    """16 bytes as four registers."""
    return tl.inline_asm_elementwise(
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        [address],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,  # it must not move to before the launch that writes x is done
        pack=1,
    )


@triton.jit
def load_codes(address):
    """16 bytes of codes as four registers; they pass the first cache once."""
    return tl.inline_asm_elementwise(
        "ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        [address],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def load_fixed(address):
    """4 bytes of a weight, which no launch writes; the line around them comes to the second cache."""
    return tl.inline_asm_elementwise(
        "ld.global.nc.L2::128B.b32 $0, [$1];", "=r,l", [address], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def load_long(address):
    """8 bytes of a weight."""
    return tl.inline_asm_elementwise(
        "ld.global.nc.L2::128B.b64 $0, [$1];", "=l,l", [address], dtype=tl.int64, is_pure=True, pack=1
    )


@triton.jit
def load_scales(address):
    """16 bytes of scales as four registers."""
    return tl.inline_asm_elementwise(
        "ld.global.nc.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        [address],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def integer_mma(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """c + a · b for a [16, 32] of bytes and b [32, 8] of signed bytes, c in 32 bits."""
    return tl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
        [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


# ---- x as integers -----------------------------------------------------------------------------------------------


@triton.jit
def store_whole(x, values, entries, block):
    """x float32 [n, 32], the blocks with the numbers `block` int64 [n] of the planes."""
    highest = tl.max(tl.abs(x), 1)
    factor = highest / MOST
    v = x * tl.where(highest > 0.0, MOST / highest, 0.0)[:, None]
    v = ((v + 12582912.0) - 12582912.0).to(tl.int32)  # to the nearest: 1.5 · 2^23 leaves no fraction
    upper = (v + 128) >> 8
    n = tl.arange(0, 32)
    place = 8 * (n % 16 // 4) + 4 * (n // 2 % 2) + 2 * (n % 2) + n // 16
    to = values + block[:, None] * 64 + place[None, :]
    tl.store(to, upper.to(tl.int8))
    tl.store(to + 32, (v - upper * 256).to(tl.int8))
    first = tl.sum(tl.where((n < 16)[None, :], v, 0), 1)
    both = tl.sum(v, 1)
    entry = entries + block * 4
    tl.store(entry, factor.to(tl.int32, bitcast=True))
    tl.store(entry + 1, (both.to(tl.float32) * -factor).to(tl.int32, bitcast=True))
    tl.store(entry + 2, first * -32)
    tl.store(entry + 3, (both - first) * -32)


@triton.jit
def _whole_row(x, values, entries, number):
    """256 values of a row: the number counts such pieces, row by row."""
    b = number.to(tl.int64) * 8 + tl.arange(0, 8)
    here = tl.load(x + b[:, None] * 32 + tl.arange(0, 32)[None, :]).to(tl.float32)
    store_whole(here, values, entries, b)


@triton.jit
def place_tiles(ids, order, tiles, e, pairs, B: tl.constexpr):
    """Pairs of one expert, in their order, behind those of lower experts. A tile is PAIRS of them, or what is left: its
    first pair has 4 · e + how many it has, the others nought."""
    start = tl.zeros([], tl.int32)
    count = tl.zeros([], tl.int32)
    for at in range(0, pairs, B):
        o = at + tl.arange(0, B)
        id = tl.load(ids + o, o < pairs, other=2147483647)
        start += tl.sum((id < e).to(tl.int32), 0)
        count += tl.sum((id == e).to(tl.int32), 0)
    before = tl.zeros([], tl.int32)
    for at in range(0, pairs, B):
        o = at + tl.arange(0, B)
        mine = (tl.load(ids + o, o < pairs, other=-1) == e).to(tl.int32)
        k = before + tl.cumsum(mine, 0) - 1
        tl.store(order + start + k, o, mine == 1)
        tl.store(tiles + start + k, tl.where(k % PAIRS == 0, 4 * e + tl.minimum(count - k, PAIRS), 0), mine == 1)
        before += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["pairs"])
def _prepare_kernel(
    ids, order, tiles, pairs, experts, x, values, entries, B: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Pairs are sorted by expert, and x becomes whole: neither waits for the other."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    e = tl.program_id(0)
    if e < experts:
        place_tiles(ids, order, tiles, e, pairs, B)
    else:
        _whole_row(x, values, entries, e - experts)


def empty_whole(rows: int, columns: int, device: torch.device) -> Whole:
    """Columns are a multiple of 256, as those of every matrix of grouped planes."""
    blocks = columns // BLOCK
    return Whole(
        torch.empty(rows, blocks, 2, BLOCK, dtype=torch.int8, device=device),
        torch.empty(rows, blocks, 4, dtype=torch.int32, device=device),
    )


def prepare(h: Tensor, ids: Tensor, experts: int) -> tuple[Whole, Tensor, Tensor]:
    """h as integers, the pairs sorted by expert, and the tiles they form: both int32 [pairs]."""
    rows, columns = h.shape
    whole = empty_whole(rows, columns, h.device)
    order, tiles = (torch.empty(ids.numel(), dtype=torch.int32, device=h.device) for _ in range(2))
    _prepare_kernel[(experts + h.numel() // 256,)](
        ids, order, tiles, ids.numel(), experts, h, *whole,
        B=looked_at(ids.numel()), num_warps=4, **pdl_arguments(h.device),
    )  # fmt: skip
    return whole, order, tiles


# ---- products ----------------------------------------------------------------------------------------------------


@triton.jit
def code_bytes(word, high_bits, i: tl.constexpr, TYPE: tl.constexpr):
    """Block i's codes in a word: fields 0 and 2 of either half as bytes, then fields 1 and 3."""
    even = word & 0x0F0F0F0F
    odd = (word >> 4) & 0x0F0F0F0F
    if bits_of(TYPE) == 5:
        even = with_bits(even, shifted(high_bits, 4 * i - 4), 0x00100010)
        even = with_bits(even, shifted(high_bits, 4 * i - 10), 0x10001000)
        odd = with_bits(odd, shifted(high_bits, 4 * i - 3), 0x00100010)
        odd = with_bits(odd, shifted(high_bits, 4 * i - 9), 0x10001000)
    if bits_of(TYPE) == 6:
        half = (high_bits >> (32 * (i // 2))).to(tl.int32)
        right: tl.constexpr = 8 * (i % 2)
        even = with_bits(even, shifted(half, right - 4), 0x00300030)
        even = with_bits(even, shifted(half, right - 8), 0x30003000)
        odd = with_bits(odd, shifted(half, right - 2), 0x00300030)
        odd = with_bits(odd, shifted(half, right - 6), 0x30003000)
    return even, odd


@triton.jit
def both_factors(super, TYPE: tl.constexpr):
    """(of scales, of minima) from the entry of super_scales."""
    if has_minimum(TYPE):
        return half_at(super & 0xFFFF), half_at(super >> 16)
    else:
        d = super.to(tl.float32, bitcast=True)
        return d, d


@triton.jit
def both_scales(entry, super, TYPE: tl.constexpr):
    """(scale, minimum) of a block, or the scales of its halves."""
    d, m = both_factors(super, TYPE)
    return scales_at(entry, 0, d, m, TYPE)


@triton.jit
def group_sums(acc, first, second, values, entries, TYPE: tl.constexpr):
    """acc, for the rows `first` and `second` of a matrix, += a group's weights times x, block t in thread t.

    values: where the group's bytes of x begin; entries: that of block t; addresses [PAIRS, threads].
    """
    upper_acc, lower_acc = acc
    g, t, _ = threads(values.shape[1] // 32)
    nought = tl.zeros(values.shape, tl.int32)
    if has_minimum(TYPE):
        factor, total = load_two(entries)
        b0, b1 = load_two(values + 32 * g + 8 * t)
        y0, y1, y2, y3 = nought, nought, nought, nought
        for i in tl.static_range(4):
            p, q = code_bytes(first[i], first[6], i, TYPE)
            p2, q2 = code_bytes(second[i], second[6], i, TYPE)
            mine = g // 2 == i
            y0, y1, y2, y3 = integer_mma(
                p, p2, q, q2, tl.where(mine, b0, 0), tl.where(mine, b1, 0), y0, y1, y2, y3
            )  # fmt: skip
        factor = factor.to(tl.float32, bitcast=True)
        total = total.to(tl.float32, bitcast=True)
        a, n = both_scales(first[4], first[5], TYPE)
        a2, n2 = both_scales(second[4], second[5], TYPE)
        upper_acc = tl.fma(a * factor, (y0 * 256 + y1).to(tl.float32), tl.fma(n, total, upper_acc))
        lower_acc = tl.fma(a2 * factor, (y2 * 256 + y3).to(tl.float32), tl.fma(n2, total, lower_acc))
    else:
        factor, _, sum0, sum1 = load_entry(entries)
        b0, b1 = load_two(values + 64 * (g // 2) + 8 * t)
        c0, c1 = load_two(values + 64 * (g // 2) + 8 * t + 32)
        half = tl.where(g % 2 == 0, 0x00FF00FF, -0x00FF0100)  # 0xFF00FF00
        b0, b1, c0, c1 = b0 & half, b1 & half, c0 & half, c1 & half
        y0, y1, y2, y3 = nought, nought, nought, nought
        z0, z1, z2, z3 = sum0, sum1, sum0, sum1
        for i in tl.static_range(4):
            p, q = code_bytes(first[i], first[6], i, TYPE)
            p2, q2 = code_bytes(second[i], second[6], i, TYPE)
            mine = g // 2 == i
            y0, y1, y2, y3 = integer_mma(
                p, p2, q, q2, tl.where(mine, b0, 0), tl.where(mine, b1, 0), y0, y1, y2, y3
            )  # fmt: skip
            z0, z1, z2, z3 = integer_mma(
                p, p2, q, q2, tl.where(mine, c0, 0), tl.where(mine, c1, 0), z0, z1, z2, z3
            )  # fmt: skip
        factor = factor.to(tl.float32, bitcast=True)
        z0, z1, z2, z3 = _joined(y0, z0), _joined(y1, z1), _joined(y2, z2), _joined(y3, z3)
        a, n = both_scales(first[4], first[5], TYPE)
        a2, n2 = both_scales(second[4], second[5], TYPE)
        upper_acc = tl.fma(factor, tl.fma(a, z0, n * z1), upper_acc)
        lower_acc = tl.fma(factor, tl.fma(a2, z2, n2 * z3), lower_acc)
    return upper_acc, lower_acc


@triton.jit
def _joined(upper, lower):
    return (upper * 256 + lower).to(tl.float32)


@triton.jit
def row_addresses(planes, row, t, COLUMNS: tl.constexpr):
    """Where this thread's share of a row begins in every plane (int64 [1, threads], in bytes)."""
    codes, high_bits, scales, super_scales = planes
    block = row * (COLUMNS // 32)
    return (
        (codes + block * 4 + t * 4).to(tl.int64),
        (high_bits + block + t).to(tl.int64),
        (scales + block).to(tl.int64),
        (super_scales + row * (COLUMNS // 256)).to(tl.int64),
    )


@triton.jit
def block_scales(at, group, t):
    """The scales of block t of two groups side by side: one load that takes all of them for two that pick."""
    e0, e1, e2, e3 = load_scales(at[2] + group * 8)
    right = 16 * (t % 2)
    return tl.where(t < 2, e0, e1) >> right, tl.where(t < 2, e2, e3) >> right


@triton.jit
def load_group(at, scales, super, group, TYPE: tl.constexpr):
    """4 words, the scales of block t, super_scales, upper bits of one row."""
    codes, high_bits, _, _ = at
    w0, w1, w2, w3 = load_codes(codes + group * 64)
    h = w0
    if bits_of(TYPE) == 5:
        h = load_fixed(high_bits + group * 16)
    if bits_of(TYPE) == 6:
        h = load_long(high_bits + group * 32)
    return w0, w1, w2, w3, scales, super, h


@triton.jit
def row_sums(of_first, of_second, row, row2, values, entries, m, COLUMNS: tl.constexpr, TYPE: tl.constexpr):
    """Row `row` of one matrix and `row2` of another times the rows m [PAIRS, threads] of x: two [PAIRS, threads], to be
    added up over t."""
    _, t, _ = threads(row.shape[1] // 32)
    value = (values + m.to(tl.int64) * (2 * COLUMNS)).to(tl.int64)
    entry = (entries + m.to(tl.int64) * (COLUMNS // 8) + 4 * t).to(tl.int64)
    at = row_addresses(of_first, row, t, COLUMNS)
    at2 = row_addresses(of_second, row2, t, COLUMNS)
    nought = tl.zeros(value.shape, tl.float32)
    acc = (nought, nought)
    for group in range(0, COLUMNS // 128, 2):  # two groups share their entry of super_scales
        super, super2 = load_fixed(at[3] + group * 2), load_fixed(at2[3] + group * 2)
        e, f = block_scales(at, group, t)
        e2, f2 = block_scales(at2, group, t)
        first, second = load_group(at, e, super, group, TYPE), load_group(at2, e2, super2, group, TYPE)
        third, fourth = load_group(at, f, super, group + 1, TYPE), load_group(at2, f2, super2, group + 1, TYPE)
        acc = group_sums(acc, first, second, value + group * 256, entry + group * 64, TYPE)
        acc = group_sums(acc, third, fourth, value + group * 256 + 256, entry + group * 64 + 64, TYPE)
    return acc


@triton.jit
def over_quads(acc):
    """[PAIRS, threads] added up over t: [PAIRS, threads / 4]."""
    return tl.sum(tl.reshape(acc, (acc.shape[0], acc.shape[1] // 4, 4)), 2)


# ---- experts -----------------------------------------------------------------------------------------------------
#
# A program has one tile: PAIRS pairs of an expert, or what is left of its pairs, so that one with many pairs keeps no
# program longer than others; tiles that read the same weights run side by side. Programs whose place in the order of
# pairs begins no tile end at once. The planes between the products hold the pairs in that order and, behind them, the
# rows that pass the shared expert. Its programs stand first, PAIRS rows each.


@triton.jit
def _up_some(
    values, entries, source, inner, inner_entries, pair, base, at, width, of_gate, of_up,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """silu(gate x) · (up x) for a block of outputs of PAIRS pairs, as integers. source [PAIRS, threads]: their rows of
    x; pair [PAIRS]: where they go."""
    g, _, warp = threads(WARPS)
    row = base + (at + 8 * warp + g).to(tl.int64)
    gate, up = row_sums(of_gate, of_up, row, row, values, entries, source, COLUMNS, TYPE)
    gate, up = over_quads(gate), over_quads(up)
    store_whole(gate * tl.sigmoid(gate) * up, inner, inner_entries, pair.to(tl.int64) * (width // 32) + at // 32)


@shared_memory_carveout
@triton.jit(do_not_specialize=["rows", "pairs"])
def _up_kernel(
    values, entries, order, tiles, inner, inner_entries, rows, pairs, width,
    codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales, up_super_scales,
    s_codes, s_high_bits, s_scales, s_super_scales, s_up_codes, s_up_high_bits, s_up_scales, s_up_super_scales,
    USED: tl.constexpr, SHARED: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, S_TYPE: tl.constexpr,
    WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.program_id(1) - (tl.cdiv(rows, PAIRS) if SHARED else 0)
    at = tl.program_id(0) * (8 * WARPS)
    which = tl.arange(0, PAIRS)
    each = which[:, None] + 0 * threads(WARPS)[0]
    if first >= 0:
        tile = tl.load(tiles + first)
        # The rows are asked for beside the tile; a pair that is left over goes twice, with equal bytes.
        alone = load_one(order + first + 0 * each)
        source = load_one(order + tl.minimum(first + each, pairs - 1))
        source = tl.where(each < tile % 4, source, alone) // USED
        if tile > 0:
            _up_some(
                values, entries, source, inner, inner_entries, first + tl.minimum(which, tile % 4 - 1),
                (tile // 4).to(tl.int64) * width, at, width,
                (codes, high_bits, scales, super_scales), (up_codes, up_high_bits, up_scales, up_super_scales),
                COLUMNS, TYPE, WARPS,
            )  # fmt: skip
    elif SHARED:
        first = tl.program_id(1) * PAIRS
        _up_some(
            values, entries, tl.minimum(first + each, rows - 1), inner, inner_entries,
            pairs + tl.minimum(first + which, rows - 1), tl.zeros([], tl.int64), at, width,
            (s_codes, s_high_bits, s_scales, s_super_scales),
            (s_up_codes, s_up_high_bits, s_up_scales, s_up_super_scales),
            COLUMNS, S_TYPE, WARPS,
        )  # fmt: skip


@triton.jit
def _down_some(
    inner, inner_entries, m, pair, weight, here, shares, base, at, width, planes,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """weight · (down inner[m]) for 16 outputs per warp. m [PAIRS, threads]; pair, weight, here [PAIRS, 1]: where to,
    times what, and whether at all."""
    g, _, warp = threads(WARPS)
    row = base + (at + 16 * warp + g).to(tl.int64)
    n = at + (tl.arange(0, 8 * WARPS) // 8 * 16 + tl.arange(0, 8 * WARPS) % 8)[None, :]
    upper, lower = row_sums(planes, planes, row, row + 8, inner, inner_entries, m, COLUMNS, TYPE)
    to = shares + pair.to(tl.int64) * width + n
    tl.store(to, over_quads(upper) * weight, here & (n < width))
    tl.store(to + 8, over_quads(lower) * weight, here & (n < width))


@shared_memory_carveout
@triton.jit(do_not_specialize=["rows", "pairs"])
def _down_kernel(
    inner, inner_entries, order, tiles, weights, shares, rows, pairs, width,
    codes, high_bits, scales, super_scales, s_codes, s_high_bits, s_scales, s_super_scales,
    SHARED: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, S_TYPE: tl.constexpr,
    WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """shares: weight · (down inner) by pair, and behind the pairs what the shared expert gives, by row."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.program_id(1) - (tl.cdiv(rows, PAIRS) if SHARED else 0)
    at = tl.program_id(0) * (16 * WARPS)
    which = tl.arange(0, PAIRS)[:, None]
    each = which + 0 * threads(WARPS)[0]
    if first >= 0:
        tile = tl.load(tiles + first)
        pair = tl.load(order + first + which, first + which < pairs, other=0)
        weight = tl.load(weights + pair)
        if tile > 0:
            _down_some(
                inner, inner_entries, first + tl.minimum(each, tile % 4 - 1), pair, weight, which < tile % 4, shares,
                (tile // 4).to(tl.int64) * width, at, width, (codes, high_bits, scales, super_scales), COLUMNS, TYPE,
                WARPS,
            )  # fmt: skip
    elif SHARED:
        row = tl.program_id(1) * PAIRS + which
        _down_some(
            inner, inner_entries, pairs + tl.minimum(row + 0 * each, rows - 1), pairs + row, 1.0, row < rows, shares,
            tl.zeros([], tl.int64), at, width, (s_codes, s_high_bits, s_scales, s_super_scales), COLUMNS, S_TYPE, WARPS,
        )  # fmt: skip


def run_experts(
    h: Tensor, ids: Tensor, weights: Tensor, gate: Packed, up: Packed, down: Packed, experts: int, shared: Three | None
) -> Tensor:
    """weight · expert(h) for every pair, then shared(h) for every row if it is given: float32 [pairs (+ rows), hidden].

    Of contiguous h [rows, hidden]; gate and up are of one type, and so are the shared expert's.
    """
    (rows, hidden), pairs, width = h.shape, ids.numel(), gate.rows // experts
    extra = shared is not None
    s_gate, s_up, s_down = shared or (gate, up, down)
    x, order, tiles = prepare(h, ids, experts)
    programs = pairs + extra * triton.cdiv(rows, PAIRS.value)
    common = {"SHARED": extra, "WARPS": WARPS, "num_warps": WARPS, "num_stages": 1, **pdl_arguments(h.device)}
    inner = empty_whole(pairs + rows * extra, width, h.device)
    _up_kernel[(width // (8 * WARPS), programs)](
        *x, order, tiles, *inner, rows, pairs, width, *planes(gate), *planes(up), *planes(s_gate), *planes(s_up),
        USED=ids.shape[1], COLUMNS=hidden, TYPE=gate.type, S_TYPE=s_gate.type, maxnreg=REGISTERS[0], **common,
    )  # fmt: skip
    shares = torch.empty(pairs + rows * extra, hidden, dtype=torch.float32, device=h.device)
    _down_kernel[(hidden // (16 * WARPS), programs)](
        *inner, order, tiles, weights, shares, rows, pairs, hidden, *planes(down), *planes(s_down),
        COLUMNS=width, TYPE=down.type, S_TYPE=s_down.type, maxnreg=REGISTERS[1], **common,
    )  # fmt: skip
    return shares

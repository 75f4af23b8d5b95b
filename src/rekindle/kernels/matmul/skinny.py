"""Skinny products: two to SKINNY_ROWS rows through grouped planes in NVIDIA's tensor cores, as `gemv` does one.

A matrix instruction takes eight rows of x for the price of one, so what these rows cost beside the weights is x. It
comes from the L1: all programs of a multiprocessor read the same rows, as they lie, or, where the launch runs long
enough to pay for another one before it, in the order of mma's registers. A warp may have two tiles (16 rows of a
matrix, or of gate and of up), and then reads x once for both. No partial sums go to memory.

A step is two groups, which share an entry of `super_scales`: its loads are issued first and all together, before the
wait for the launch that writes x. The dependent launch is triggered when a program has its sums, as in `gemv`.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from rekindle.kernels.device import pdl_arguments, processors, shared_memory_carveout
from rekindle.kernels.matmul.fragments import load_piece, over_columns
from rekindle.kernels.matmul.gemv import hold, load_codes
from rekindle.kernels.matmul.mma import (
    block_sums,
    dense_products,
    expanded_pairs,
    factors,
    load_x,
    over_warps,
    scales_at,
    store_one,
    store_tile,
)
from rekindle.kernels.matmul.ordering import MOST_ROWS, ordered, tiles_of
from rekindle.kernels.matmul.ptx import load_two, mma, threads
from rekindle.kernels.matmul.stream_k import block_products, gated
from rekindle.kernels.matmul.tensor_core import (
    LARGE,
    LONG,
    WIDE,
    hand_over,
    line_up,
    outputs_of,
    planes_of,
    prefetch_slices,
    readable,
    rows_of_tiles,
    whole_tile,
)
from rekindle.kernels.matmul.tiles import bits_of, has_minimum
from rekindle.kernels.matmul.types import Packed

SKINNY_ROWS = 8  # of any launch, MOST_ROWS of a wide one; with more Stream-K is faster
AT_ONCE = 7  # programs of four warps on a multiprocessor, of Q4_K


class SkinnyConfig(NamedTuple):
    """Warps of a program: `down` along the outputs, which read the same x, times `across` along the columns.

    A warp has `tiles` (one or two) of 16 outputs; of gate and up it has one each, or its neighbour has the other.
    `ordered`: a launch of its own puts x in fragment order first. `parts` of the columns, with programs of their own.
    """

    down: int
    across: int
    tiles: int = 1
    ordered: bool = False
    parts: int = 1

    @property
    def warps(self) -> int:
        return self.down * self.across


# ---- products -----------------------------------------------------------------------------------------------------


@triton.jit
def load_eight_scales(p, live):
    """16 bytes at p as four registers, any bits where not live; the neighbours' bytes stay in the L1."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred go;
            setp.ne.b32 go, $5, 0;
            @go ld.global.v4.b32 {$0, $1, $2, $3}, [$4];
        }
        """,
        "=&r,=&r,=&r,=&r,l,r",
        [p.to(tl.int64), live],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def small_bytes(word, k: tl.constexpr):
    """Bytes k and k + 2 of the word, less than 128, as two bfloat16 numbers."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 lifted;
            prmt.b32 lifted, $1, 0x43434343, $2;
            fma.rn.bf16x2 $0, lifted, $3, $4;
        }
        """,
        "=r,r,r,r,r",
        [word, 0x4240 + 0x0101 * k, 0x3F803F80, -0x3CFF3D00],  # 1 and -128, twice
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def signed_bytes(word, half):
    """The two signed bytes of a half of the word as bfloat16 numbers: 128 + what is left of the sign bit, less 128 or,
    where that bit is set, 256."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 lifted, low, sign;
            prmt.b32 lifted, $1, 0x43434343, $2;
            and.b32 low, lifted, 0xFF7FFF7F;
            and.b32 sign, lifted, 0xFF80FF80;
            fma.rn.bf16x2 $0, sign, $3, low;
        }
        """,
        "=r,r,r,r",
        [word, 0x4140 + 0x0202 * half, -0x407F4080],  # -1, twice
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def load_row(c, h, e, s, live, FULL: tl.constexpr, TYPE: tl.constexpr):
    """What this thread needs of one row for two groups, each as `mma.load_group` gives it."""
    go = 1 if FULL else live.to(tl.int32)
    w0, w1, w2, w3 = load_codes(c, go)
    v0, v1, v2, v3 = load_codes(c + 16, go)
    e0, e1, e2, e3 = load_eight_scales(e, go)
    super = tl.load(s) if FULL else tl.load(s, live, other=0)
    if bits_of(TYPE) > 4:
        upper = tl.load(h) if FULL else tl.load(h, live, other=0)
        upper2 = tl.load(h + 4) if FULL else tl.load(h + 4, live, other=0)
    else:
        upper, upper2 = w0, v0
    return (w0, w1, w2, w3, e0, e1, super, upper), (v0, v1, v2, v3, e2, e3, super, upper2)


@triton.jit
def load_tile(planes, live, COLUMNS: tl.constexpr, FULL: tl.constexpr, TYPE: tl.constexpr):
    """Two groups of a row, and of the one eight further: not so far that a load could not add it by itself."""
    c, h, e, s = planes
    first = load_row(c, h, e, s, live, FULL, TYPE)
    c2, h2, e2, s2 = c + COLUMNS, h + COLUMNS // 4, e + COLUMNS // 4, s + COLUMNS // 32
    return first, load_row(c2, h2, e2, s2, live, FULL, TYPE)


@triton.jit
def planes_at(codes, high_bits, scales, super_scales, row, pair, t, COLUMNS: tl.constexpr):
    """Where this thread finds what it needs of a row for a pair of groups."""
    block = row * (COLUMNS // 32) + pair * 8
    super_scales += row * (COLUMNS // 256) + pair
    return codes + block * 4 + t * 4, high_bits + block + t, scales + block, super_scales


@triton.jit
def moved_on(planes, pairs):
    c, h, e, s = planes
    return c + 32 * pairs, h + 8 * pairs, e + 8 * pairs, s + pairs


@triton.jit
def plain_products(acc, first, second, d, d2, b, i: tl.constexpr, TYPE: tl.constexpr):
    """acc += block i of the rows `first` and `second`, without minimum and still lifted, times x in the registers b."""
    c0, c1, c2, c3 = acc
    b0, b1, b2, b3 = b
    word: tl.constexpr = 4 + i // 2
    byte: tl.constexpr = 2 * (i % 2)
    p0, p1, p2, p3 = expanded_pairs(first[i], first[7], i, TYPE)
    q0, q1, q2, q3 = expanded_pairs(second[i], second[7], i, TYPE)
    a, n = scales_at(first[word], byte, d, d, TYPE)
    a2, n2 = scales_at(second[word], byte, d2, d2, TYPE)
    nought = tl.zeros(c0.shape, tl.float32)
    y0, y1, y2, y3 = mma(p0, q0, p1, q1, b0, b1, nought, nought, nought, nought)
    if has_minimum(TYPE):
        y0, y1, y2, y3 = mma(p2, q2, p3, q3, b2, b3, y0, y1, y2, y3)
    else:  # each half of the block has its own signed scale
        z0, z1, z2, z3 = mma(p2, q2, p3, q3, b2, b3, nought, nought, nought, nought)
        c0 += n * z0
        c1 += n * z1
        c2 += n2 * z2
        c3 += n2 * z3
    c0 += a * y0
    c1 += a * y1
    c2 += a2 * y2
    c3 += a2 * y3
    return c0, c1, c2, c3


@triton.jit
def offset_products(acc, row, row2, sums, t, TYPE: tl.constexpr):
    """acc += what eight blocks lack after `plain_products`: minima, and what the lift has added, times Σ x.

    A scale is an exact bfloat16 number, and a sum as good as two of them. So the tensor core multiplies the scales of
    both rows (and their minima) by the sums of all blocks, or of all halves, at once."""
    c0, c1, c2, c3 = acc
    e, e2 = row[0], row2[0]
    d, m = factors(e[6], TYPE)
    d2, m2 = factors(e2[6], TYPE)
    nought = tl.zeros(c0.shape, tl.float32)
    if has_minimum(TYPE):
        b0, b1 = load_two(sums)
        mine, mine2 = word_of(row, t), word_of(row2, t)
        k, k2 = small_bytes(mine, 0), small_bytes(mine2, 0)
        y0, y1, y2, y3 = mma(k, k2, k, k2, b0, b1, nought, nought, nought, nought)
        k, k2 = small_bytes(mine, 1), small_bytes(mine2, 1)
        z0, z1, z2, z3 = mma(k, k2, k, k2, b0, b1, nought, nought, nought, nought)
        c0 += m * z0
        c1 += m * z1
        c2 += m2 * z2
        c3 += m2 * z3
    else:
        b0, b1, b2, b3 = load_piece(sums)
        odd = t % 2
        k, k2 = signed_bytes(tl.where(t < 2, e[4], e[5]), odd), signed_bytes(tl.where(t < 2, e2[4], e2[5]), odd)
        e, e2 = row[1], row2[1]
        k3, k4 = signed_bytes(tl.where(t < 2, e[4], e[5]), odd), signed_bytes(tl.where(t < 2, e2[4], e2[5]), odd)
        y0, y1, y2, y3 = mma(k, k2, k3, k4, b0, b1, nought, nought, nought, nought)
        y0, y1, y2, y3 = mma(k, k2, k3, k4, b2, b3, y0, y1, y2, y3)
    c0 += d * y0
    c1 += d * y1
    c2 += d2 * y2
    c3 += d2 * y3
    return c0, c1, c2, c3


@triton.jit
def word_of(row, t):
    """The scales of blocks 2 · t and 2 · t + 1 of eight."""
    return tl.where(t < 2, tl.where(t == 0, row[0][4], row[0][5]), tl.where(t == 2, row[1][4], row[1][5]))


@triton.jit
def group_products(
    acc, acc2, tile, tile2, x, half: tl.constexpr, TYPE: tl.constexpr, TILES: tl.constexpr, ORDERED: tl.constexpr
):  # fmt: skip
    """acc, and acc2 where there are two tiles, += one group of a pair (`half` of it) times x."""
    N_TILES: tl.constexpr = x.shape[0]
    first, second = tile[0][half], tile[1][half]
    third, fourth = tile2[0][half], tile2[1][half]
    f1, f2 = factors(first[6], TYPE), factors(second[6], TYPE)
    f3, f4 = factors(third[6], TYPE), factors(fourth[6], TYPE)
    for i in tl.static_range(4):
        if ORDERED:
            b = load_piece(x + (4 * half + i) * (N_TILES * 512))
            acc = plain_products(acc, first, second, f1[0], f2[0], b, i, TYPE)
            if TILES == 2:
                acc2 = plain_products(acc2, third, fourth, f3[0], f4[0], b, i, TYPE)
        else:
            b = load_x(x + 256 * half, i)
            sums = block_sums(b, TYPE) if has_minimum(TYPE) else b  # else of no use
            acc = block_products(acc, (first, second), f1, f2, b, (sums[0], sums[1]), i, TYPE)
            if TILES == 2:
                acc2 = block_products(acc2, (third, fourth), f3, f4, b, (sums[0], sums[1]), i, TYPE)
    return acc, acc2


@triton.jit
def skinny_products(
    address, sums, planes, planes2, pair, part,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, TILES: tl.constexpr, ACROSS: tl.constexpr, PARTS: tl.constexpr,
    ORDERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The tile at `planes`, and that at `planes2`, where there are two, times x over the pairs of groups pair, pair +
    ACROSS, …, all of them or the `part`th of PARTS stretches: four [N_TILES, threads] for each. address, sums: those of
    the first pair, [N_TILES, threads].

    PDL: as in `gemv_products`.
    """
    N_TILES: tl.constexpr = address.shape[0]
    pairs: tl.constexpr = COLUMNS // 256
    FULL: tl.constexpr = pairs % ACROSS == 0  # no warp has a step past the end
    SIZE: tl.constexpr = N_TILES * 4096 if ORDERED else 512  # bytes of x of a pair, from this thread's first on
    nought = tl.zeros(address.shape, tl.float32)
    acc = (nought, nought, nought, nought)
    acc2 = acc
    t = threads(pair.shape[1] // 32)[1]
    SUMS: tl.constexpr = N_TILES * (256 if has_minimum(TYPE) else 512)
    steps: tl.constexpr = (pairs + ACROSS - 1) // ACROSS
    begin, end = 0, steps
    if PARTS > 1:
        begin, end = part * steps // PARTS, (part + 1) * steps // PARTS
        pair += begin * ACROSS
        planes, planes2 = moved_on(planes, begin * ACROSS), moved_on(planes2, begin * ACROSS)
    x, near = address + pair * SIZE, sums + pair * SUMS
    for _ in tl.range(begin, end, loop_unroll_factor=1):
        live = pair < pairs
        tile = load_tile(planes, live, COLUMNS, FULL, TYPE)
        tile2 = load_tile(planes2, live, COLUMNS, FULL, TYPE) if TILES == 2 else tile
        here = x if FULL else tl.where(live, x, address)
        there = near if FULL else tl.where(live, near, sums)
        if PDL:
            gdc_wait()
        else:
            here = hold(here)
        if ORDERED:
            acc = offset_products(acc, tile[0], tile[1], there, t, TYPE)
            if TILES == 2:
                acc2 = offset_products(acc2, tile2[0], tile2[1], there, t, TYPE)
        acc, acc2 = group_products(acc, acc2, tile, tile2, here, 0, TYPE, TILES, ORDERED)
        if N_TILES * TILES == 4:
            here = hold(here)  # all of x at once would take 32 registers more, and with them a third of the warps
        acc, acc2 = group_products(acc, acc2, tile, tile2, here, 1, TYPE, TILES, ORDERED)
        pair += ACROSS
        planes = moved_on(planes, ACROSS)
        if TILES == 2:
            planes2 = moved_on(planes2, ACROSS)
        x += SIZE * ACROSS
        near += SUMS * ACROSS
    return acc, acc2


@triton.jit
def addresses(
    x, x_stride, rows, values, sums, half_sums,
    TYPE: tl.constexpr, N_TILES: tl.constexpr, WARPS: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """Where this thread reads x, and its sums, for the first pair of groups: two [N_TILES, threads]."""
    g, t, _ = threads(WARPS)
    eight = tl.arange(0, N_TILES)[:, None]
    thread = 32 * eight + 4 * g + t
    if ORDERED:
        at = (values + 8 * thread).to(tl.int64)
        return at, ((sums + 4 * thread) if has_minimum(TYPE) else (half_sums + 8 * thread)).to(tl.int64)
    else:
        m = tl.minimum(8 * eight + g, rows - 1)
        at = (x + m.to(tl.int64) * x_stride + 4 * t).to(tl.int64)
        return at, at


@triton.jit
def store_quads(out, acc, rows, at, width):
    """Four [N_TILES, 32 · warps] into out [rows, width]; at [1, 32 · warps]: the first of a warp's 16 outputs."""
    lane = tl.arange(0, acc[0].shape[1])[None, :] % 32
    m = 8 * tl.arange(0, acc[0].shape[0])[:, None] + lane % 4 * 2
    n = at + lane // 4
    store_one(out, acc[0], m, rows, n, width)
    store_one(out, acc[1], m + 1, rows, n, width)
    store_one(out, acc[2], m, rows, n + 8, width)
    store_one(out, acc[3], m + 1, rows, n + 8, width)


@triton.jit
def silu_times(gate, up):
    return gate * tl.sigmoid(gate) * up


@triton.jit
def silu_times_quads(gate, up):
    """silu(gate) · up, where a thread holds both."""
    g0, g1, g2, g3 = gate
    u0, u1, u2, u3 = up
    return silu_times(g0, u0), silu_times(g1, u1), silu_times(g2, u2), silu_times(g3, u3)


# ---- launches -----------------------------------------------------------------------------------------------------


@triton.jit
def _segment(
    x, x_stride, rows, values, sums, half_sums, out, codes, high_bits, scales, super_scales, width, pid, prefetch,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, N_TILES: tl.constexpr, TILES: tl.constexpr, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, PARTS: tl.constexpr, ORDERED: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """16 · TILES · DOWN outputs of one matrix (16 of a dense one) for all rows of x."""
    WARPS: tl.constexpr = DOWN * ACROSS
    g, t, warp = threads(WARPS)
    at = pid * outputs_of(TYPE, TILES * DOWN)
    if TYPE == "dense":
        row, row2, _, _ = rows_of_tiles(at + g, width)
        m = 8 * tl.arange(0, N_TILES)[:, None] + g
        address = (x + tl.minimum(m, rows - 1).to(tl.int64) * x_stride + 8 * t).to(tl.int64)
        dense = dense_products(address, codes, row, row2, warp, COLUMNS, WARPS, PDL)
        hand_over(prefetch, PDL, PREFETCH, WARPS)
        store_tile(out, over_warps(dense, N_TILES, WARPS), 0, rows, at, width, N_TILES)
    else:
        address, sums_at = addresses(x, x_stride, rows, values, sums, half_sums, TYPE, N_TILES, WARPS, ORDERED)
        pair = warp // DOWN
        row = whole_tile(at + warp % DOWN * (16 * TILES), width)
        row2 = whole_tile(at + warp % DOWN * (16 * TILES) + 16, width)
        planes = planes_at(codes, high_bits, scales, super_scales, (row + g).to(tl.int64), pair, t, COLUMNS)
        planes2 = planes_at(codes, high_bits, scales, super_scales, (row2 + g).to(tl.int64), pair, t, COLUMNS)
        acc, acc2 = skinny_products(
            address, sums_at, planes, planes2, pair, tl.program_id(0),
            COLUMNS, TYPE, TILES, ACROSS, PARTS, ORDERED, PDL,
        )  # fmt: skip
        hand_over(prefetch, PDL, PREFETCH, WARPS)
        if PARTS > 1:
            out += tl.program_id(0).to(tl.int64) * rows * width
        first = at + tl.arange(0, 32 * DOWN)[None, :] // 32 * (16 * TILES)
        store_quads(out, over_columns(acc, N_TILES, DOWN, ACROSS), rows, whole_tile(first, width), width)
        if TILES == 2:
            store_quads(out, over_columns(acc2, N_TILES, DOWN, ACROSS), rows, whole_tile(first + 16, width), width)


@shared_memory_carveout
@triton.jit(do_not_specialize=["rows", "n0", "n1", "n2", "n3", "first"])
def _skinny_kernel(
    x, x_stride, rows, values, sums, half_sums,
    out0, codes0, high_bits0, scales0, super_scales0, width0,
    out1, codes1, high_bits1, scales1, super_scales1, width1,
    out2, codes2, high_bits2, scales2, super_scales2, width2,
    out3, codes3, high_bits3, scales3, super_scales3, width3,
    p0, n0, p1, n1, p2, n2, p3, n3, first,
    COLUMNS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr, TYPE3: tl.constexpr,
    N_TILES: tl.constexpr, TILES: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, PARTS: tl.constexpr,
    ORDERED: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Up to four matrices, their tiles numbered one after another; a program belongs to one of them. PARTS: of the
    columns of the only matrix, each with an output of its own."""
    prefetch = p0, n0, p1, n1, p2, n2, p3, n3, first
    pid = tl.program_id(1)
    end = tl.cdiv(width0, outputs_of(TYPE0, TILES * DOWN))
    if pid < end:
        _segment(
            x, x_stride, rows, values, sums, half_sums, out0, codes0, high_bits0, scales0, super_scales0, width0,
            pid, prefetch, COLUMNS, TYPE0, N_TILES, TILES, DOWN, ACROSS, PARTS, ORDERED, PDL, PREFETCH,
        )  # fmt: skip
    if TYPE1 != "none":
        pid -= end
        end = tl.cdiv(width1, outputs_of(TYPE1, TILES * DOWN))
        if (pid >= 0) & (pid < end):
            _segment(
                x, x_stride, rows, values, sums, half_sums, out1, codes1, high_bits1, scales1, super_scales1, width1,
                pid, prefetch, COLUMNS, TYPE1, N_TILES, TILES, DOWN, ACROSS, PARTS, ORDERED, PDL, PREFETCH,
            )  # fmt: skip
    if TYPE2 != "none":
        pid -= end
        end = tl.cdiv(width2, outputs_of(TYPE2, TILES * DOWN))
        if (pid >= 0) & (pid < end):
            _segment(
                x, x_stride, rows, values, sums, half_sums, out2, codes2, high_bits2, scales2, super_scales2, width2,
                pid, prefetch, COLUMNS, TYPE2, N_TILES, TILES, DOWN, ACROSS, PARTS, ORDERED, PDL, PREFETCH,
            )  # fmt: skip
    if TYPE3 != "none":
        pid -= end
        if pid >= 0:
            _segment(
                x, x_stride, rows, values, sums, half_sums, out3, codes3, high_bits3, scales3, super_scales3, width3,
                pid, prefetch, COLUMNS, TYPE3, N_TILES, TILES, DOWN, ACROSS, PARTS, ORDERED, PDL, PREFETCH,
            )  # fmt: skip


@shared_memory_carveout
@triton.jit(do_not_specialize=["rows", "n0", "n1", "n2", "n3", "first"])
def _gated_skinny_kernel(
    x, x_stride, rows, values, sums, half_sums, out, width,
    codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales, up_super_scales,
    p0, n0, p1, n1, p2, n2, p3, n3, first,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, N_TILES: tl.constexpr, TILES: tl.constexpr, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, ORDERED: tl.constexpr, PDL: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """silu(gate x) · (up x): a warp has the same 16 rows of both, or even warps those of gate and odd ones of up."""
    WARPS: tl.constexpr = DOWN * ACROSS
    BESIDE: tl.constexpr = DOWN * TILES // 2  # of 16 outputs in a program
    g, t, warp = threads(WARPS)
    at = tl.program_id(1) * (16 * BESIDE)
    address, sums_at = addresses(x, x_stride, rows, values, sums, half_sums, TYPE, N_TILES, WARPS, ORDERED)
    pair = warp // DOWN
    row = (whole_tile(at + warp % DOWN * TILES // 2 * 16, width) + g).to(tl.int64)
    first_of = whole_tile(at + tl.arange(0, 32 * BESIDE)[None, :] // 32 * 16, width)
    if TILES == 1:
        is_up = warp % 2 == 1
        codes = tl.where(is_up, up_codes, codes)
        high_bits = tl.where(is_up, up_high_bits, high_bits)
        scales = tl.where(is_up, up_scales, scales)
        super_scales = tl.where(is_up, up_super_scales, super_scales)
    planes = planes_at(codes, high_bits, scales, super_scales, row, pair, t, COLUMNS)
    planes2 = planes_at(up_codes, up_high_bits, up_scales, up_super_scales, row, pair, t, COLUMNS)
    acc, acc2 = skinny_products(
        address, sums_at, planes, planes2, pair, 0, COLUMNS, TYPE, TILES, ACROSS, 1, ORDERED, PDL
    )  # fmt: skip
    hand_over((p0, n0, p1, n1, p2, n2, p3, n3, first), PDL, PREFETCH, WARPS)
    gate = over_columns(acc, N_TILES, DOWN, ACROSS)
    if TILES == 1:
        store_quads(out, gated(gate, N_TILES, BESIDE), rows, first_of, width)
    else:
        up = over_columns(acc2, N_TILES, DOWN, ACROSS)
        store_quads(out, silu_times_quads(gate, up), rows, first_of, width)


def pays(rows: int, width: int) -> bool:
    """Whether rows through a launch of `width` outputs are faster so than as Stream-K."""
    return rows <= SKINNY_ROWS or (rows <= MOST_ROWS and width >= WIDE)


def skinny_config(
    rows: int, width: int, columns: int, device: torch.device, paired: bool = False, six_bits: bool = False
) -> SkinnyConfig:
    """For a launch of `width` outputs (of gate alone, where they are paired). `six_bits`: one of the matrices is Q6_K.
    The fastest of those timed on an H200, or near it (docs/LOG.md): x in order where the launch runs long enough to pay
    for that; two tiles a warp where programs of one do not all fit the card, or where x of 16 rows is read."""
    most = 1 << (columns // 256).bit_length() - 1  # no warp without two groups of its own
    long = (1 + paired) * width * columns >= LARGE
    if rows > SKINNY_ROWS:
        return SkinnyConfig(1, min(2, most), tiles=2 if long or paired or not six_bits else 1, ordered=True)
    if paired:
        two = long and not six_bits
        return SkinnyConfig(1 if two else 2, min(4, most), tiles=2 if two else 1, ordered=long)
    if width < WIDE:
        return SkinnyConfig(1, min(4, most), ordered=long)
    if six_bits:
        return SkinnyConfig(1, min(2, most), ordered=True)
    two = width > 16 * AT_ONCE * processors(device)
    return SkinnyConfig(1, min(4, most), tiles=2 if two else 1, ordered=True)


def parts_config(weight: Packed) -> SkinnyConfig | None:
    """For a long and narrow matrix, whose sums are left in two parts: twice as many programs lie evenly."""
    if weight.rows >= WIDE or weight.columns < LONG:
        return None
    return SkinnyConfig(1, 4, ordered=weight.rows * weight.columns >= LARGE, parts=2)


def multiply(
    x: Tensor,
    weights: Sequence[Packed | Tensor],
    config: SkinnyConfig | None = None,
    prefetch: Packed | None = None,
) -> list[Tensor]:
    """As `tensor_core.multiply`, for several rows. With parts the only output is [parts, rows, out] in float32."""
    rows, columns = x.shape
    x, line = readable(x), line_up(x, weights, 1 if config is None else config.parts)
    config = config or skinny_config(rows, sum(line.widths), columns, x.device, six_bits="Q6_K" in line.types)
    assert config.parts == 1 or len(weights) == 1, "parts are of one matrix"
    programs = line.tiles(True, 16) + line.tiles(False, 16 * config.tiles * config.down)
    _skinny_kernel[(config.parts, programs)](
        x, x.stride(0), rows, *_order(x, config), *line.arguments, *prefetch_slices(prefetch, programs, x), columns,
        *line.kinds, N_TILES=tiles_of(rows), TILES=config.tiles, PARTS=config.parts, **_arguments(x, config, prefetch),
    )  # fmt: skip
    return line.outs


def swiglu(
    x: Tensor, gate: Packed, up: Packed, config: SkinnyConfig | None = None, prefetch: Packed | None = None
) -> Tensor:
    """silu(gate x) · (up x); both matrices of one type."""
    rows, columns = x.shape
    config = config or skinny_config(rows, gate.rows, columns, x.device, paired=True, six_bits=gate.type == "Q6_K")
    assert config.tiles * config.down % 2 == 0, "gate and up are two tiles"
    x = readable(x)
    out = torch.empty(rows, gate.rows, dtype=x.dtype, device=x.device)
    programs = triton.cdiv(gate.rows, 8 * config.down * config.tiles)
    _gated_skinny_kernel[(1, programs)](
        x, x.stride(0), rows, *_order(x, config), out, gate.rows, *planes_of(gate), *planes_of(up),
        *prefetch_slices(prefetch, programs, x), columns, gate.type, N_TILES=tiles_of(rows),
        TILES=config.tiles, **_arguments(x, config, prefetch),
    )  # fmt: skip
    return out


def _order(x: Tensor, config: SkinnyConfig) -> tuple[Tensor, Tensor, Tensor]:
    """x in fragment order and its sums; x itself where it is read as it lies."""
    return ordered(x) if config.ordered else (x, x, x)


def _arguments(x: Tensor, config: SkinnyConfig, prefetch: Packed | None) -> dict[str, object]:
    pdl = pdl_arguments(x.device)
    return {
        "DOWN": config.down, "ACROSS": config.across, "ORDERED": config.ordered,
        "PREFETCH": pdl["PDL"] and prefetch is not None, "num_warps": config.warps, "num_stages": 1, **pdl,
    }  # fmt: skip

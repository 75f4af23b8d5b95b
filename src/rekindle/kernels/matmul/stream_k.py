"""Stream-K: two to FEW_ROWS rows through large grouped planes in NVIDIA's tensor cores, x in `fragments` order.

The warps of a program stand along the outputs, so that they read the same x. As many programs run as the card holds at
once, each with an equal share of the work, counted in units: a block of outputs by one group of columns. Where a share
ends inside a block its partial sums go to memory, and the last program of the block to finish adds them up in the order
of the columns: the same bits on every run.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels.device import pdl_arguments, processors, shared_memory_carveout
from rekindle.kernels.matmul.fragments import Fragments, load_piece, to_fragments
from rekindle.kernels.matmul.gemv import load_codes
from rekindle.kernels.matmul.mma import (
    dense_products,
    expanded_pairs,
    factors,
    over_warps,
    scales_at,
    store_one,
    store_tile,
)
from rekindle.kernels.matmul.ptx import mma, threads
from rekindle.kernels.matmul.tensor_core import line_up, planes_of, readable
from rekindle.kernels.matmul.tile_semaphores import is_last_program, semaphores
from rekindle.kernels.matmul.tiles import bits_of, has_minimum
from rekindle.kernels.matmul.types import Packed

REGISTERS = 65536  # of a multiprocessor
LEAST_ROWS = 2
LEAST = 7 << 22  # values of a launch: a small one has no time to share


class StreamKShape(NamedTuple):
    """Warps of a program, and programs that a multiprocessor holds."""

    warps: int
    resident: int

    @property
    def registers(self) -> int:
        """Of a thread, at most."""
        return min(255, REGISTERS // (32 * self.warps * self.resident) // 8 * 8)


def pays(rows: int, values: int) -> bool:
    """Whether a launch over matrices of `values` values is faster as Stream-K."""
    return rows >= LEAST_ROWS and values >= LEAST


# By n-tiles, each of eight rows of x: the fastest of those timed on an H200 (docs/LOG.md).
BY_TILES = {1: StreamKShape(4, 4), 2: StreamKShape(8, 2), 4: StreamKShape(4, 3)}


# ---- loads --------------------------------------------------------------------------------------------------------
#
# Those of weights are plain, none of them pure, and stand before `hold`: ptxas would defer them until they are used.


@triton.jit
def hold(t):
    """A barrier: ptxas issues the loads that stand before it. Callers ignore the result."""
    return tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [t], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def load_pair(p, live):
    """8 bytes at p as two registers, any bits where not live."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred go;
            setp.ne.b32 go, $3, 0;
            @go ld.global.v2.b32 {$0, $1}, [$2];
        }
        """,
        "=&r,=&r,l,r",
        [p.to(tl.int64), live],
        dtype=(tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_or_nought(p, live):
    """4 bytes at p as a register, zero where not live."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred go;
            setp.ne.b32 go, $2, 0;
            mov.b32 $0, 0;
            @go ld.global.b32 $0, [$1];
        }
        """,
        "=&r,l,r",
        [p.to(tl.int64), live],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_sums(address):
    """8 bytes as two numbers."""
    return tl.inline_asm_elementwise(
        "ld.global.v2.b32 {$0, $1}, [$2];",
        "=f,=f,l",
        [address],
        dtype=(tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def planes_at(codes, high_bits, scales, super_scales, row, group, t, COLUMNS: tl.constexpr):
    """Where this thread finds its words, upper bits and scales of a row's group, and the row's super scales.
    32-bit offsets are enough, since no matrix has 2^31 words of codes."""
    block = row * (COLUMNS // 32) + group * 4
    return codes + (block * 4 + t * 4), high_bits + (block + t), scales + block, super_scales + row * (COLUMNS // 256)


@triton.jit
def moved_on(planes, groups: tl.constexpr):
    c, h, e, s = planes
    return c + 16 * groups, h + 4 * groups, e + 4 * groups, s


@triton.jit
def load_row(planes, group, live, TYPE: tl.constexpr):
    """As `mma.load_group`, from `planes_at` this group."""
    c, h, e, s = planes
    super = load_or_nought(s + group // 2, live)
    e0, e1 = load_pair(e, live)
    if bits_of(TYPE) == 5:
        upper = load_or_nought(h, live)
    if bits_of(TYPE) == 6:
        low, high_bits = load_pair(h, live)
        upper = low.to(tl.uint32, bitcast=True).to(tl.int64) | high_bits.to(tl.int64) << 32
    w0, w1, w2, w3 = load_codes(c, live)
    if bits_of(TYPE) == 4:
        upper = w0
    return w0, w1, w2, w3, e0, e1, super if has_minimum(TYPE) else super.to(tl.float32, bitcast=True), upper


@triton.jit
def load_step(first, second, group, end, ahead: tl.constexpr, TYPE: tl.constexpr):
    """The group `ahead` groups on, of both rows; from the end on its factors are zero."""
    group += ahead
    live = (group < end).to(tl.int32)
    return load_row(moved_on(first, ahead), group, live, TYPE), load_row(moved_on(second, ahead), group, live, TYPE)


# ---- products -----------------------------------------------------------------------------------------------------


@triton.jit
def lowered(pair):
    """160 off both bfloat16 numbers: the lift of a Q6_K code, and its zero."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [pair, 0x3F803F80, -0x3CDF3CE0],  # 1 and -160, twice; a plain addition is newer than the cards this is for
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def lowered_pairs(word, h, i: tl.constexpr, TYPE: tl.constexpr):
    """`expanded_pairs`, and the lift is taken off at once where no minimum is taken off later."""
    p0, p1, p2, p3 = expanded_pairs(word, h, i, TYPE)
    if has_minimum(TYPE):
        return p0, p1, p2, p3
    else:
        return lowered(p0), lowered(p1), lowered(p2), lowered(p3)


@triton.jit
def block_products(acc, step, factor, factor2, b, sums, i: tl.constexpr, TYPE: tl.constexpr):
    """acc += block i of a group's weights times x in the registers b. As `mma.block_products`, but the lift comes off
    together with the minimum: so `sums` is two registers, and not the four that a matrix instruction begins with."""
    first, second = step
    c0, c1, c2, c3 = acc
    b0, b1, b2, b3 = b
    word: tl.constexpr = 4 + i // 2
    byte: tl.constexpr = 2 * (i % 2)
    p0, p1, p2, p3 = lowered_pairs(first[i], first[7], i, TYPE)
    q0, q1, q2, q3 = lowered_pairs(second[i], second[7], i, TYPE)
    a, n = scales_at(first[word], byte, factor[0], factor[1], TYPE)
    a2, n2 = scales_at(second[word], byte, factor2[0], factor2[1], TYPE)
    nought = tl.zeros(c0.shape, tl.float32)
    y0, y1, y2, y3 = mma(p0, q0, p1, q1, b0, b1, nought, nought, nought, nought)
    if has_minimum(TYPE):
        y0, y1, y2, y3 = mma(p2, q2, p3, q3, b2, b3, y0, y1, y2, y3)
        z0, z1 = sums
        z2, z3 = z0, z1
        n += a
        n2 += a2
    else:  # each half of the block has its own signed scale
        z0, z1, z2, z3 = mma(p2, q2, p3, q3, b2, b3, nought, nought, nought, nought)
    c0 += a * y0
    c1 += a * y1
    c2 += a2 * y2
    c3 += a2 * y3
    c0 += n * z0
    c1 += n * z1
    c2 += n2 * z2
    c3 += n2 * z3
    return c0, c1, c2, c3


@triton.jit
def step_products(acc, step, x, lifts, group, TYPE: tl.constexpr):
    """acc += a group's weights times x (x and lifts are addresses of group 0, [N_TILES, threads])."""
    N_TILES: tl.constexpr = x.shape[0]
    x += group * (N_TILES * 2048)
    lifts += group * (N_TILES * 256)
    factor, factor2 = factors(step[0][6], TYPE), factors(step[1][6], TYPE)
    for i in tl.static_range(4):
        b = load_piece(x + i * (N_TILES * 512))
        sums = load_sums(lifts + i * (N_TILES * 64)) if has_minimum(TYPE) else b  # else of no use
        acc = block_products(acc, step, factor, factor2, b, sums, i, TYPE)
    return acc


@triton.jit
def piece_products(
    x, lifts, codes, high_bits, scales, super_scales, row, row2, begin, end,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows `row` and `row2` of a matrix times x over the groups begin … end - 1: four [N_TILES, threads]. The
    next step is loaded while this one is multiplied.

    PDL: the launch that writes x may still run, so gdc_wait stands before x is read.
    """
    t = threads(row.shape[1] // 32)[1]
    nought = tl.zeros(x.shape, tl.float32)
    acc = (nought, nought, nought, nought)
    first = planes_at(codes, high_bits, scales, super_scales, row, begin, t, COLUMNS)
    second = planes_at(codes, high_bits, scales, super_scales, row2, begin, t, COLUMNS)
    step = load_step(first, second, begin, end, 0, TYPE)
    other = load_step(first, second, begin, end, 1, TYPE)
    if PDL:
        gdc_wait()
    hold(t)
    for group in range(begin, end, 2):
        acc = step_products(acc, step, x, lifts, group, TYPE)
        step = load_step(first, second, group, end, 2, TYPE)
        hold(t)
        if group + 1 < end:
            acc = step_products(acc, other, x, lifts, group + 1, TYPE)
        other = load_step(first, second, group, end, 3, TYPE)
        hold(t)
        first = moved_on(first, 2)
        second = moved_on(second, 2)
    return acc


@triton.jit
def gated(acc, N_TILES: tl.constexpr, PAIRS: tl.constexpr):
    """silu(gate) · up, where even warps hold gate and odd ones up: four [N_TILES, 32 · PAIRS]."""
    c0, c1, c2, c3 = acc
    quads = tl.join(tl.join(c0, c1), tl.join(c2, c3)).reshape(N_TILES, PAIRS, 2, 128)
    gate, up = tl.split(tl.permute(quads, (0, 1, 3, 2)))
    upper, lower = tl.split((gate * tl.sigmoid(gate) * up).reshape(N_TILES, PAIRS * 32, 2, 2))
    c0, c1 = tl.split(upper)
    c2, c3 = tl.split(lower)
    return c0, c1, c2, c3


# ---- stream-k -----------------------------------------------------------------------------------------------------
#
# Program p of P has the units [p · units // P, (p + 1) · units // P). Of two places in `partials` a piece that begins
# where its block begins takes the second, any other piece the first: a program has at most one of each.


@triton.jit
def program_of_unit(unit, programs, units):
    """The program that has this unit."""
    return ((unit + 1) * programs - 1) // units


@triton.jit
def save(p, acc, SIZE: tl.constexpr):
    tl.store(p, acc[0])
    tl.store(p + SIZE, acc[1])
    tl.store(p + 2 * SIZE, acc[2])
    tl.store(p + 3 * SIZE, acc[3])


@triton.jit
def saved(p, SIZE: tl.constexpr):
    return (
        tl.load(p, cache_modifier=".cg"),
        tl.load(p + SIZE, cache_modifier=".cg"),
        tl.load(p + 2 * SIZE, cache_modifier=".cg"),
        tl.load(p + 3 * SIZE, cache_modifier=".cg"),
    )


@triton.jit
def added_up(partials, first, last, SIZE: tl.constexpr):
    """The pieces of programs first … last, in this order."""
    c0, c1, c2, c3 = saved(partials + (2 * first + 1) * (4 * SIZE), SIZE)
    for program in range(first + 1, last + 1):
        d0, d1, d2, d3 = saved(partials + 2 * program * (4 * SIZE), SIZE)
        c0 += d0
        c1 += d1
        c2 += d2
        c3 += d3
    return c0, c1, c2, c3


@triton.jit
def stream_k_matrix(
    values, lifts, rows, partials, semaphores, program, programs, units, before,
    out, codes, high_bits, scales, super_scales, width,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, GATED: tl.constexpr, N_TILES: tl.constexpr,
    WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """What this program has to do of one matrix, which comes after `before` units of others. GATED: planes of even
    warps are those of gate, of odd warps those of up, and two of them take the same outputs.

    PDL: a program triggers the dependent launch when it has its sums of the matrix in which its share begins; one
    without a share triggers it as it ends."""
    SIZE: tl.constexpr = N_TILES * 32 * WARPS
    TILES: tl.constexpr = WARPS // 2 if GATED else WARPS  # of 16 outputs in a block
    groups: tl.constexpr = COLUMNS // 128
    g, t, warp = threads(WARPS)
    eight = tl.arange(0, N_TILES)[:, None]
    x_at = (values + 8 * (32 * eight + 4 * g + t)).to(tl.int64)
    lifts_at = (lifts + 16 * eight + 4 * t).to(tl.int64)
    quads_at = partials + eight * (32 * WARPS) + tl.arange(0, 32 * WARPS)[None, :]
    place = tl.arange(0, 32 * TILES)[None, :]
    lo = tl.maximum(program * units // programs - before, 0)
    hi = tl.minimum((program + 1) * units // programs - before, tl.cdiv(width, 16 * TILES) * groups)
    stop = tl.where((hi > lo) & (program >= 0), tl.cdiv(hi, groups), lo // groups)
    for block in range(lo // groups, stop):
        begin = tl.maximum(lo - block * groups, 0)
        end = tl.minimum(hi - block * groups, groups)
        n = (block * TILES + warp // (WARPS // TILES)) * 16 + g
        c0, c1, c2, c3 = piece_products(
            x_at, lifts_at, codes, high_bits, scales, super_scales, tl.minimum(n, width - 1),
            tl.minimum(n + 8, width - 1),
            begin, end, COLUMNS, TYPE, PDL,
        )  # fmt: skip
        if PDL:  # noqa: SIM102  decided at compile time; the inner one on the device
            if block == stop - 1:
                gdc_launch_dependents()
        complete = (begin == 0) & (end == groups)
        if not complete:
            save(quads_at + (2 * program + (begin == 0).to(tl.int32)) * (4 * SIZE), (c0, c1, c2, c3), SIZE)
            first = program_of_unit(before + block * groups, programs, units)
            last = program_of_unit(before + (block + 1) * groups - 1, programs, units)
            complete = is_last_program(semaphores + before // groups + block, last - first + 1)
            if complete:
                c0, c1, c2, c3 = added_up(quads_at, first, last, SIZE)
        if complete:
            o = (block * TILES + place // 32) * 16 + place % 32 // 4
            if GATED:
                store_quads(out, gated((c0, c1, c2, c3), N_TILES, TILES), rows, o, width)
            else:
                store_quads(out, (c0, c1, c2, c3), rows, o, width)


@triton.jit
def store_quads(out, acc, rows, n, width):
    """Four [N_TILES, 32 · tiles] into out [rows, width]; n [1, 32 · tiles]: outputs of the first two."""
    m = 8 * tl.arange(0, acc[0].shape[0])[:, None] + tl.arange(0, acc[0].shape[1])[None, :] % 4 * 2
    store_one(out, acc[0], m, rows, n, width)
    store_one(out, acc[1], m + 1, rows, n, width)
    store_one(out, acc[2], m, rows, n + 8, width)
    store_one(out, acc[3], m + 1, rows, n + 8, width)


@triton.jit
def dense_tile(
    x, x_stride, rows, out, weight, width, tile,
    COLUMNS: tl.constexpr, N_TILES: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """16 outputs of a matrix of bfloat16 values, if it has them; all warps stand along the columns."""
    if (tile >= 0) & (tile < tl.cdiv(width, 16)):
        g, t, warp = threads(WARPS)
        m = 8 * tl.arange(0, N_TILES)[:, None] + g
        address = (x + tl.minimum(m, rows - 1).to(tl.int64) * x_stride + 8 * t).to(tl.int64)
        row = tl.minimum(tile * 16 + g, width - 1).to(tl.int64)
        row2 = tl.minimum(tile * 16 + g + 8, width - 1).to(tl.int64)
        acc = dense_products(address, weight, row, row2, warp, COLUMNS, WARPS, PDL)
        store_tile(out, over_warps(acc, N_TILES, WARPS), 0, rows, tile * 16, width, N_TILES)


# ---- launches -----------------------------------------------------------------------------------------------------


@triton.jit
def _segment(
    x, x_stride, values, lifts, rows, partials, semaphores, program, programs, units, before, tile,
    out, codes, high_bits, scales, super_scales, width,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, N_TILES: tl.constexpr, WARPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One of the matrices; returns units before the next one, and the tile counted from the next dense one."""
    if TYPE == "dense":
        dense_tile(x, x_stride, rows, out, codes, width, tile, COLUMNS, N_TILES, WARPS, PDL)
        return before, tile - tl.cdiv(width, 16)
    else:
        stream_k_matrix(
            values, lifts, rows, partials, semaphores, program, programs, units, before,
            out, codes, high_bits, scales, super_scales, width, COLUMNS, TYPE, False, N_TILES, WARPS, PDL,
        )  # fmt: skip
        return before + tl.cdiv(width, 16 * WARPS) * (COLUMNS // 128), tile


@shared_memory_carveout
@triton.jit(do_not_specialize=["rows", "dense", "units"])
def _stream_k_kernel(
    x, x_stride, values, lifts, rows, partials, semaphores, dense, units,
    out0, codes0, high_bits0, scales0, super_scales0, width0,
    out1, codes1, high_bits1, scales1, super_scales1, width1,
    out2, codes2, high_bits2, scales2, super_scales2, width2,
    out3, codes3, high_bits3, scales3, super_scales3, width3,
    COLUMNS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr, TYPE3: tl.constexpr,
    N_TILES: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to four matrices, their units numbered one after another. The first `dense` programs take 16
    outputs of a dense one each, the others share the quantised ones."""
    tile = tl.program_id(0)
    program = tile - dense
    programs = tl.num_programs(0) - dense
    before, tile = _segment(
        x, x_stride, values, lifts, rows, partials, semaphores, program, programs, units, 0, tile,
        out0, codes0, high_bits0, scales0, super_scales0, width0, COLUMNS, TYPE0, N_TILES, WARPS, PDL,
    )  # fmt: skip
    if TYPE1 != "none":
        before, tile = _segment(
            x, x_stride, values, lifts, rows, partials, semaphores, program, programs, units, before,
            tile, out1, codes1, high_bits1, scales1, super_scales1, width1,
            COLUMNS, TYPE1, N_TILES, WARPS, PDL,
        )  # fmt: skip
    if TYPE2 != "none":
        before, tile = _segment(
            x, x_stride, values, lifts, rows, partials, semaphores, program, programs, units, before,
            tile, out2, codes2, high_bits2, scales2, super_scales2, width2,
            COLUMNS, TYPE2, N_TILES, WARPS, PDL,
        )  # fmt: skip
    if TYPE3 != "none":
        before, tile = _segment(
            x, x_stride, values, lifts, rows, partials, semaphores, program, programs, units, before,
            tile, out3, codes3, high_bits3, scales3, super_scales3, width3,
            COLUMNS, TYPE3, N_TILES, WARPS, PDL,
        )  # fmt: skip


@shared_memory_carveout
@triton.jit(do_not_specialize=["rows", "units"])
def _gated_stream_k_kernel(
    values, lifts, rows, partials, semaphores, units, out, width,
    codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales, up_super_scales,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, N_TILES: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """silu(gate x) · (up x): even warps take gate, odd ones up."""
    is_up = threads(WARPS)[2] % 2 == 1
    stream_k_matrix(
        values, lifts, rows, partials, semaphores, tl.program_id(0), tl.num_programs(0), units, 0,
        out, tl.where(is_up, up_codes, codes), tl.where(is_up, up_high_bits, high_bits),
        tl.where(is_up, up_scales, scales),
        tl.where(is_up, up_super_scales, super_scales), width,
        COLUMNS, TYPE, True, N_TILES, WARPS, PDL,
    )  # fmt: skip


def shape_for(fragments: Fragments) -> StreamKShape:
    return BY_TILES[fragments.n_tiles]


def multiply(x: Tensor, weights: Sequence[Packed | Tensor], shape: StreamKShape | None = None) -> list[Tensor]:
    """x [rows, in] through up to SEGMENTS matrices in one launch.

    A tensor is a matrix of bfloat16 values.
    """
    rows, columns = x.shape
    x, line = readable(x), line_up(x, weights)
    fragments = to_fragments(x)
    shape = shape or shape_for(fragments)
    dense = line.tiles(True, 16)
    units = line.tiles(False, 16 * shape.warps) * (columns // 128)
    programs = _programs(units, shape, x.device, dense)
    _stream_k_kernel[(dense + programs,)](
        x, x.stride(0), fragments.values, fragments.lifts, rows,
        _partials(programs, fragments, shape), semaphores(x.device), dense, units, *line.arguments, columns,
        *line.kinds,
        N_TILES=fragments.n_tiles, WARPS=shape.warps,
        num_warps=shape.warps, num_stages=1, maxnreg=shape.registers, **pdl_arguments(x.device),
    )  # fmt: skip
    return line.outs


def swiglu(x: Tensor, gate: Packed, up: Packed, shape: StreamKShape | None = None) -> Tensor:
    """silu(gate x) · (up x); both matrices of one type."""
    rows, columns = x.shape
    fragments = to_fragments(readable(x))
    shape = shape or shape_for(fragments)
    out = torch.empty(rows, gate.rows, dtype=x.dtype, device=x.device)
    units = triton.cdiv(gate.rows, 8 * shape.warps) * (columns // 128)
    programs = _programs(units, shape, x.device)
    _gated_stream_k_kernel[(programs,)](
        fragments.values, fragments.lifts, rows, _partials(programs, fragments, shape), semaphores(x.device), units,
        out, gate.rows,
        *planes_of(gate), *planes_of(up), columns, gate.type, N_TILES=fragments.n_tiles, WARPS=shape.warps,
        num_warps=shape.warps, num_stages=1, maxnreg=shape.registers, **pdl_arguments(x.device),
    )  # fmt: skip
    return out


def _programs(units: int, shape: StreamKShape, device: torch.device, dense: int = 0) -> int:
    """As many as the card holds at once, beside those of dense tiles; each with a unit at least."""
    room = max(processors(device), processors(device) * shape.resident - dense)  # a small card has dense tiles wait
    return max(1, min(room, units))


def _partials(programs: int, fragments: Fragments, shape: StreamKShape) -> Tensor:
    """Two places for every program."""
    return torch.empty(
        programs, 2, 4, fragments.n_tiles, 32 * shape.warps, dtype=torch.float32, device=fragments.lifts.device
    )

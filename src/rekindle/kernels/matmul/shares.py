"""Nine to FEW_ROWS rows through large grouped planes in NVIDIA's matrix units, in equal shares; x is `laid` out.

The warps of a program stand along the outputs, so that they read the same x, and some of them side by side along the
columns. Every program is on the card from the beginning to the end and has an equal share of the work, which is
counted in units: a block of outputs by one group of columns. Where a share ends inside a block its sums so far go to
memory, and whoever comes last adds them up in the order of the columns: the same numbers on every run.
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

from rekindle.kernels.device import processors, starting_early
from rekindle.kernels.matmul.arrivals import all_arrived, counters
from rekindle.kernels.matmul.laid import Laid, lay_out, load_lifts, load_piece, over_columns
from rekindle.kernels.matmul.mma import (
    block_products,
    dense_products,
    factors,
    over_warps,
    store_one,
    store_tile,
    threads,
)
from rekindle.kernels.matmul.nvidia import line_up, planes_of, readable
from rekindle.kernels.matmul.tiles import bits_of, has_minimum
from rekindle.kernels.matmul.types import Packed

REGISTERS = 65536  # of a multiprocessor
LEAST_ROWS = 9
LEAST, MOST = 7 << 22, 1 << 28  # values of a launch: a small one has no time to share, a huge one evens out by itself


class ShareForm(NamedTuple):
    """Warps of a program along the outputs, and beside one another along the columns; programs that a multiprocessor
    holds."""

    along: int
    beside: int
    resident: int

    @property
    def warps(self) -> int:
        return self.along * self.beside

    @property
    def registers(self) -> int:
        """Of a thread, at most."""
        return min(255, REGISTERS // (32 * self.warps * self.resident) // 8 * 8)


def pays(rows: int, values: int) -> bool:
    """Whether a launch over so many values of matrices is faster in equal shares."""
    return rows >= LEAST_ROWS and LEAST <= values < MOST


PAIRED = ShareForm(4, 1, 3)  # the fastest of those timed on an H200 (docs/LOG.md)
UP_TO_16 = ShareForm(4, 2, 2)
UP_TO_32 = ShareForm(4, 1, 3)


# ---- loads --------------------------------------------------------------------------------------------------------
#
# None of them is pure: the compiler would put what is loaded ahead off until it is used. (What is
# loaded before gdc_wait the assembler still puts behind it.)


@triton.jit
def load_codes(p, live):
    """16 bytes at p as four registers, any bits where not live; they pass the cache once."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred go;
            setp.ne.b32 go, $5, 0;
            @go ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4];
        }
        """,
        "=&r,=&r,=&r,=&r,l,r",
        [p.to(tl.int64), live],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_pair(p, live):
    """8 bytes at p as two registers, any bits where not live."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred go;
            setp.ne.b32 go, $3, 0;
            @go ld.global.nc.v2.b32 {$0, $1}, [$2];
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
            @go ld.global.nc.b32 $0, [$1];
        }
        """,
        "=&r,l,r",
        [p.to(tl.int64), live],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_row(codes, high, scales, supers, row, group, live, t, COLUMNS: tl.constexpr, TYPE: tl.constexpr):
    """As `mma.load_group`; numbers of 32 bits do, since no matrix has 2^31 words of codes."""
    super = load_or_nought(supers + (row * (COLUMNS // 256) + group // 2), live)
    e0, e1 = load_pair(scales + (row * (COLUMNS // 32) + group * 4), live)
    if bits_of(TYPE) == 5:
        h = load_or_nought(high + (row * (COLUMNS // 32) + group * 4 + t), live)
    if bits_of(TYPE) == 6:
        lower, upper = load_pair(high + (row * (COLUMNS // 32) + group * 4 + t), live)
        h = lower.to(tl.uint32, bitcast=True).to(tl.int64) | upper.to(tl.int64) << 32
    w0, w1, w2, w3 = load_codes(codes + (row * (COLUMNS // 8) + group * 16 + t * 4), live)
    if bits_of(TYPE) == 4:
        h = w0
    return w0, w1, w2, w3, e0, e1, super if has_minimum(TYPE) else super.to(tl.float32, bitcast=True), h


@triton.jit
def load_step(codes, high, scales, supers, row, row2, group, end, t, COLUMNS: tl.constexpr, TYPE: tl.constexpr):
    """A group of both rows; from the end on its factors are zero."""
    live = (group < end).to(tl.int32)
    first = load_row(codes, high, scales, supers, row, group, live, t, COLUMNS, TYPE)
    return first, load_row(codes, high, scales, supers, row2, group, live, t, COLUMNS, TYPE)


# ---- products -----------------------------------------------------------------------------------------------------


@triton.jit
def step_products(acc, step, x, lifts, group, COLUMNS: tl.constexpr, TYPE: tl.constexpr):
    """acc += a group's weights times x (x and lifts are addresses of group 0, [NT, threads])."""
    NT: tl.constexpr = x.shape[0]
    first, second = step
    d, m = factors(first[6], TYPE)
    d2, m2 = factors(second[6], TYPE)
    x += group * (NT * 2048)
    lifts += group * (NT * 256)
    for i in tl.static_range(4):
        b = load_piece(x + i * (NT * 512))
        sums = load_lifts(lifts + i * (NT * 64), COLUMNS * NT * 2, TYPE)
        acc = block_products(acc, first, second, d, m, d2, m2, b, sums, i, TYPE)
    return acc


@triton.jit
def piece_products(
    x, lifts, codes, high, scales, supers, row, row2, beside, begin, end,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, STRIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows `row` and `row2` of a matrix times x over the groups begin + beside, begin + beside + STRIDE, … before end:
    four [NT, threads]. While one step is multiplied the next one is on its way.

    EARLY: this launch began before the one that writes x was done, and waits for it here.
    """
    t = threads(beside.shape[1] // 32)[1]
    nought = tl.zeros(x.shape, tl.float32)
    acc = (nought, nought, nought, nought)
    group = begin + beside
    step = load_step(codes, high, scales, supers, row, row2, group, end, t, COLUMNS, TYPE)
    other = load_step(codes, high, scales, supers, row, row2, group + STRIDE, end, t, COLUMNS, TYPE)
    if EARLY:
        gdc_wait()
    for at in range(begin, end, 2 * STRIDE):
        acc = step_products(acc, step, x, lifts, tl.minimum(group, end - 1), COLUMNS, TYPE)
        step = load_step(codes, high, scales, supers, row, row2, group + 2 * STRIDE, end, t, COLUMNS, TYPE)
        if at + STRIDE < end:
            acc = step_products(acc, other, x, lifts, tl.minimum(group + STRIDE, end - 1), COLUMNS, TYPE)
        other = load_step(codes, high, scales, supers, row, row2, group + 3 * STRIDE, end, t, COLUMNS, TYPE)
        group += 2 * STRIDE
    return acc


@triton.jit
def gated(acc, NT: tl.constexpr, PAIRS: tl.constexpr):
    """silu(gate) · up, where even warps hold gate and odd ones up: four [NT, 32 · PAIRS]."""
    c0, c1, c2, c3 = acc
    quads = tl.join(tl.join(c0, c1), tl.join(c2, c3)).reshape(NT, PAIRS, 2, 128)
    gate, up = tl.split(tl.permute(quads, (0, 1, 3, 2)))
    upper, lower = tl.split((gate * tl.sigmoid(gate) * up).reshape(NT, PAIRS * 32, 2, 2))
    c0, c1 = tl.split(upper)
    c2, c3 = tl.split(lower)
    return c0, c1, c2, c3


# ---- shares -------------------------------------------------------------------------------------------------------
#
# Program p of P has the units [p · units // P, (p + 1) · units // P). Of two places in `partials` a piece that begins
# where its block begins takes the second, any other piece the first: a program has at most one of each.


@triton.jit
def sharer_of(unit, programs, units):
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
def share_of_matrix(
    values, lifts, rows, residual, partials, arrived, program, programs, units, before,
    out, codes, high, scales, supers, width,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, ADD: tl.constexpr, GATED: tl.constexpr, NT: tl.constexpr,
    ALONG: tl.constexpr, BESIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What this program has to do of one matrix, which stands behind `before` units of others. GATED: planes of even
    warps are those of gate, of odd warps those of up, and two of them take the same outputs."""
    SIZE: tl.constexpr = NT * 32 * ALONG
    TILES: tl.constexpr = ALONG // 2 if GATED else ALONG  # of 16 outputs in a block
    groups: tl.constexpr = COLUMNS // 128
    g, t, warp = threads(ALONG * BESIDE)
    eight = tl.arange(0, NT)[:, None]
    x_at = (values + 8 * (32 * eight + 4 * g + t)).to(tl.int64)
    lifts_at = (lifts + 16 * eight + 4 * t).to(tl.int64)
    quads_at = partials + eight * (32 * ALONG) + tl.arange(0, 32 * ALONG)[None, :]
    place = tl.arange(0, 32 * TILES)[None, :]
    lo = tl.maximum(program * units // programs - before, 0)
    hi = tl.minimum((program + 1) * units // programs - before, tl.cdiv(width, 16 * TILES) * groups)
    stop = tl.where((hi > lo) & (program >= 0), tl.cdiv(hi, groups), lo // groups)
    for block in range(lo // groups, stop):
        begin = tl.maximum(lo - block * groups, 0)
        end = tl.minimum(hi - block * groups, groups)
        n = (block * TILES + warp % ALONG // (ALONG // TILES)) * 16 + g
        acc = piece_products(
            x_at, lifts_at, codes, high, scales, supers, tl.minimum(n, width - 1), tl.minimum(n + 8, width - 1),
            warp // ALONG, begin, end, COLUMNS, TYPE, BESIDE, EARLY,
        )  # fmt: skip
        c0, c1, c2, c3 = over_columns(acc, NT, ALONG, BESIDE)
        complete = (begin == 0) & (end == groups)
        if not complete:
            save(quads_at + (2 * program + (begin == 0).to(tl.int32)) * (4 * SIZE), (c0, c1, c2, c3), SIZE)
            first = sharer_of(before + block * groups, programs, units)
            last = sharer_of(before + (block + 1) * groups - 1, programs, units)
            complete = all_arrived(arrived + before // groups + block, last - first + 1)
            if complete:
                c0, c1, c2, c3 = added_up(quads_at, first, last, SIZE)
        if complete:
            o = (block * TILES + place // 32) * 16 + place % 32 // 4
            if GATED:
                store_quads(out, residual, gated((c0, c1, c2, c3), NT, TILES), rows, o, width, False)
            else:
                store_quads(out, residual, (c0, c1, c2, c3), rows, o, width, ADD)


@triton.jit
def store_quads(out, residual, acc, rows, n, width, ADD: tl.constexpr):
    """Four [NT, 32 · tiles] into out [rows, width]; n [1, 32 · tiles]: outputs of the first two."""
    m = 8 * tl.arange(0, acc[0].shape[0])[:, None] + tl.arange(0, acc[0].shape[1])[None, :] % 4 * 2
    store_one(out, residual, acc[0], m, rows, n, width, ADD)
    store_one(out, residual, acc[1], m + 1, rows, n, width, ADD)
    store_one(out, residual, acc[2], m, rows, n + 8, width, ADD)
    store_one(out, residual, acc[3], m + 1, rows, n + 8, width, ADD)


@triton.jit
def dense_tile(
    x, x_stride, rows, residual, out, weight, width, tile,
    COLUMNS: tl.constexpr, ADD: tl.constexpr, NT: tl.constexpr, WARPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """16 outputs of a matrix of bfloat16 values, if it has them; all warps stand along the columns."""
    if (tile >= 0) & (tile < tl.cdiv(width, 16)):
        g, t, warp = threads(WARPS)
        m = 8 * tl.arange(0, NT)[:, None] + g
        address = (x + tl.minimum(m, rows - 1).to(tl.int64) * x_stride + 8 * t).to(tl.int64)
        row = tl.minimum(tile * 16 + g, width - 1).to(tl.int64)
        row2 = tl.minimum(tile * 16 + g + 8, width - 1).to(tl.int64)
        acc = dense_products(address, weight, row, row2, warp, COLUMNS, WARPS, EARLY)
        store_tile(out, residual, over_warps(acc, NT, WARPS), 0, rows, tile * 16, width, NT, ADD)


# ---- launches -----------------------------------------------------------------------------------------------------


@triton.jit
def part_of_launch(
    x, x_stride, values, whole, halves, rows, residual, partials, arrived, program, programs, units, before, tile,
    out, codes, high, scales, supers, width,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, ADD: tl.constexpr, NT: tl.constexpr,
    ALONG: tl.constexpr, BESIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One of the matrices; returns units before the next one, and the tile counted from the next dense one."""
    if TYPE == "dense":
        dense_tile(x, x_stride, rows, residual, out, codes, width, tile, COLUMNS, ADD, NT, ALONG * BESIDE, EARLY)
        return before, tile - tl.cdiv(width, 16)
    else:
        share_of_matrix(
            values, whole if has_minimum(TYPE) else halves, rows, residual, partials, arrived, program, programs,
            units, before, out, codes, high, scales, supers, width,
            COLUMNS, TYPE, ADD, False, NT, ALONG, BESIDE, EARLY,
        )  # fmt: skip
        return before + tl.cdiv(width, 16 * ALONG) * (COLUMNS // 128), tile


@triton.jit(do_not_specialize=["rows", "dense", "units"])
def _shares_kernel(
    x, x_stride, values, whole, halves, rows, residual, partials, arrived, dense, units,
    out0, codes0, high0, scales0, supers0, width0,
    out1, codes1, high1, scales1, supers1, width1,
    out2, codes2, high2, scales2, supers2, width2,
    out3, codes3, high3, scales3, supers3, width3,
    COLUMNS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr, TYPE3: tl.constexpr,
    ADD: tl.constexpr, NT: tl.constexpr, ALONG: tl.constexpr, BESIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Up to four matrices behind one another. The first `dense` programs take 16 outputs of a dense one each, the
    others share the quantised ones."""
    if EARLY:
        gdc_launch_dependents()
    tile = tl.program_id(0)
    program = tile - dense
    programs = tl.num_programs(0) - dense
    before, tile = part_of_launch(
        x, x_stride, values, whole, halves, rows, residual, partials, arrived, program, programs, units, 0, tile,
        out0, codes0, high0, scales0, supers0, width0, COLUMNS, TYPE0, ADD, NT, ALONG, BESIDE, EARLY,
    )  # fmt: skip
    if TYPE1 != "none":
        before, tile = part_of_launch(
            x, x_stride, values, whole, halves, rows, residual, partials, arrived, program, programs, units, before,
            tile, out1, codes1, high1, scales1, supers1, width1,
            COLUMNS, TYPE1, False, NT, ALONG, BESIDE, EARLY,
        )  # fmt: skip
    if TYPE2 != "none":
        before, tile = part_of_launch(
            x, x_stride, values, whole, halves, rows, residual, partials, arrived, program, programs, units, before,
            tile, out2, codes2, high2, scales2, supers2, width2,
            COLUMNS, TYPE2, False, NT, ALONG, BESIDE, EARLY,
        )  # fmt: skip
    if TYPE3 != "none":
        before, tile = part_of_launch(
            x, x_stride, values, whole, halves, rows, residual, partials, arrived, program, programs, units, before,
            tile, out3, codes3, high3, scales3, supers3, width3,
            COLUMNS, TYPE3, False, NT, ALONG, BESIDE, EARLY,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "units"])
def _gated_shares_kernel(
    values, lifts, rows, partials, arrived, units, out, width,
    codes, high, scales, supers, up_codes, up_high, up_scales, up_supers,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, NT: tl.constexpr, ALONG: tl.constexpr, BESIDE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """silu(gate x) · (up x): even warps take gate, odd ones up."""
    if EARLY:
        gdc_launch_dependents()
    is_up = threads(ALONG * BESIDE)[2] % 2 == 1
    share_of_matrix(
        values, lifts, rows, out, partials, arrived, tl.program_id(0), tl.num_programs(0), units, 0,
        out, tl.where(is_up, up_codes, codes), tl.where(is_up, up_high, high), tl.where(is_up, up_scales, scales),
        tl.where(is_up, up_supers, supers), width,
        COLUMNS, TYPE, False, True, NT, ALONG, BESIDE, EARLY,
    )  # fmt: skip


def multiply(
    x: Tensor, weights: Sequence[Packed | Tensor], residual: Tensor | None = None, form: ShareForm | None = None
) -> list[Tensor]:
    """x [rows, in] through up to SEGMENTS matrices in one launch; residual belongs to the first.

    A tensor is a matrix of bfloat16 values.
    """
    rows, columns = x.shape
    x, line = readable(x), line_up(x, weights, residual)
    laid = lay_out(x)
    form = form or (UP_TO_16 if laid.eights <= 2 else UP_TO_32)
    dense = line.tiles(True, 16)
    units = line.tiles(False, 16 * form.along) * (columns // 128)
    programs = _programs(units, form, x.device, dense)
    _shares_kernel[(dense + programs,)](
        x, x.stride(0), laid.values, laid.whole, laid.halves, rows, line.residual,
        _partials(programs, laid, form), counters(x.device), dense, units, *line.arguments, columns, *line.kinds,
        ADD=residual is not None, NT=laid.eights, ALONG=form.along, BESIDE=form.beside,
        num_warps=form.warps, num_stages=1, maxnreg=form.registers, **starting_early(x.device),
    )  # fmt: skip
    return line.outs


def swiglu(x: Tensor, gate: Packed, up: Packed, form: ShareForm | None = None) -> Tensor:
    """silu(gate x) · (up x); both matrices of one type."""
    rows, columns = x.shape
    laid = lay_out(readable(x))
    form = form or PAIRED
    out = torch.empty(rows, gate.rows, dtype=x.dtype, device=x.device)
    units = triton.cdiv(gate.rows, 8 * form.along) * (columns // 128)
    programs = _programs(units, form, x.device)
    _gated_shares_kernel[(programs,)](
        laid.values, laid.halves if gate.type == "Q6_K" else laid.whole, rows, _partials(programs, laid, form),
        counters(x.device), units, out, gate.rows, *planes_of(gate), *planes_of(up), columns, gate.type,
        NT=laid.eights, ALONG=form.along, BESIDE=form.beside,
        num_warps=form.warps, num_stages=1, maxnreg=form.registers, **starting_early(x.device),
    )  # fmt: skip
    return out


def _programs(units: int, form: ShareForm, device: torch.device, dense: int = 0) -> int:
    """As many as the card holds at once, beside those of dense tiles; each with a unit for all warps that stand beside
    one another."""
    room = max(processors(device), processors(device) * form.resident - dense)  # a small card has dense tiles wait
    return max(1, min(room, units // form.beside))


def _partials(programs: int, laid: Laid, form: ShareForm) -> Tensor:
    """Two places for every program."""
    return torch.empty(programs, 2, 4, laid.eights, 32 * form.along, dtype=torch.float32, device=laid.whole.device)

"""Two to FEW_ROWS rows through grouped planes in NVIDIA's matrix units, x laid out for them; `mma` holds the pieces.

x is first laid out in the order of the registers of matrix instructions: a thread's share of a block for an eight of
rows is one piece of 16 bytes, and a warp's pieces lie side by side. What the lift of codes adds is known beforehand
too: minus the lift times Σ x over every block, and over its halves for types whose halves have scales of their own.
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

from rekindle.kernels.device import reads_much, starting_early
from rekindle.kernels.matmul.mma import (
    block_products,
    bring,
    dense_products,
    factors,
    load_group,
    over_warps,
    store_one,
    store_tile,
    threads,
)
from rekindle.kernels.matmul.nvidia import line_up, outputs_of, readable, rows_of_tiles, starting
from rekindle.kernels.matmul.tiles import bits_of, has_minimum
from rekindle.kernels.matmul.types import Packed

MANY_ROWS = 16  # beyond so many rows x is always laid out …
NARROW, WIDE = 4096, 65536  # … and from two rows on for so few outputs, or so many
ENOUGH = 1024  # tiles of 16 rows, or parts of them, that keep a large card busy


class LaidConfig(NamedTuple):
    """Warps of a program: so many below one another, with 16 rows of the matrix each, which share what they read of x,
    and so many side by side along the columns. Registers that a thread may take."""

    down: int
    across: int
    registers: int


class Laid(NamedTuple):
    """x for `eights` times eight rows: values [blocks, eights, 32 threads, 8], and for t = 0 … 3 what rows 2·t and
    2·t + 1 of every eight begin with, twice as the registers want it: whole [blocks, eights, 4, 4] and, by half of the
    block, halves [2, blocks, eights, 4, 4]."""

    values: Tensor
    whole: Tensor
    halves: Tensor
    eights: int


def pays(rows: int, width: int) -> bool:
    """Whether laying x out is worth its launch, for so many outputs."""
    return rows > MANY_ROWS or (rows > 1 and not NARROW < width < WIDE)


def laid_config(rows: int, width: int) -> LaidConfig:
    """The fastest of those timed on an H200 (docs/LOG.md): enough warps to fill it, few that read the same x. Few
    programs take so many registers that a multiprocessor holds but one, or the first to be free would get them all."""
    tiles = triton.cdiv(width, 16)
    across = min(8, triton.next_power_of_2(triton.cdiv(ENOUGH, tiles)))
    if across > 2:
        return LaidConfig(1, across, 255 if across == 8 else 168)
    return LaidConfig(4 if rows <= MANY_ROWS else 2, across, 168)


@triton.jit
def load_piece(address):
    """16 bytes of x as four registers."""
    return tl.inline_asm_elementwise(
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l",
        [address],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,  # it must not move to before the launch that writes x is done
        pack=1,
    )


@triton.jit(do_not_specialize=["rows"])
def _lay_kernel(x, x_stride, values, whole, halves, rows, EARLY: tl.constexpr):
    """One block of columns of eight rows; rows past the end are zero."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    block, eight = tl.program_id(0), tl.program_id(1)
    place = block * tl.num_programs(1) + eight
    m = tl.arange(0, 8)
    row = eight * 8 + m[:, None]
    column = tl.arange(0, 32)[None, :]
    here = tl.load(x + row.to(tl.int64) * x_stride + block * 32 + column, row < rows, other=0.0)
    thread = 4 * m[:, None] + column % 16 // 4
    tl.store(values + place * 256 + thread * 8 + column // 16 * 4 + column % 4, here)
    wide = here.to(tl.float32)
    first = tl.sum(tl.where(column < 16, wide, 0.0), 1)
    second = tl.sum(tl.where(column < 16, 0.0, wide), 1)
    at = place * 16 + m // 2 * 4 + m % 2
    other = tl.num_programs(0) * tl.num_programs(1) * 16 + at
    for twice in tl.static_range(2):
        tl.store(whole + at + 2 * twice, (first + second) * -128.0)
        tl.store(halves + at + 2 * twice, first * -160.0)
        tl.store(halves + other + 2 * twice, second * -160.0)


def lay_out(x: Tensor) -> Laid:
    rows, columns = x.shape
    eights = 1 if rows <= 8 else 2 if rows <= 16 else 4
    blocks = columns // 32
    values = torch.empty(blocks, eights, 32, 8, dtype=x.dtype, device=x.device)
    whole = torch.empty(blocks, eights, 4, 4, dtype=torch.float32, device=x.device)
    halves = torch.empty(2, blocks, eights, 4, 4, dtype=torch.float32, device=x.device)
    _lay_kernel[(blocks, eights)](x, x.stride(0), values, whole, halves, rows, num_warps=1, **starting_early(x.device))
    return Laid(values, whole, halves, eights)


@triton.jit
def bring_rows(planes, row, row2, group, COLUMNS: tl.constexpr, TYPE: tl.constexpr, STRIDE: tl.constexpr):
    """The rows of a tile are on their way to the L2, whole; the warps side by side share the asking."""
    codes, high, scales, _ = planes
    g, t, _ = threads(group.shape[1] // 32)
    mine = tl.where(t == 0, row, row2)
    go = ((t < 2) & (g % STRIDE == group)).to(tl.int32)
    bring(codes + mine * (COLUMNS // 8), COLUMNS // 2, go)
    bring(scales + mine * (COLUMNS // 32), COLUMNS // 16, go)
    if bits_of(TYPE) > 4:
        bring(high + mine * (COLUMNS // 32), COLUMNS // (4 if bits_of(TYPE) == 6 else 8), go)


@triton.jit
def laid_products(
    values, sums, planes, row, row2, group,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, STRIDE: tl.constexpr, NT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As `mma.tile_products`, for x that is laid out and one tile."""
    codes, high, scales, supers = planes
    _, t, _ = threads(group.shape[1] // 32)
    lane = tl.arange(0, group.shape[1])[None, :] % 32
    eight = tl.arange(0, NT)[:, None]
    groups: tl.constexpr = COLUMNS // 128
    value_at = (values + 256 * eight + 8 * lane).to(tl.int64)
    sums_at = sums.to(tl.int64) + (4 * eight + t) * 16
    nought = tl.zeros(value_at.shape, tl.float32)
    acc = (nought, nought, nought, nought)
    if EARLY:
        bring_rows(planes, row, row2, group, COLUMNS, TYPE, STRIDE)
        gdc_wait()
    for _ in range(0, groups, STRIDE):
        live = group < groups
        first = load_group(codes, high, scales, supers, row, group, live, t, COLUMNS, TYPE)
        second = load_group(codes, high, scales, supers, row2, group, live, t, COLUMNS, TYPE)
        block = tl.minimum(group, groups - 1) * 4
        d, m = factors(first[6], TYPE)
        d2, m2 = factors(second[6], TYPE)
        for i in tl.static_range(4):
            b = load_piece(value_at + (block + i) * (512 * NT))
            lifts = load_lifts(sums_at + (block + i) * (64 * NT), groups * (256 * NT), TYPE)
            acc = block_products(acc, first, second, d, m, d2, m2, b, lifts, i, TYPE)
        group += STRIDE
    return acc


@triton.jit
def over_columns(acc, NT: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Shares of the warps that lie side by side added up: four [NT, 32 · DOWN]."""
    c0, c1, c2, c3 = acc
    if ACROSS > 1:
        quads = tl.join(tl.join(c0, c1), tl.join(c2, c3)).reshape(NT, ACROSS, DOWN * 128)
        upper, lower = tl.split(tl.sum(quads, 1).reshape(NT, DOWN * 32, 2, 2))
        c0, c1 = tl.split(upper)
        c2, c3 = tl.split(lower)
    return c0, c1, c2, c3


@triton.jit
def load_lifts(address, apart: tl.constexpr, TYPE: tl.constexpr):
    """What `mma.block_sums` gives."""
    if has_minimum(TYPE):
        return load_quad(address)
    else:
        return load_quad(address) + load_quad(address + apart)


@triton.jit
def load_quad(address):
    """16 bytes as four numbers."""
    return tl.inline_asm_elementwise(
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=f,=f,=f,=f,l",
        [address],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def _segment(
    x, x_stride, rows, values, whole, halves, residual, out, codes, high, scales, supers, width, pid,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, ADD: tl.constexpr, NT: tl.constexpr, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """16 · DOWN outputs of one matrix (16 of a dense one) for all rows of x."""
    g, t, warp = threads(DOWN * ACROSS)
    at = pid * outputs_of(TYPE, DOWN)
    if TYPE == "dense":
        row, row2, _, _ = rows_of_tiles(at + g, width)
        m = 8 * tl.arange(0, NT)[:, None] + g
        address = (x + tl.minimum(m, rows - 1).to(tl.int64) * x_stride + 8 * t).to(tl.int64)
        acc = dense_products(address, codes, row, row2, warp, COLUMNS, DOWN * ACROSS, EARLY)
        store_tile(out, residual, over_warps(acc, NT, DOWN * ACROSS), 0, rows, at, width, NT, ADD)
    else:
        row, row2, _, _ = rows_of_tiles(at + 16 * (warp % DOWN) + g, width)
        sums = whole if has_minimum(TYPE) else halves
        planes = codes, high, scales, supers
        acc = laid_products(values, sums, planes, row, row2, warp // DOWN, COLUMNS, TYPE, ACROSS, NT, EARLY)
        c0, c1, c2, c3 = over_columns(acc, NT, DOWN, ACROSS)
        thread = tl.arange(0, 32 * DOWN)[None, :]
        m = 8 * tl.arange(0, NT)[:, None] + thread % 4 * 2
        n = at + thread // 32 * 16 + thread % 32 // 4
        store_one(out, residual, c0, m, rows, n, width, ADD)
        store_one(out, residual, c1, m + 1, rows, n, width, ADD)
        store_one(out, residual, c2, m, rows, n + 8, width, ADD)
        store_one(out, residual, c3, m + 1, rows, n + 8, width, ADD)


@reads_much
@triton.jit(do_not_specialize=["rows"])
def _products_kernel(
    x, x_stride, rows, values, whole, halves, residual,
    out0, codes0, high0, scales0, supers0, width0,
    out1, codes1, high1, scales1, supers1, width1,
    out2, codes2, high2, scales2, supers2, width2,
    out3, codes3, high3, scales3, supers3, width3,
    COLUMNS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr, TYPE3: tl.constexpr,
    ADD: tl.constexpr, NT: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Up to four matrices behind one another; a program belongs to one of them."""
    if EARLY:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    end = tl.cdiv(width0, outputs_of(TYPE0, DOWN))
    if pid < end:
        _segment(
            x, x_stride, rows, values, whole, halves, residual, out0, codes0, high0, scales0, supers0, width0, pid,
            COLUMNS, TYPE0, ADD, NT, DOWN, ACROSS, EARLY,
        )  # fmt: skip
    if TYPE1 != "none":
        pid -= end
        end = tl.cdiv(width1, outputs_of(TYPE1, DOWN))
        if (pid >= 0) & (pid < end):
            _segment(
                x, x_stride, rows, values, whole, halves, residual, out1, codes1, high1, scales1, supers1, width1, pid,
                COLUMNS, TYPE1, False, NT, DOWN, ACROSS, EARLY,
            )  # fmt: skip
    if TYPE2 != "none":
        pid -= end
        end = tl.cdiv(width2, outputs_of(TYPE2, DOWN))
        if (pid >= 0) & (pid < end):
            _segment(
                x, x_stride, rows, values, whole, halves, residual, out2, codes2, high2, scales2, supers2, width2, pid,
                COLUMNS, TYPE2, False, NT, DOWN, ACROSS, EARLY,
            )  # fmt: skip
    if TYPE3 != "none":
        pid -= end
        if pid >= 0:
            _segment(
                x, x_stride, rows, values, whole, halves, residual, out3, codes3, high3, scales3, supers3, width3, pid,
                COLUMNS, TYPE3, False, NT, DOWN, ACROSS, EARLY,
            )  # fmt: skip


def multiply(
    x: Tensor, weights: Sequence[Packed | Tensor], residual: Tensor | None = None, config: LaidConfig | None = None
) -> list[Tensor]:
    """As `nvidia.multiply`."""
    rows, columns = x.shape
    x, line = readable(x), line_up(x, weights, residual)
    config = config or laid_config(rows, sum(line.widths))
    laid = lay_out(x)
    programs = line.tiles(True, 16) + line.tiles(False, 16 * config.down)
    _products_kernel[(programs,)](
        x, x.stride(0), rows, laid.values, laid.whole, laid.halves, line.residual,
        *line.arguments, columns, *line.kinds,
        ADD=residual is not None, NT=laid.eights, DOWN=config.down, ACROSS=config.across,
        num_warps=config.down * config.across, num_stages=1, maxnreg=config.registers,
        **starting(x.device, sum(line.widths) * columns),
    )  # fmt: skip
    return line.outs

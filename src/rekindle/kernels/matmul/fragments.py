"""Two to FEW_ROWS rows through grouped planes in NVIDIA's tensor cores, x in fragment order; `mma` has the products.

x is first swizzled to the order of mma's registers: what a thread needs of a block for one n-tile (eight rows) is one
piece of 16 bytes, and a warp's pieces are contiguous. A code q enters as 128 + q; what that lift adds to the product is
computed beforehand, too: minus the lift times Σ x over every block, and over its halves for types whose halves have
scales of their own.
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

from rekindle.kernels.device import filling, pdl_arguments, shared_memory_carveout
from rekindle.kernels.matmul.mma import (
    block_products,
    dense_products,
    factors,
    load_group,
    over_warps,
    store_one,
    store_tile,
)
from rekindle.kernels.matmul.ptx import bring, threads
from rekindle.kernels.matmul.tensor_core import line_up, outputs_of, pdl_unless_long, readable, rows_of_tiles
from rekindle.kernels.matmul.tiles import bits_of, has_minimum
from rekindle.kernels.matmul.types import Packed

MANY_ROWS = 16  # with more than these x is always put in fragment order …
NARROW, WIDE = 4096, 65536  # … and from two rows on for at most NARROW outputs, or at least WIDE
TILES_EACH = 8  # tiles of 16 rows, or parts of them, that keep a multiprocessor busy


class FragmentsConfig(NamedTuple):
    """Warps of a program: `down` along the outputs, with 16 rows of the matrix each, which read the same x, times
    `across` along the columns. Registers that a thread may take."""

    down: int
    across: int
    registers: int


class Fragments(NamedTuple):
    """x for `n_tiles` times eight rows: values [blocks, n_tiles, 32 threads, 8], and for t = 0 … 3 what rows 2·t and
    2·t + 1 of every eight begin with, twice as the registers want it: lifts [blocks, n_tiles, 4, 4] and, by half of the
    block, half_lifts [2, blocks, n_tiles, 4, 4]."""

    values: Tensor
    lifts: Tensor
    half_lifts: Tensor
    n_tiles: int


def pays(rows: int, width: int) -> bool:
    """Whether putting x in fragment order is worth its launch, for `width` outputs."""
    return rows > MANY_ROWS or (rows > 1 and not NARROW < width < WIDE)


def fragments_config(rows: int, width: int, device: torch.device) -> FragmentsConfig:
    """The fastest of those timed on an H200 (docs/LOG.md): enough warps to fill it, few that read the same x.
    Where there are few programs, `registers` leave room for one to a multiprocessor: otherwise they would pile up on
    the multiprocessors that are free first."""
    tiles = triton.cdiv(width, 16)
    across = min(8, triton.next_power_of_2(triton.cdiv(filling(device, TILES_EACH), tiles)))
    if across > 2:
        return FragmentsConfig(1, across, 255 if across == 8 else 168)
    return FragmentsConfig(4 if rows <= MANY_ROWS else 2, across, 168)


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
def _fragments_kernel(x, x_stride, values, lifts, half_lifts, rows, PDL: tl.constexpr):
    """One block of columns of eight rows; rows past the end are zero."""
    if PDL:
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
        tl.store(lifts + at + 2 * twice, (first + second) * -128.0)
        tl.store(half_lifts + at + 2 * twice, first * -160.0)
        tl.store(half_lifts + other + 2 * twice, second * -160.0)


def to_fragments(x: Tensor) -> Fragments:
    rows, columns = x.shape
    n_tiles = 1 if rows <= 8 else 2 if rows <= 16 else 4
    blocks = columns // 32
    values = torch.empty(blocks, n_tiles, 32, 8, dtype=x.dtype, device=x.device)
    lifts = torch.empty(blocks, n_tiles, 4, 4, dtype=torch.float32, device=x.device)
    half_lifts = torch.empty(2, blocks, n_tiles, 4, 4, dtype=torch.float32, device=x.device)
    _fragments_kernel[(blocks, n_tiles)](
        x, x.stride(0), values, lifts, half_lifts, rows, num_warps=1, **pdl_arguments(x.device)
    )
    return Fragments(values, lifts, half_lifts, n_tiles)


@triton.jit
def bring_rows(planes, row, row2, group, COLUMNS: tl.constexpr, TYPE: tl.constexpr, STRIDE: tl.constexpr):
    """Prefetch the whole rows of a tile to the L2; the warps along the columns share the requests."""
    codes, high_bits, scales, _ = planes
    g, t, _ = threads(group.shape[1] // 32)
    mine = tl.where(t == 0, row, row2)
    go = ((t < 2) & (g % STRIDE == group)).to(tl.int32)
    bring(codes + mine * (COLUMNS // 8), COLUMNS // 2, go)
    bring(scales + mine * (COLUMNS // 32), COLUMNS // 16, go)
    if bits_of(TYPE) > 4:
        bring(high_bits + mine * (COLUMNS // 32), COLUMNS // (4 if bits_of(TYPE) == 6 else 8), go)


@triton.jit
def fragment_products(
    values, sums, planes, row, row2, group,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, STRIDE: tl.constexpr, N_TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `mma.tile_products`, for x in fragment order and one tile."""
    codes, high_bits, scales, super_scales = planes
    _, t, _ = threads(group.shape[1] // 32)
    lane = tl.arange(0, group.shape[1])[None, :] % 32
    eight = tl.arange(0, N_TILES)[:, None]
    groups: tl.constexpr = COLUMNS // 128
    value_at = (values + 256 * eight + 8 * lane).to(tl.int64)
    sums_at = sums.to(tl.int64) + (4 * eight + t) * 16
    nought = tl.zeros(value_at.shape, tl.float32)
    acc = (nought, nought, nought, nought)
    if PDL:
        bring_rows(planes, row, row2, group, COLUMNS, TYPE, STRIDE)
        gdc_wait()
    for _ in range(0, groups, STRIDE):
        live = group < groups
        first = load_group(codes, high_bits, scales, super_scales, row, group, live, t, COLUMNS, TYPE)
        second = load_group(codes, high_bits, scales, super_scales, row2, group, live, t, COLUMNS, TYPE)
        block = tl.minimum(group, groups - 1) * 4
        d, m = factors(first[6], TYPE)
        d2, m2 = factors(second[6], TYPE)
        for i in tl.static_range(4):
            b = load_piece(value_at + (block + i) * (512 * N_TILES))
            lifts = load_lifts(sums_at + (block + i) * (64 * N_TILES), groups * (256 * N_TILES), TYPE)
            acc = block_products(acc, first, second, d, m, d2, m2, b, lifts, i, TYPE)
        group += STRIDE
    return acc


@triton.jit
def over_columns(acc, N_TILES: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Shares of the warps that lie side by side added up: four [N_TILES, 32 · DOWN]."""
    c0, c1, c2, c3 = acc
    if ACROSS > 1:
        quads = tl.join(tl.join(c0, c1), tl.join(c2, c3)).reshape(N_TILES, ACROSS, DOWN * 128)
        upper, lower = tl.split(tl.sum(quads, 1).reshape(N_TILES, DOWN * 32, 2, 2))
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
    x, x_stride, rows, values, lifts, half_lifts, out, codes, high_bits, scales, super_scales, width, pid,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, N_TILES: tl.constexpr, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """16 · DOWN outputs of one matrix (16 of a dense one) for all rows of x."""
    g, t, warp = threads(DOWN * ACROSS)
    at = pid * outputs_of(TYPE, DOWN)
    if TYPE == "dense":
        row, row2, _, _ = rows_of_tiles(at + g, width)
        m = 8 * tl.arange(0, N_TILES)[:, None] + g
        address = (x + tl.minimum(m, rows - 1).to(tl.int64) * x_stride + 8 * t).to(tl.int64)
        acc = dense_products(address, codes, row, row2, warp, COLUMNS, DOWN * ACROSS, PDL)
        store_tile(out, over_warps(acc, N_TILES, DOWN * ACROSS), 0, rows, at, width, N_TILES)
    else:
        row, row2, _, _ = rows_of_tiles(at + 16 * (warp % DOWN) + g, width)
        sums = lifts if has_minimum(TYPE) else half_lifts
        planes = codes, high_bits, scales, super_scales
        acc = fragment_products(values, sums, planes, row, row2, warp // DOWN, COLUMNS, TYPE, ACROSS, N_TILES, PDL)
        c0, c1, c2, c3 = over_columns(acc, N_TILES, DOWN, ACROSS)
        thread = tl.arange(0, 32 * DOWN)[None, :]
        m = 8 * tl.arange(0, N_TILES)[:, None] + thread % 4 * 2
        n = at + thread // 32 * 16 + thread % 32 // 4
        store_one(out, c0, m, rows, n, width)
        store_one(out, c1, m + 1, rows, n, width)
        store_one(out, c2, m, rows, n + 8, width)
        store_one(out, c3, m + 1, rows, n + 8, width)


@shared_memory_carveout
@triton.jit(do_not_specialize=["rows"])
def _products_kernel(
    x, x_stride, rows, values, lifts, half_lifts,
    out0, codes0, high_bits0, scales0, super_scales0, width0,
    out1, codes1, high_bits1, scales1, super_scales1, width1,
    out2, codes2, high_bits2, scales2, super_scales2, width2,
    out3, codes3, high_bits3, scales3, super_scales3, width3,
    COLUMNS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr, TYPE3: tl.constexpr,
    N_TILES: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to four matrices, their tiles numbered one after another; a program belongs to one of them."""
    if PDL:
        gdc_launch_dependents()
    pid = tl.program_id(0)
    end = tl.cdiv(width0, outputs_of(TYPE0, DOWN))
    if pid < end:
        _segment(
            x, x_stride, rows, values, lifts, half_lifts, out0, codes0, high_bits0, scales0, super_scales0, width0, pid,
            COLUMNS, TYPE0, N_TILES, DOWN, ACROSS, PDL,
        )  # fmt: skip
    if TYPE1 != "none":
        pid -= end
        end = tl.cdiv(width1, outputs_of(TYPE1, DOWN))
        if (pid >= 0) & (pid < end):
            _segment(
                x, x_stride, rows, values, lifts, half_lifts, out1, codes1, high_bits1, scales1, super_scales1,
                width1, pid,
                COLUMNS, TYPE1, N_TILES, DOWN, ACROSS, PDL,
            )  # fmt: skip
    if TYPE2 != "none":
        pid -= end
        end = tl.cdiv(width2, outputs_of(TYPE2, DOWN))
        if (pid >= 0) & (pid < end):
            _segment(
                x, x_stride, rows, values, lifts, half_lifts, out2, codes2, high_bits2, scales2, super_scales2,
                width2, pid,
                COLUMNS, TYPE2, N_TILES, DOWN, ACROSS, PDL,
            )  # fmt: skip
    if TYPE3 != "none":
        pid -= end
        if pid >= 0:
            _segment(
                x, x_stride, rows, values, lifts, half_lifts, out3, codes3, high_bits3, scales3, super_scales3,
                width3, pid,
                COLUMNS, TYPE3, N_TILES, DOWN, ACROSS, PDL,
            )  # fmt: skip


def multiply(x: Tensor, weights: Sequence[Packed | Tensor], config: FragmentsConfig | None = None) -> list[Tensor]:
    """As `tensor_core.multiply`."""
    rows, columns = x.shape
    x, line = readable(x), line_up(x, weights)
    config = config or fragments_config(rows, sum(line.widths), x.device)
    fragments = to_fragments(x)
    programs = line.tiles(True, 16) + line.tiles(False, 16 * config.down)
    _products_kernel[(programs,)](
        x, x.stride(0), rows, fragments.values, fragments.lifts, fragments.half_lifts,
        *line.arguments, columns, *line.kinds,
        N_TILES=fragments.n_tiles, DOWN=config.down, ACROSS=config.across,
        num_warps=config.down * config.across, num_stages=1, maxnreg=config.registers,
        **pdl_unless_long(x.device, sum(line.widths) * columns),
    )  # fmt: skip
    return line.outs

"""One to FEW_ROWS rows through grouped planes in NVIDIA's tensor cores, x read as it lies; `mma` has the products."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from rekindle.kernels.device import pdl_arguments, shared_memory_carveout
from rekindle.kernels.matmul.gemv import gemv_products
from rekindle.kernels.matmul.mma import dense_products, gated_over_warps, over_warps, store_tile, tile_products
from rekindle.kernels.matmul.mma_row import single_address, single_gated_over_warps, single_over_warps, store_single
from rekindle.kernels.matmul.ptx import bring, threads
from rekindle.kernels.matmul.types import Packed

SEGMENTS = 4  # matrices of one launch
WIDE = 8192  # outputs of a launch that fill a large card with four warps each
LONG = 8192  # columns that can be cut in two
LARGE = 1 << 25  # values of a launch that runs long
PREFETCHED = 8_000_000  # bytes of the next matrix that a launch of one row prefetches to the L2
PREFETCHERS = 300  # programs that do so: the last ones, in whose time the memory is idle
MOST_PREFETCHED = 1 << 19  # bytes of a plane by one program: the instruction counts units of 16 bytes in 16 bits


class FewConfig(NamedTuple):
    """Warps that share 16 rows of the matrix, side by side along the columns; n-tiles (eight rows of x) of one
    program, or 0 for the kernel that takes a single row.

    Of several rows: `ahead`: a warp loads its next step before it multiplies this one; `tiles`: m-tiles (16 rows of the
    matrix) that a warp multiplies by the same x. Of a single row: `parts` of the columns, with programs of their own.
    """

    warps: int
    n_tiles: int
    ahead: bool
    tiles: int = 1
    parts: int = 1


def few_config(width: int, columns: int, rows: int, paired: bool = False, six_bits: bool = False) -> FewConfig:
    """The fastest of those timed on an H200 (docs/LOG.md). `six_bits`: one of the matrices is Q6_K."""
    wide = width >= WIDE
    if rows == 1:
        # A narrow matrix takes more warps beside one another, so that enough loads are in flight.
        config = FewConfig(4 if six_bits or (wide and not paired) else 8, 0, False)
    elif rows <= 8 or paired:
        config = FewConfig(4, 1, True)
    elif wide and not six_bits:
        config = FewConfig(4, 2, False, 2)
    else:
        config = FewConfig(4, 2, True)
    most = (1 + paired) * (1 << (columns // 256).bit_length() - 1)  # no warp without two groups of its own
    return config._replace(warps=min(config.warps, most))


def parts_config(weight: Packed) -> FewConfig | None:
    """For one row through a matrix whose sums are better left in two parts. Q6_K needs many registers, so few
    programs are resident, unevenly spread and with too little in flight; for Q4_K the addition costs what is gained
    (docs/LOG.md)."""
    pays = weight.type == "Q6_K" and weight.rows < WIDE and weight.columns >= LONG
    return FewConfig(4, 0, False, parts=2) if pays else None


@triton.constexpr_function
def outputs_of(type, tiles):
    """Of one program."""
    return 16 if type == "dense" else 16 * tiles


@triton.jit
def hand_over(prefetch, TRIGGER_LATE: tl.constexpr, PREFETCH: tl.constexpr, WARPS: tl.constexpr):
    """A program has its sums: it triggers the dependent launch, and prefetches its slice of what that one reads first.
    prefetch: four planes, each with a program's bytes of it, and the first program that prefetches any."""
    if TRIGGER_LATE:
        gdc_launch_dependents()
    if PREFETCH:
        p0, n0, p1, n1, p2, n2, p3, n3, first = prefetch
        turn = (tl.program_id(1) - first).to(tl.int64)
        one = (tl.arange(0, 32 * WARPS)[None, :] == 0) & (turn >= 0) & (tl.program_id(0) == 0)
        bring(p0.to(tl.int64) + turn * n0, n0, (one & (n0 > 0)).to(tl.int32))
        bring(p1.to(tl.int64) + turn * n1, n1, (one & (n1 > 0)).to(tl.int32))
        bring(p2.to(tl.int64) + turn * n2, n2, (one & (n2 > 0)).to(tl.int32))
        bring(p3.to(tl.int64) + turn * n3, n3, (one & (n3 > 0)).to(tl.int32))


@triton.jit
def _segment(
    x, x_stride, rows, out, codes, high_bits, scales, super_scales, width, pid, prefetch,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, N_TILES: tl.constexpr, TILES: tl.constexpr,
    WARPS: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr, TRIGGER_LATE: tl.constexpr,
    PREFETCH: tl.constexpr,
):  # fmt: skip
    """16 · TILES outputs of one matrix (16 of a dense one) for 8 · N_TILES rows of x, or for a
    single row (N_TILES 0), or for a part of its columns."""
    g, t, warp = threads(WARPS)
    at = pid * outputs_of(TYPE, TILES)
    row, row2, row3, row4 = rows_of_tiles(at + g, width)
    if TYPE == "dense":
        n_tiles: tl.constexpr = N_TILES if N_TILES > 0 else 1
        m_first = tl.program_id(0) * 8 * n_tiles
        m = m_first + 8 * tl.arange(0, n_tiles)[:, None] + g
        address = (x + tl.minimum(m, rows - 1).to(tl.int64) * x_stride + 8 * t).to(tl.int64)
        acc = dense_products(address, codes, row, row2, warp, COLUMNS, WARPS, PDL)
        hand_over(prefetch, TRIGGER_LATE, PREFETCH, WARPS)
        store_tile(out, over_warps(acc, n_tiles, WARPS), m_first, rows, at, width, n_tiles)
    elif N_TILES == 0:
        at, part = whole_tile(at, width), tl.program_id(0)
        single = gemv_products(
            single_address(x, WARPS), codes, high_bits, scales, super_scales, (at + g).to(tl.int64), warp, part,
            COLUMNS, TYPE, WARPS, PARTS, PDL,
        )  # fmt: skip
        hand_over(prefetch, TRIGGER_LATE, PREFETCH, WARPS)
        store_single(out + part * width, single_over_warps(single, WARPS), at, width)
    else:
        m = tl.program_id(0) * 8 * N_TILES + 8 * tl.arange(0, N_TILES)[:, None] + g
        address = (x + tl.minimum(m, rows - 1).to(tl.int64) * x_stride + 4 * t).to(tl.int64)
        acc, acc2 = tile_products(
            address, codes, high_bits, scales, super_scales, row, row2, row3, row4, warp,
            COLUMNS, TYPE, WARPS, TILES, AHEAD, PDL,
        )  # fmt: skip
        m_first = tl.program_id(0) * 8 * N_TILES
        store_tile(out, over_warps(acc, N_TILES, WARPS), m_first, rows, at, width, N_TILES)
        if TILES == 2:
            store_tile(out, over_warps(acc2, N_TILES, WARPS), m_first, rows, at + 16, width, N_TILES)


@triton.jit
def whole_tile(at, width):
    """First of 16 rows that all lie inside `width`; two programs may compute the same row, to the same bits."""
    return tl.minimum(at, width - 16)


@triton.jit
def rows_of_tiles(n, width):
    """Rows n, n + 8, n + 16, n + 24 of a matrix, the last one for those past the end."""
    return (
        tl.minimum(n, width - 1).to(tl.int64),
        tl.minimum(n + 8, width - 1).to(tl.int64),
        tl.minimum(n + 16, width - 1).to(tl.int64),
        tl.minimum(n + 24, width - 1).to(tl.int64),
    )


@shared_memory_carveout
@triton.jit(do_not_specialize=["rows", "n0", "n1", "n2", "n3", "first"])
def _products_kernel(
    x, x_stride, rows,
    out0, codes0, high_bits0, scales0, super_scales0, width0,
    out1, codes1, high_bits1, scales1, super_scales1, width1,
    out2, codes2, high_bits2, scales2, super_scales2, width2,
    out3, codes3, high_bits3, scales3, super_scales3, width3,
    p0, n0, p1, n1, p2, n2, p3, n3, first,
    COLUMNS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr, TYPE3: tl.constexpr,
    N_TILES: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr, PARTS: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr, TRIGGER_LATE: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Up to four matrices, their tiles numbered one after another; a program belongs to one of them.

    PDL: see `pdl_arguments`. TRIGGER_LATE: a program triggers the dependent launch when it has its sums, not when it
    begins. PREFETCH: p0 … are planes of the matrix that the dependent launch reads. PARTS: of the
    columns of the only matrix, each with an output of its own; with one row of x only.
    """
    if PDL and not TRIGGER_LATE:
        gdc_launch_dependents()
    prefetch = p0, n0, p1, n1, p2, n2, p3, n3, first
    pid = tl.program_id(1)
    end = tl.cdiv(width0, outputs_of(TYPE0, TILES))
    if pid < end:
        _segment(
            x, x_stride, rows, out0, codes0, high_bits0, scales0, super_scales0, width0, pid, prefetch,
            COLUMNS, TYPE0, N_TILES, TILES, WARPS, PARTS, AHEAD, PDL, TRIGGER_LATE, PREFETCH,
        )  # fmt: skip
    if TYPE1 != "none":
        pid -= end
        end = tl.cdiv(width1, outputs_of(TYPE1, TILES))
        if (pid >= 0) & (pid < end):
            _segment(
                x, x_stride, rows, out1, codes1, high_bits1, scales1, super_scales1, width1, pid, prefetch,
                COLUMNS, TYPE1, N_TILES, TILES, WARPS, PARTS, AHEAD, PDL, TRIGGER_LATE, PREFETCH,
            )  # fmt: skip
    if TYPE2 != "none":
        pid -= end
        end = tl.cdiv(width2, outputs_of(TYPE2, TILES))
        if (pid >= 0) & (pid < end):
            _segment(
                x, x_stride, rows, out2, codes2, high_bits2, scales2, super_scales2, width2, pid, prefetch,
                COLUMNS, TYPE2, N_TILES, TILES, WARPS, PARTS, AHEAD, PDL, TRIGGER_LATE, PREFETCH,
            )  # fmt: skip
    if TYPE3 != "none":
        pid -= end
        if pid >= 0:
            _segment(
                x, x_stride, rows, out3, codes3, high_bits3, scales3, super_scales3, width3, pid, prefetch,
                COLUMNS, TYPE3, N_TILES, TILES, WARPS, PARTS, AHEAD, PDL, TRIGGER_LATE, PREFETCH,
            )  # fmt: skip


@shared_memory_carveout
@triton.jit(do_not_specialize=["rows", "n0", "n1", "n2", "n3", "first"])
def _gated_products_kernel(
    x, x_stride, rows, out, width, codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales,
    up_super_scales,
    p0, n0, p1, n1, p2, n2, p3, n3, first,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, N_TILES: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr, TRIGGER_LATE: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """silu(gate x) · (up x): 16 outputs for 8 · N_TILES rows of x; even warps take gate, odd ones up."""
    if PDL and not TRIGGER_LATE:
        gdc_launch_dependents()
    at = tl.program_id(1) * 16
    g, t, warp = threads(WARPS)
    is_up = warp % 2 == 1
    codes = tl.where(is_up, up_codes, codes)
    high_bits = tl.where(is_up, up_high_bits, high_bits)
    scales = tl.where(is_up, up_scales, scales)
    super_scales = tl.where(is_up, up_super_scales, super_scales)
    if N_TILES == 0:
        at = whole_tile(at, width)
        single = gemv_products(
            single_address(x, WARPS), codes, high_bits, scales, super_scales, (at + g).to(tl.int64), warp // 2, 0,
            COLUMNS, TYPE, WARPS // 2, 1, PDL,
        )  # fmt: skip
        hand_over((p0, n0, p1, n1, p2, n2, p3, n3, first), TRIGGER_LATE, PREFETCH, WARPS)
        store_single(out, single_gated_over_warps(single, WARPS), at, width)
    else:
        row, row2, _, _ = rows_of_tiles(at + g, width)
        m = tl.program_id(0) * 8 * N_TILES + 8 * tl.arange(0, N_TILES)[:, None] + g
        address = (x + tl.minimum(m, rows - 1).to(tl.int64) * x_stride + 4 * t).to(tl.int64)
        acc, _ = tile_products(
            address, codes, high_bits, scales, super_scales, row, row2, row, row2, warp // 2,
            COLUMNS, TYPE, WARPS // 2, 1, AHEAD, PDL,
        )  # fmt: skip
        m_first = tl.program_id(0) * 8 * N_TILES
        store_tile(out, gated_over_warps(acc, N_TILES, WARPS), m_first, rows, at, width, N_TILES)


class Lineup(NamedTuple):
    """The matrices of one launch, and where their outputs go."""

    widths: list[int]
    types: list[str]  # "dense": bfloat16 values
    outs: list[Tensor]
    arguments: list[Tensor | int]  # of SEGMENTS matrices: output, planes, width

    @property
    def kinds(self) -> list[str]:
        """Of SEGMENTS matrices."""
        return self.types + ["none"] * (SEGMENTS - len(self.types))

    def tiles(self, dense: bool, outputs: int) -> int:
        """Tiles of `outputs` outputs in the matrices that are dense, or in those that are not."""
        pairs = zip(self.widths, self.types, strict=True)
        return sum(triton.cdiv(width, outputs) for width, type in pairs if (type == "dense") == dense)


def line_up(x: Tensor, weights: Sequence[Packed | Tensor], parts: int = 1) -> Lineup:
    """parts: of the columns of the only matrix; its output is then [parts, rows, out] in float32."""
    widths = [weight.shape[0] if isinstance(weight, Tensor) else weight.rows for weight in weights]
    types = ["dense" if isinstance(weight, Tensor) else weight.type for weight in weights]
    outs = empty_outputs(x, widths) if parts == 1 else [x.new_empty(parts, len(x), widths[0], dtype=torch.float32)]
    arguments: list[Tensor | int] = []
    for weight, out, width in zip(weights, outs, widths, strict=True):
        arguments += [out, *planes_of(weight), width]
    arguments += arguments[:6] * (SEGMENTS - len(weights))  # of absent matrices, never read
    return Lineup(widths, types, outs, arguments)


def empty_outputs(x: Tensor, widths: Sequence[int]) -> list[Tensor]:
    return [x.new_empty(len(x), width) for width in widths]


def readable(x: Tensor) -> Tensor:
    """x as the kernels read it: rows of values side by side, on 8-byte edges."""
    return x if x.stride(1) == 1 and x.stride(0) % 4 == 0 else x.contiguous()


def multiply(
    x: Tensor,
    weights: Sequence[Packed | Tensor],
    config: FewConfig | None = None,
    prefetch: Packed | None = None,
) -> list[Tensor]:
    """x [rows, in] through up to SEGMENTS matrices in one launch.

    A tensor is a matrix of bfloat16 values; such programs take long, and should stand first. `prefetch`: the matrix
    that is read next; its first rows are fetched to the L2 while this launch ends. Where the config has parts, the only
    output is [parts, 1, out] in float32, whose sum the reader forms.
    """
    rows, columns = x.shape
    x, line = readable(x), line_up(x, weights, 1 if config is None else config.parts)
    config = config or few_config(sum(line.widths), columns, rows, six_bits="Q6_K" in line.types)
    assert config.parts == 1 or len(weights) == 1, "parts are of one matrix"
    programs = line.tiles(True, 16) + line.tiles(False, 16 * config.tiles)
    _products_kernel[(_programs(rows, config), programs)](
        x, x.stride(0), rows, *line.arguments, *prefetch_slices(prefetch, programs, x), columns, *line.kinds,
        N_TILES=config.n_tiles, TILES=config.tiles, WARPS=config.warps, PARTS=config.parts,
        AHEAD=config.ahead, num_warps=config.warps, num_stages=1, **trigger_arguments(x, sum(line.widths), prefetch),
    )  # fmt: skip
    return line.outs


def swiglu(
    x: Tensor, gate: Packed, up: Packed, config: FewConfig | None = None, prefetch: Packed | None = None
) -> Tensor:
    """silu(gate x) · (up x); both matrices of one type. More than eight rows are faster in `stream_k`."""
    rows, columns = x.shape
    config = config or few_config(gate.rows, columns, rows, paired=True, six_bits=gate.type == "Q6_K")
    x = readable(x)
    out = torch.empty(rows, gate.rows, dtype=x.dtype, device=x.device)
    programs = triton.cdiv(gate.rows, 16)
    _gated_products_kernel[(_programs(rows, config), programs)](
        x, x.stride(0), rows, out, gate.rows, *planes_of(gate), *planes_of(up),
        *prefetch_slices(prefetch, programs, x), columns, gate.type,
        N_TILES=config.n_tiles, WARPS=config.warps, AHEAD=config.ahead,
        num_warps=config.warps, num_stages=1, **trigger_arguments(x, 2 * gate.rows, prefetch),
    )  # fmt: skip
    return out


def pdl_unless_long(device: torch.device, values: int) -> dict[str, bool]:
    """For several rows: a launch over LARGE values or more is slower with PDL (docs/LOG.md)."""
    return pdl_arguments(device) if values < LARGE else {"PDL": False}


def trigger_arguments(x: Tensor, width: int, prefetch: Packed | None) -> dict[str, bool]:
    """Whether a launch uses PDL, when it triggers its dependent launch, and whether it prefetches for it.

    A single row always uses PDL and triggers late: programs that become resident sooner take up room which this launch
    could use, spread unevenly (four on one multiprocessor, none on another), and trigger their own dependents, too.
    """
    rows, columns = x.shape
    pdl = pdl_arguments(x.device) if rows == 1 else pdl_unless_long(x.device, width * columns)
    late = rows == 1 and pdl["PDL"]
    return {**pdl, "TRIGGER_LATE": late, "PREFETCH": late and prefetch is not None}


def prefetch_slices(prefetch: Packed | None, programs: int, x: Tensor) -> list[Tensor | int]:
    """Its planes as bytes, each with the bytes that one program prefetches, and the first program that does.

    The first rows of all planes: they are what the first programs of the next launch read.
    """
    if prefetch is None:
        return [x, 0, x, 0, x, 0, x, 0, 0]
    prefetchers = min(PREFETCHERS, programs)
    rows = min(prefetch.rows, PREFETCHED * prefetch.rows // prefetch.nbytes)
    arguments: list[Tensor | int] = []
    for plane in (prefetch.codes, prefetch.high_bits, prefetch.scales, prefetch.super_scales):
        nbytes = (
            0 if plane is None else min(MOST_PREFETCHED, plane.nbytes // prefetch.rows * rows // prefetchers // 16 * 16)
        )
        arguments += [(prefetch.codes if plane is None else plane).view(torch.uint8), nbytes]
    return [*arguments, programs - prefetchers]


def _programs(rows: int, config: FewConfig) -> int:
    """Programs beside one another for all rows of x, or for all parts of the only one."""
    assert config.n_tiles > 0 or (rows, config.tiles) == (1, 1), f"the kernel for a single row was given {rows}"
    return triton.cdiv(rows, 8 * config.n_tiles) if config.n_tiles else config.parts


def planes_of(weight: Packed | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if isinstance(weight, Tensor):
        assert weight.dtype == torch.bfloat16 and weight.is_contiguous(), f"not {weight.dtype} {weight.stride()}"
        return weight, weight, weight, weight
    assert weight.super_scales is not None, f"{weight.type} has super_scales"
    return (
        weight.codes,
        weight.codes if weight.high_bits is None else weight.high_bits,
        weight.scales,
        weight.super_scales,
    )

"""One to FEW_ROWS rows through grouped planes in NVIDIA's matrix units; `mma` holds the pieces."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from rekindle.kernels.device import reads_much, starting_early
from rekindle.kernels.matmul.mma import (
    bring,
    dense_products,
    gated_over_warps,
    over_warps,
    single_address,
    single_gated_over_warps,
    single_over_warps,
    store_single,
    store_tile,
    threads,
    tile_products,
)
from rekindle.kernels.matmul.turns import turn_products
from rekindle.kernels.matmul.types import Packed

FEW_ROWS = 32  # up to here this beats expanding the matrix first
SEGMENTS = 4  # matrices of one launch
WIDE = 8192  # outputs of a launch that fill a large card with four warps each
LONG = 8192  # columns that can be cut in two
LARGE = 1 << 25  # values of a launch that runs long
BROUGHT = 8_000_000  # bytes of the next matrix that a launch of one row has on their way to the L2 when it ends
BRINGERS = 300  # programs that bring them: the last ones, which leave the memory idle
ONE_GO = 1 << 19  # bytes of a plane that one program asks for at most: the instruction counts 16s in 16 bits


class FewConfig(NamedTuple):
    """Warps that share 16 rows of the matrix, side by side along the columns; eights of rows of x in one program,
    or 0 for the form that takes a single row.

    Of several rows: `ahead`: a warp asks for its next step before it multiplies this one; `tiles`: of 16 rows that a
    warp multiplies by the same x. Of a single row: `parts` of the columns, which have programs of their own.
    """

    warps: int
    eights: int
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
    """For one row through a matrix whose sums are better left in two parts. Q6_K takes so many registers that its few
    programs lie unevenly on a card, with too little in flight; for Q4_K adding up costs what it gains (docs/LOG.md)."""
    pays = weight.type == "Q6_K" and weight.rows < WIDE and weight.columns >= LONG
    return FewConfig(4, 0, False, parts=2) if pays else None


@triton.constexpr_function
def outputs_of(type, tiles):
    """Of one program."""
    return 16 if type == "dense" else 16 * tiles


@triton.jit
def _hand_over(then, LATE: tl.constexpr, THEN: tl.constexpr, WARPS: tl.constexpr):
    """A program is done with its sums: it lets the launch behind in, and has its share of what that one reads first on
    the way to the L2. then: four planes, each with a program's bytes of it, and the first program that brings any."""
    if LATE:
        gdc_launch_dependents()
    if THEN:
        p0, n0, p1, n1, p2, n2, p3, n3, first = then
        turn = (tl.program_id(1) - first).to(tl.int64)
        one = (tl.arange(0, 32 * WARPS)[None, :] == 0) & (turn >= 0) & (tl.program_id(0) == 0)
        bring(p0.to(tl.int64) + turn * n0, n0, (one & (n0 > 0)).to(tl.int32))
        bring(p1.to(tl.int64) + turn * n1, n1, (one & (n1 > 0)).to(tl.int32))
        bring(p2.to(tl.int64) + turn * n2, n2, (one & (n2 > 0)).to(tl.int32))
        bring(p3.to(tl.int64) + turn * n3, n3, (one & (n3 > 0)).to(tl.int32))


@triton.jit
def _segment(
    x, x_stride, rows, residual, out, codes, high, scales, supers, width, pid, then,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, ADD: tl.constexpr, NT: tl.constexpr, TILES: tl.constexpr,
    WARPS: tl.constexpr, PARTS: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr, LATE: tl.constexpr,
    THEN: tl.constexpr,
):  # fmt: skip
    """16 · TILES outputs of one matrix (16 of a dense one) for 8 · NT rows of x, or for the only row, or of a part of
    its columns."""
    g, t, warp = threads(WARPS)
    at = pid * outputs_of(TYPE, TILES)
    row, row2, row3, row4 = rows_of_tiles(at + g, width)
    if TYPE == "dense":
        eights: tl.constexpr = NT if NT > 0 else 1
        m_first = tl.program_id(0) * 8 * eights
        m = m_first + 8 * tl.arange(0, eights)[:, None] + g
        address = (x + tl.minimum(m, rows - 1).to(tl.int64) * x_stride + 8 * t).to(tl.int64)
        acc = dense_products(address, codes, row, row2, warp, COLUMNS, WARPS, EARLY)
        _hand_over(then, LATE, THEN, WARPS)
        store_tile(out, residual, over_warps(acc, eights, WARPS), m_first, rows, at, width, eights, ADD)
    elif NT == 0:
        at, part = whole_tile(at, width), tl.program_id(0)
        single = turn_products(
            single_address(x, WARPS), codes, high, scales, supers, (at + g).to(tl.int64), warp, part,
            COLUMNS, TYPE, WARPS, PARTS, EARLY,
        )  # fmt: skip
        _hand_over(then, LATE, THEN, WARPS)
        store_single(out + part * width, residual, single_over_warps(single, WARPS), at, width, ADD)
    else:
        m = tl.program_id(0) * 8 * NT + 8 * tl.arange(0, NT)[:, None] + g
        address = (x + tl.minimum(m, rows - 1).to(tl.int64) * x_stride + 4 * t).to(tl.int64)
        acc, acc2 = tile_products(
            address, codes, high, scales, supers, row, row2, row3, row4, warp,
            COLUMNS, TYPE, WARPS, TILES, AHEAD, EARLY,
        )  # fmt: skip
        m_first = tl.program_id(0) * 8 * NT
        store_tile(out, residual, over_warps(acc, NT, WARPS), m_first, rows, at, width, NT, ADD)
        if TILES == 2:
            store_tile(out, residual, over_warps(acc2, NT, WARPS), m_first, rows, at + 16, width, NT, ADD)


@triton.jit
def whole_tile(at, width):
    """The last 16 rows for those that would begin later: what two programs compute is the same."""
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


@reads_much
@triton.jit(do_not_specialize=["rows", "n0", "n1", "n2", "n3", "first"])
def _products_kernel(
    x, x_stride, rows, residual,
    out0, codes0, high0, scales0, supers0, width0,
    out1, codes1, high1, scales1, supers1, width1,
    out2, codes2, high2, scales2, supers2, width2,
    out3, codes3, high3, scales3, supers3, width3,
    p0, n0, p1, n1, p2, n2, p3, n3, first,
    COLUMNS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr, TYPE3: tl.constexpr,
    ADD: tl.constexpr, NT: tl.constexpr, TILES: tl.constexpr, WARPS: tl.constexpr, PARTS: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr, LATE: tl.constexpr, THEN: tl.constexpr,
):  # fmt: skip
    """Up to four matrices behind one another; a program belongs to one of them.

    EARLY: see `starting_early`. LATE: the launch behind is let in when every program has its sums, not when all have
    begun. THEN: p0 … are planes of the matrix that it reads. PARTS: of the columns of the only matrix, each with an
    output of its own; with one row of x only.
    """
    if EARLY and not LATE:
        gdc_launch_dependents()
    then = p0, n0, p1, n1, p2, n2, p3, n3, first
    pid = tl.program_id(1)
    end = tl.cdiv(width0, outputs_of(TYPE0, TILES))
    if pid < end:
        _segment(
            x, x_stride, rows, residual, out0, codes0, high0, scales0, supers0, width0, pid, then,
            COLUMNS, TYPE0, ADD, NT, TILES, WARPS, PARTS, AHEAD, EARLY, LATE, THEN,
        )  # fmt: skip
    if TYPE1 != "none":
        pid -= end
        end = tl.cdiv(width1, outputs_of(TYPE1, TILES))
        if (pid >= 0) & (pid < end):
            _segment(
                x, x_stride, rows, residual, out1, codes1, high1, scales1, supers1, width1, pid, then,
                COLUMNS, TYPE1, False, NT, TILES, WARPS, PARTS, AHEAD, EARLY, LATE, THEN,
            )  # fmt: skip
    if TYPE2 != "none":
        pid -= end
        end = tl.cdiv(width2, outputs_of(TYPE2, TILES))
        if (pid >= 0) & (pid < end):
            _segment(
                x, x_stride, rows, residual, out2, codes2, high2, scales2, supers2, width2, pid, then,
                COLUMNS, TYPE2, False, NT, TILES, WARPS, PARTS, AHEAD, EARLY, LATE, THEN,
            )  # fmt: skip
    if TYPE3 != "none":
        pid -= end
        if pid >= 0:
            _segment(
                x, x_stride, rows, residual, out3, codes3, high3, scales3, supers3, width3, pid, then,
                COLUMNS, TYPE3, False, NT, TILES, WARPS, PARTS, AHEAD, EARLY, LATE, THEN,
            )  # fmt: skip


@reads_much
@triton.jit(do_not_specialize=["rows", "n0", "n1", "n2", "n3", "first"])
def _gated_products_kernel(
    x, x_stride, rows, out, width, codes, high, scales, supers, up_codes, up_high, up_scales, up_supers,
    p0, n0, p1, n1, p2, n2, p3, n3, first,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, NT: tl.constexpr, WARPS: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr, LATE: tl.constexpr, THEN: tl.constexpr,
):  # fmt: skip
    """silu(gate x) · (up x): 16 outputs for 8 · NT rows of x; even warps take gate, odd ones up."""
    if EARLY and not LATE:
        gdc_launch_dependents()
    at = tl.program_id(1) * 16
    g, t, warp = threads(WARPS)
    is_up = warp % 2 == 1
    codes = tl.where(is_up, up_codes, codes)
    high = tl.where(is_up, up_high, high)
    scales = tl.where(is_up, up_scales, scales)
    supers = tl.where(is_up, up_supers, supers)
    if NT == 0:
        at = whole_tile(at, width)
        single = turn_products(
            single_address(x, WARPS), codes, high, scales, supers, (at + g).to(tl.int64), warp // 2, 0,
            COLUMNS, TYPE, WARPS // 2, 1, EARLY,
        )  # fmt: skip
        _hand_over((p0, n0, p1, n1, p2, n2, p3, n3, first), LATE, THEN, WARPS)
        store_single(out, out, single_gated_over_warps(single, WARPS), at, width, False)
    else:
        row, row2, _, _ = rows_of_tiles(at + g, width)
        m = tl.program_id(0) * 8 * NT + 8 * tl.arange(0, NT)[:, None] + g
        address = (x + tl.minimum(m, rows - 1).to(tl.int64) * x_stride + 4 * t).to(tl.int64)
        acc, _ = tile_products(
            address, codes, high, scales, supers, row, row2, row, row2, warp // 2,
            COLUMNS, TYPE, WARPS // 2, 1, AHEAD, EARLY,
        )  # fmt: skip
        m_first = tl.program_id(0) * 8 * NT
        store_tile(out, out, gated_over_warps(acc, NT, WARPS), m_first, rows, at, width, NT, False)


class Lineup(NamedTuple):
    """The matrices of one launch, and where their outputs go."""

    widths: list[int]
    types: list[str]  # "dense": bfloat16 values
    outs: list[Tensor]
    residual: Tensor  # of the first; any where there is none
    arguments: list[Tensor | int]  # of SEGMENTS matrices: output, planes, width

    @property
    def kinds(self) -> list[str]:
        """Of SEGMENTS matrices."""
        return self.types + ["none"] * (SEGMENTS - len(self.types))

    def tiles(self, dense: bool, outputs: int) -> int:
        """Tiles of so many outputs in the matrices that are dense, or in those that are not."""
        pairs = zip(self.widths, self.types, strict=True)
        return sum(triton.cdiv(width, outputs) for width, type in pairs if (type == "dense") == dense)


def line_up(x: Tensor, weights: Sequence[Packed | Tensor], residual: Tensor | None, parts: int = 1) -> Lineup:
    """parts: of a single row through the only matrix; its output is then [parts, 1, out] in float32."""
    widths = [weight.shape[0] if isinstance(weight, Tensor) else weight.rows for weight in weights]
    types = ["dense" if isinstance(weight, Tensor) else weight.type for weight in weights]
    dtypes = [x.dtype if residual is None else residual.dtype] + [x.dtype] * (len(weights) - 1)
    outs = [torch.empty(len(x), n, dtype=dtype, device=x.device) for n, dtype in zip(widths, dtypes, strict=True)]
    if parts > 1:
        outs = [torch.empty(parts, 1, widths[0], dtype=torch.float32, device=x.device)]
    arguments: list[Tensor | int] = []
    for weight, out, width in zip(weights, outs, widths, strict=True):
        arguments += [out, *planes_of(weight), width]
    arguments += arguments[:6] * (SEGMENTS - len(weights))  # of absent matrices, never read
    return Lineup(widths, types, outs, outs[0] if residual is None else residual, arguments)


def readable(x: Tensor) -> Tensor:
    """x as the kernels read it: rows of values side by side, on 8-byte edges."""
    return x if x.stride(1) == 1 and x.stride(0) % 4 == 0 else x.contiguous()


def multiply(
    x: Tensor,
    weights: Sequence[Packed | Tensor],
    residual: Tensor | None = None,
    config: FewConfig | None = None,
    then: Packed | None = None,
) -> list[Tensor]:
    """x [rows, in] through up to SEGMENTS matrices in one launch; residual belongs to the first.

    A tensor is a matrix of bfloat16 values; such programs take long, and should stand first. `then` is the matrix that
    will be read next: what its launch begins with is fetched while this one ends. Where the config has parts, the only
    output is [parts, 1, out] in float32, to be added up by whoever reads it.
    """
    rows, columns = x.shape
    x, line = readable(x), line_up(x, weights, residual, 1 if config is None else config.parts)
    config = config or few_config(sum(line.widths), columns, rows, six_bits="Q6_K" in line.types)
    assert config.parts == 1 or (len(weights), residual) == (1, None), "parts are of one matrix, without a residual"
    programs = line.tiles(True, 16) + line.tiles(False, 16 * config.tiles)
    _products_kernel[(_programs(rows, config), programs)](
        x, x.stride(0), rows, line.residual, *line.arguments, *_shares_of(then, programs, x), columns, *line.kinds,
        ADD=residual is not None, NT=config.eights, TILES=config.tiles, WARPS=config.warps, PARTS=config.parts,
        AHEAD=config.ahead, num_warps=config.warps, num_stages=1, **letting_in(x, sum(line.widths), then),
    )  # fmt: skip
    return line.outs


def swiglu(x: Tensor, gate: Packed, up: Packed, config: FewConfig | None = None, then: Packed | None = None) -> Tensor:
    """silu(gate x) · (up x); both matrices of one type. More than eight rows are faster in `shares`."""
    rows, columns = x.shape
    config = config or few_config(gate.rows, columns, rows, paired=True, six_bits=gate.type == "Q6_K")
    x = readable(x)
    out = torch.empty(rows, gate.rows, dtype=x.dtype, device=x.device)
    programs = triton.cdiv(gate.rows, 16)
    _gated_products_kernel[(_programs(rows, config), programs)](
        x, x.stride(0), rows, out, gate.rows, *planes_of(gate), *planes_of(up), *_shares_of(then, programs, x),
        columns, gate.type,
        NT=config.eights, WARPS=config.warps, AHEAD=config.ahead,
        num_warps=config.warps, num_stages=1, **letting_in(x, 2 * gate.rows, then),
    )  # fmt: skip
    return out


def starting(device: torch.device, values: int) -> dict[str, bool]:
    """Of several rows, a launch that runs long does not begin early: it would lose by it (docs/LOG.md)."""
    return starting_early(device) if values < LARGE else {"EARLY": False}


def letting_in(x: Tensor, width: int, then: Packed | None) -> dict[str, bool]:
    """When a launch of so many outputs begins, when it lets the next one in, and whether it fetches for it.

    Of one row always early, and late: whatever is let in sooner waits in places that this launch could use, takes
    them unevenly (four programs on one multiprocessor, none on another), and lets in the launch behind it, too.
    """
    rows, columns = x.shape
    early = starting_early(x.device) if rows == 1 else starting(x.device, width * columns)
    late = rows == 1 and early["EARLY"]
    return {**early, "LATE": late, "THEN": late and then is not None}


def _shares_of(then: Packed | None, programs: int, x: Tensor) -> list[Tensor | int]:
    """Its planes as bytes, each with the share of it that a program brings, and the first program that does.

    The first rows of all planes: they are what the first programs of the next launch read.
    """
    if then is None:
        return [x, 0, x, 0, x, 0, x, 0, 0]
    bringers = min(BRINGERS, programs)
    rows = min(then.rows, BROUGHT * then.rows // then.nbytes)
    arguments: list[Tensor | int] = []
    for plane in (then.codes, then.high, then.scales, then.supers):
        nbytes = 0 if plane is None else min(ONE_GO, plane.nbytes // then.rows * rows // bringers // 16 * 16)
        arguments += [(then.codes if plane is None else plane).view(torch.uint8), nbytes]
    return [*arguments, programs - bringers]


def _programs(rows: int, config: FewConfig) -> int:
    """Programs beside one another for all rows of x, or for all parts of the only one."""
    assert config.eights > 0 or (rows, config.tiles) == (1, 1), f"the form for a single row was asked for {rows}"
    return triton.cdiv(rows, 8 * config.eights) if config.eights else config.parts


def planes_of(weight: Packed | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if isinstance(weight, Tensor):
        assert weight.dtype == torch.bfloat16 and weight.is_contiguous(), f"not {weight.dtype} {weight.stride()}"
        return weight, weight, weight, weight
    assert weight.supers is not None, f"{weight.type} has supers"
    return weight.codes, weight.codes if weight.high is None else weight.high, weight.scales, weight.supers

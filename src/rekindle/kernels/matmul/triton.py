"""Products with packed weights on a GPU.

Up to `nvidia.FEW_ROWS` rows of bfloat16 through grouped types take the way of `nvidia`, `laid` or `shares`, whichever
is fastest, on NVIDIA's cards. Elsewhere one row is bound by reading weights: every thread multiplies whole blocks
against a few rows of the matrix, without the matrix units; a few rows go through the matrix units, tile by tile
expanded in registers. Many rows are bound by arithmetic: the matrix is expanded to a scratch buffer and the vendor's
library multiplies.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels.device import starting_early
from rekindle.kernels.matmul import laid, mma, nvidia, shares
from rekindle.kernels.matmul.arrivals import all_arrived, counters
from rekindle.kernels.matmul.dense import product
from rekindle.kernels.matmul.nvidia import SEGMENTS
from rekindle.kernels.matmul.scratch import scratch
from rekindle.kernels.matmul.tiles import block_numbers, dot_blocks, dot_pair, load_weights
from rekindle.kernels.matmul.types import Matrix, Packed

T = TypeVar("T")

MANY_ROWS = 128  # from here on a matrix is expanded whole
SCRATCH = 1 << 28  # weights expanded at a time, of a matrix or of a layer's experts: 512 MiB in 16 bits
JOINING_ROWS = 256  # of a dense matrix that goes in the launch of quantised ones
ENOUGH_WARPS = 2048  # in flight, to keep the memory of a large card busy


class RowConfig(NamedTuple):
    """One row: rows and blocks of a tile. A warp covers 32 blocks, so warps lie side by side along a row."""

    rows: int
    blocks: int
    warps: int


class RowsConfig(NamedTuple):
    """A few rows: output rows and blocks of a tile, parts the sum is cut into (0: as many as fill the card)."""

    out: int
    blocks: int
    split: int
    warps: int
    stages: int


def row_config(type: str, out: int, columns: int) -> RowConfig:
    """Small matrices take more warps beside one another along each row, so that enough loads are in flight."""
    blocks = columns // 32
    warps = next((w for w in (4, 2) if blocks % (32 * w) == 0), 1)
    while out // 4 * warps < ENOUGH_WARPS and warps < 4 and blocks > 32 * warps:
        warps *= 2
    return RowConfig(4, 32 * warps, warps)


def rows_config(type: str, out: int, columns: int, rows: int) -> RowsConfig:
    return RowsConfig(64, 4, 0, 4, 3)


def multiply(x: Tensor, weight: Packed, residual: Tensor | None = None, then: Matrix | None = None) -> Tensor:
    """x [rows, in] -> [rows, out] in x.dtype, or added to residual [rows, out] in its type."""
    rows = x.shape[0]
    if by_units(x, weight):
        return _products(x, [weight], residual, then)[0] if few(rows) else many_rows(x, weight, residual)
    if rows == 1:
        return launch_row(x, [weight], residual)[0]
    if rows < MANY_ROWS:
        return few_rows(x, weight, residual=residual)
    return many_rows(x, weight, residual)


def multiply_in_parts(x: Tensor, weight: Packed, then: Matrix | None = None) -> Tensor:
    config = nvidia.parts_config(weight) if x.shape[0] == 1 and by_units(x, weight) else None
    if config is None:
        return multiply(x, weight, then=then)
    return nvidia.multiply(x, [weight], config=config, then=_planes_to_come(x, then))[0]


def multiply_by_all(x: Tensor, matrices: list[Matrix], then: Matrix | None = None) -> list[Tensor]:
    """A few rows through several matrices, in as few launches as may be."""
    outs: dict[int, Tensor] = {}
    units = {i: m.packed for i, m in enumerate(matrices) if m.packed is not None and by_units(x, m.packed)}
    dense = {i: m.values for i, m in enumerate(matrices) if m.packed is None and joins_units(m.values)} if units else {}
    launched: dict[int, Packed | Tensor] = {**dense, **units}
    for some in _by_fours(list(launched)):
        outs |= zip(some, _products(x, [launched[i] for i in some], then=then), strict=True)
    rest = [i for i in range(len(matrices)) if i not in launched]
    if x.shape[0] == 1:
        outs |= zip(rest, multiply_row_by_all(x, [matrices[i] for i in rest]), strict=True)
    else:
        outs |= {i: _multiply_any(x, matrices[i]) for i in rest}
    return [outs[i] for i in range(len(matrices))]


def _products(
    x: Tensor, weights: list[Packed | Tensor], residual: Tensor | None = None, then: Matrix | None = None
) -> list[Tensor]:
    """A few rows through several matrices in one launch of the matrix units."""
    rows, columns = x.shape
    if rows == 1:
        return nvidia.multiply(x, weights, residual, then=_planes_to_come(x, then))
    width = sum(weight.shape[0] if isinstance(weight, Tensor) else weight.rows for weight in weights)
    form = shares if shares.pays(rows, width * columns) else laid if laid.pays(rows, width) else nvidia
    outs: list[Tensor] = form.multiply(x, weights, residual)
    return outs


def joins_units(values: Tensor) -> bool:
    """A dense matrix can go in the launch of quantised ones: of the right type, and small beside them."""
    return values.dtype == torch.bfloat16 and values.is_contiguous() and values.shape[0] <= JOINING_ROWS


def multiply_row_by_all(x: Tensor, matrices: list[Matrix]) -> list[Tensor]:
    """One row through several matrices, SEGMENTS of them in a launch, without the matrix units."""
    weights = [matrix.values if matrix.packed is None else matrix.packed for matrix in matrices]
    return [out for part in _by_fours(weights) for out in launch_row(x, part)]


def _planes_to_come(x: Tensor, then: Matrix | None) -> Packed | None:
    """Of the matrix that will be read next, if it goes through the matrix units."""
    return then.packed if then is not None and then.packed is not None and by_units(x, then.packed) else None


def swiglu(x: Tensor, gate: Packed, up: Packed, then: Matrix | None = None) -> Tensor:
    """silu(gate x) · (up x), [rows, width] in x.dtype."""
    rows = x.shape[0]
    if rows == 1 and gate.type == up.type and by_units(x, gate):
        return nvidia.swiglu(x, gate, up, then=_planes_to_come(x, then))
    if gate.type == up.type and by_units(x, gate) and few(rows):
        return (shares if rows >= shares.LEAST_ROWS else nvidia).swiglu(x, gate, up)
    if rows < MANY_ROWS and gate.type == up.type and not by_units(x, gate):
        return swiglu_row(x, gate, up) if rows == 1 else few_rows(x, gate, up)
    return silu_mul(multiply(x, gate), multiply(x, up))


def by_units(x: Tensor, *weights: Packed) -> bool:
    """All of these can be multiplied by x in NVIDIA's matrix units."""
    return mma.available(x) and all(mma.takes(weight) for weight in weights)


def few(rows: int) -> bool:
    return rows <= nvidia.FEW_ROWS


def _multiply_any(x: Tensor, matrix: Matrix) -> Tensor:
    return product(x, matrix.values) if matrix.packed is None else multiply(x, matrix.packed)


def _by_fours(items: list[T]) -> list[list[T]]:
    return [items[at : at + SEGMENTS] for at in range(0, len(items), SEGMENTS)]


# ---- one row -----------------------------------------------------------------------------------------------------


@triton.jit
def _row_tile(
    x, out, residual, codes, high, scales, supers, rows, nought, pid,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr,
    MASKED: tl.constexpr, RAGGED: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """BN outputs of one matrix."""
    n = pid * BN + tl.arange(0, BN)
    row = tl.minimum(n, rows - 1) if RAGGED else n  # rows past the end repeat the last and are not stored
    if TYPE == "dense":
        y = _dense_row_tile(x, codes, row, COLUMNS, BN, BB)
    else:
        blocks: tl.constexpr = COLUMNS // 32
        acc = tl.zeros([BB, BN], tl.float32)
        for start in range(0, blocks, BB):
            b = start + tl.arange(0, BB)
            b_mask = b < blocks
            blk = block_numbers(b, row, blocks)
            mask = b_mask[:, None] & (row >= 0)[None, :]
            acc += dot_blocks(x, codes, high, scales, supers, b, b_mask, blk, mask, nought, TYPE, MASKED)
        y = tl.sum(acc, 0)
    if ADD:
        y += tl.load(residual + n, n < rows, other=0.0).to(tl.float32)
    tl.store(out + n, y, n < rows)


@triton.jit
def _dense_row_tile(x, weight, row, columns: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr):
    acc = tl.zeros([BN, BB * 8], tl.float32)
    for start in range(0, columns, BB * 8):
        k = start + tl.arange(0, BB * 8)
        w = tl.load(weight + row[:, None].to(tl.int64) * columns + k[None, :], (k < columns)[None, :], other=0.0)
        acc += w.to(tl.float32) * tl.load(x + k, k < columns, other=0.0).to(tl.float32)[None, :]
    return tl.sum(acc, 1)


@triton.jit
def _row_kernel(
    x, nought, residual,
    out0, codes0, high0, scales0, supers0, rows0,
    out1, codes1, high1, scales1, supers1, rows1,
    out2, codes2, high2, scales2, supers2, rows2,
    out3, codes3, high3, scales3, supers3, rows3,
    COLUMNS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr, TYPE3: tl.constexpr,
    BN: tl.constexpr, BB: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr,
    ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Up to four matrices behind one another; a program belongs to one of them."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    pid = tl.program_id(0)
    end = tl.cdiv(rows0, BN)
    if pid < end:
        _row_tile(
            x,
            out0,
            residual,
            codes0,
            high0,
            scales0,
            supers0,
            rows0,
            nought,
            pid,
            COLUMNS,
            TYPE0,
            BN,
            BB,
            MASKED,
            RAGGED,
            ADD,
        )
    if TYPE1 != "none":
        pid -= end
        end = tl.cdiv(rows1, BN)
        if (pid >= 0) & (pid < end):
            _row_tile(
                x,
                out1,
                residual,
                codes1,
                high1,
                scales1,
                supers1,
                rows1,
                nought,
                pid,
                COLUMNS,
                TYPE1,
                BN,
                BB,
                MASKED,
                RAGGED,
                0,
            )
    if TYPE2 != "none":
        pid -= end
        end = tl.cdiv(rows2, BN)
        if (pid >= 0) & (pid < end):
            _row_tile(
                x,
                out2,
                residual,
                codes2,
                high2,
                scales2,
                supers2,
                rows2,
                nought,
                pid,
                COLUMNS,
                TYPE2,
                BN,
                BB,
                MASKED,
                RAGGED,
                0,
            )
    if TYPE3 != "none":
        pid -= end
        if pid >= 0:
            _row_tile(
                x,
                out3,
                residual,
                codes3,
                high3,
                scales3,
                supers3,
                rows3,
                nought,
                pid,
                COLUMNS,
                TYPE3,
                BN,
                BB,
                MASKED,
                RAGGED,
                0,
            )


def multiply_row(x: Tensor, weight: Packed, config: RowConfig | None = None) -> Tensor:
    """x [1, in] -> [1, out]."""
    return launch_row(x, [weight], config=config)[0]


def launch_row(
    x: Tensor, weights: list[Packed | Tensor], residual: Tensor | None = None, config: RowConfig | None = None
) -> list[Tensor]:
    columns = x.shape[1]
    sizes = [weight.shape[0] if isinstance(weight, Tensor) else weight.rows for weight in weights]
    types = [_type_of(weight) for weight in weights]
    config = config or row_config(types[0], sum(sizes), columns)
    outs = [
        torch.empty(1, size, dtype=x.dtype if residual is None else residual.dtype, device=x.device) for size in sizes
    ]
    arguments: list[Tensor | int] = []
    for weight, out, size in zip(weights, outs, sizes, strict=True):
        arguments += [out, *planes_of(weight), size]
    arguments += arguments[:6] * (SEGMENTS - len(weights))  # of absent matrices, never read
    types += ["none"] * (SEGMENTS - len(weights))
    _row_kernel[(sum(triton.cdiv(size, config.rows) for size in sizes),)](
        x, 0, outs[0] if residual is None else residual, *arguments, columns, *types,
        BN=config.rows, BB=config.blocks, MASKED=columns % (32 * config.blocks) != 0,
        RAGGED=any(size % config.rows for size in sizes), ADD=residual is not None,
        num_warps=config.warps, **starting_early(x.device),
    )  # fmt: skip
    return outs


def _type_of(weight: Packed | Tensor) -> str:
    return "dense" if isinstance(weight, Tensor) else weight.type


def planes_of(weight: Packed | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four planes for a launch; the codes stand in for a plane that the type does not have."""
    if isinstance(weight, Tensor):
        return weight, weight, weight, weight
    codes = weight.codes
    return (
        codes,
        codes if weight.high is None else weight.high,
        weight.scales,
        (codes if weight.supers is None else weight.supers),
    )


@triton.jit
def _swiglu_row_kernel(
    x, out, rows, nought,
    codes, high, scales, supers, up_codes, up_high, up_scales, up_supers,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr,
    BN: tl.constexpr, BB: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """BN outputs: a tile of 2 · BN rows, gate and up by turns, shares what is read of x."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    blocks: tl.constexpr = COLUMNS // 32
    t = tl.arange(0, 2 * BN)
    row = tl.program_id(0) * BN + t // 2
    if RAGGED:
        row = tl.minimum(row, rows - 1)
    is_up = (t % 2 == 1)[None, :]
    codes = tl.where(is_up, up_codes, codes)
    high = tl.where(is_up, up_high, high)
    scales = tl.where(is_up, up_scales, scales)
    supers = tl.where(is_up, up_supers, supers)
    acc = tl.zeros([BB, 2 * BN], tl.float32)
    for start in range(0, blocks, BB):
        b = start + tl.arange(0, BB)
        b_mask = b < blocks
        blk = block_numbers(b, row, blocks)
        mask = b_mask[:, None] & (row >= 0)[None, :]
        acc += dot_blocks(x, codes, high, scales, supers, b, b_mask, blk, mask, nought, TYPE, MASKED)
    gate, up = tl.split(tl.sum(acc, 0).reshape(BN, 2))
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(out + n, gate * tl.sigmoid(gate) * up, n < rows)


def swiglu_row(x: Tensor, gate: Packed, up: Packed, config: RowConfig | None = None) -> Tensor:
    """x [1, in] -> silu(gate x) · (up x) [1, width]; both matrices of one type."""
    config = config or row_config(gate.type, 2 * gate.rows, gate.columns)
    out = torch.empty(1, gate.rows, dtype=x.dtype, device=x.device)
    half = max(1, config.rows // 2)
    _swiglu_row_kernel[(triton.cdiv(gate.rows, half),)](
        x, out, gate.rows, 0, *planes_of(gate), *planes_of(up), gate.columns, gate.type,
        BN=half, BB=config.blocks, MASKED=gate.columns % (32 * config.blocks) != 0, RAGGED=gate.rows % half != 0,
        num_warps=config.warps, **starting_early(x.device),
    )  # fmt: skip
    return out


# ---- a few rows --------------------------------------------------------------------------------------------------


@triton.jit
def _rows_kernel(
    x, x_stride, rows, out, residual, partials, arrived, width, nought,
    codes, high, scales, supers, up_codes, up_high, up_scales, up_supers,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, PAIRED: tl.constexpr, ADD: tl.constexpr, SPLIT: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, BB: tl.constexpr, MASKED: tl.constexpr, EXACT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A tile [BM rows of x, BN outputs], or its share of the sum over columns."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    pid_n, pid_m, pid_k = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    DTYPE: tl.constexpr = x.dtype.element_ty
    blocks: tl.constexpr = COLUMNS // 32
    n = pid_n * BN + tl.arange(0, BN)
    m = pid_m * BM + tl.arange(0, BM)
    row = tl.minimum(n, width - 1)
    p_x = x + tl.minimum(m, rows - 1)[:, None].to(tl.int64) * x_stride + tl.arange(0, BB * 32)[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    acc_up = acc
    share = tl.cdiv(tl.cdiv(blocks, BB), SPLIT) * BB
    for start in range(pid_k * share, tl.minimum(blocks, (pid_k + 1) * share), BB):
        b = start + tl.arange(0, BB)
        blk = b[:, None] + row[None, :] * blocks
        mask = (b < blocks)[:, None] & (row >= 0)[None, :]
        if MASKED:
            b_x = tl.load(p_x + start * 32, (start * 32 + tl.arange(0, BB * 32) < COLUMNS)[None, :], other=0.0)
        else:
            b_x = tl.load(p_x + start * 32)
        b_w = load_weights(codes, high, scales, supers, blk, mask, nought, TYPE, DTYPE, MASKED)
        acc = dot_pair(b_w, b_x, acc, EXACT)
        if PAIRED:
            b_up = load_weights(up_codes, up_high, up_scales, up_supers, blk, mask, nought, TYPE, DTYPE, MASKED)
            acc_up = dot_pair(b_up, b_x, acc_up, EXACT)
    if PAIRED:
        acc = acc * tl.sigmoid(acc) * acc_up
    y = tl.trans(acc)  # [BM, BN]
    o_y = m[:, None].to(tl.int64) * width + n[None, :]
    mask_y = (m < rows)[:, None] & (n < width)[None, :]
    if SPLIT == 1:
        if ADD:
            y += tl.load(residual + o_y, mask_y, other=0.0).to(tl.float32)
        tl.store(out + o_y, y, mask_y)
    else:
        tl.store(partials + tl.cast(pid_k, tl.int64) * rows * width + o_y, y, mask_y)
        if all_arrived(arrived + pid_m * tl.num_programs(0) + pid_n, SPLIT):
            y = tl.zeros([BM, BN], tl.float32)
            for part in tl.static_range(SPLIT):  # always in this order: the sum is the same on every run
                y += tl.load(partials + part * rows * width + o_y, mask_y, other=0.0, cache_modifier=".cg")
            if ADD:
                y += tl.load(residual + o_y, mask_y, other=0.0).to(tl.float32)
            tl.store(out + o_y, y, mask_y)


def few_rows(
    x: Tensor,
    weight: Packed,
    up: Packed | None = None,
    residual: Tensor | None = None,
    config: RowsConfig | None = None,
) -> Tensor:
    """x [rows, in] -> [rows, out]; with `up`, silu(weight x) · (up x)."""
    rows, columns = x.shape
    width = weight.rows
    config = config or rows_config(weight.type, width, columns, rows)
    tile = min(64, max(16, triton.next_power_of_2(rows)))
    grid = (triton.cdiv(width, config.out), triton.cdiv(rows, tile))
    split = 1 if up is not None else config.split or _fill(grid[0] * grid[1], columns // 32 // config.blocks)
    out = torch.empty(rows, width, dtype=x.dtype if residual is None else residual.dtype, device=x.device)
    partials = out if split == 1 else torch.empty(split, rows, width, dtype=torch.float32, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    _rows_kernel[(*grid, split)](
        x, x.stride(0), rows, out, out if residual is None else residual, partials, counters(x.device), width, 0,
        *planes_of(weight), *planes_of(weight if up is None else up),
        columns, weight.type, PAIRED=up is not None, ADD=residual is not None, SPLIT=split, BN=config.out, BM=tile,
        BB=config.blocks, MASKED=columns % (32 * config.blocks) != 0, EXACT=x.dtype == torch.float32,
        num_warps=config.warps, num_stages=config.stages, **starting_early(x.device),
    )  # fmt: skip
    return out


def _fill(tiles: int, steps: int, wanted: int = 512) -> int:
    """Parts of the sum so that about `wanted` programs run: a power of two, with two steps at least in each."""
    split = 1
    while tiles * split * 2 <= wanted and steps >= 4 * split and split < 16:
        split *= 2
    return split


# ---- many rows ---------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def _expand_kernel(
    out, ids, codes, high, scales, supers, rows, blocks, nought,
    TYPE: tl.constexpr, GATHER: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, MASKED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """out[n] = the values of row n, or of row ids[n]."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(n, rows - 1)
    if GATHER:
        row = tl.load(ids + row).to(tl.int32)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    blk = b[:, None] + row[None, :] * blocks
    mask = (b < blocks)[:, None] & (row >= 0)[None, :]
    values = load_weights(codes, high, scales, supers, blk, mask, nought, TYPE, out.dtype.element_ty, MASKED)
    k = tl.program_id(1) * BB * 32 + tl.arange(0, BB * 32)
    mask_out = (n < rows)[:, None] & (k < blocks * 32)[None, :]
    tl.store(out + n[:, None].to(tl.int64) * blocks * 32 + k[None, :], values, mask_out)


class ExpandConfig(NamedTuple):
    rows: int
    blocks: int
    warps: int


EXPAND = ExpandConfig(8, 32, 4)


def expand(weight: Packed, out: Tensor, config: ExpandConfig = EXPAND) -> Tensor:
    """The weights as values into out [rows, columns]."""
    blocks = weight.columns // 32
    _expand_kernel[(triton.cdiv(weight.rows, config.rows), triton.cdiv(blocks, config.blocks))](
        out, out, *planes_of(weight), weight.rows, blocks, 0, weight.type, GATHER=False,
        BN=config.rows, BB=config.blocks, MASKED=blocks % config.blocks != 0, num_warps=config.warps,
        **starting_early(out.device),
    )  # fmt: skip
    return out


def gather_rows(weight: Packed, ids: Tensor) -> Tensor:
    """The rows `ids` (any integers, [n]) as float32 [n, columns]."""
    blocks = weight.columns // 32
    out = torch.empty(ids.shape[0], weight.columns, dtype=torch.float32, device=ids.device)
    _expand_kernel[(ids.shape[0], triton.cdiv(blocks, 32))](
        out, ids, *planes_of(weight), ids.shape[0], blocks, 0, weight.type, GATHER=True,
        BN=1, BB=32, MASKED=blocks % 32 != 0, num_warps=1, **starting_early(out.device),
    )  # fmt: skip
    return out


def many_rows(x: Tensor, weight: Packed, residual: Tensor | None = None) -> Tensor:
    """Expand, then multiply through the vendor's library; slab by slab where the matrix is larger than the scratch."""
    step = max(1, SCRATCH // weight.columns)
    slabs = [row_slab(weight, at, min(weight.rows, at + step)) for at in range(0, weight.rows, step)]
    if len(slabs) == 1:
        y = linear(x, expand(weight, scratch(x, weight.rows, weight.columns)))
        return y if residual is None else residual + y
    outs = [linear(x, expand(slab, scratch(x, slab.rows, slab.columns))) for slab in slabs]
    y = torch.cat(outs, dim=1)
    return y if residual is None else residual + y


def row_slab(weight: Packed, start: int, stop: int) -> Packed:
    """Rows [start, stop), the planes shared."""
    return Packed(
        weight.type, stop - start, weight.columns, weight.codes[start:stop],
        None if weight.high is None else weight.high[start:stop], weight.scales[start:stop],
        None if weight.supers is None else weight.supers[start:stop],
    )  # fmt: skip


@triton.jit
def _silu_mul_kernel(gate, up, out, size, B: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    o = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    g = tl.load(gate + o, o < size, other=0.0).to(tl.float32)
    u = tl.load(up + o, o < size, other=0.0).to(tl.float32)
    tl.store(out + o, g * tl.sigmoid(g) * u, o < size)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, both contiguous and of one shape; into gate."""
    _silu_mul_kernel[(triton.cdiv(gate.numel(), 4096),)](
        gate, up, gate, gate.numel(), B=4096, num_warps=8, **starting_early(gate.device)
    )  # fmt: skip
    return gate

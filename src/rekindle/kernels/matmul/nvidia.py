"""One to FEW_ROWS rows through grouped planes in NVIDIA's matrix units; `mma` holds the pieces."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from rekindle.kernels.matmul.mma import (
    gated_over_warps,
    over_warps,
    single_address,
    single_gated_over_warps,
    single_over_warps,
    store_single,
    store_tile,
    threads,
    tile_products,
    tile_products_single,
)
from rekindle.kernels.matmul.types import Packed

FEW_ROWS = 32  # up to here this beats expanding the matrix first
SEGMENTS = 4  # matrices of one launch
WIDE = 8192  # outputs of a launch that fill a large card with four warps each


class FewConfig(NamedTuple):
    """Warps that share 16 rows of the matrix, side by side along the columns; eights of rows of x in one program,
    or 0 for the form that takes a single row.

    `ahead`: a warp asks for its next step before it multiplies this one. `early` (Hopper on): programs take their
    places and ask for their first weights while the launch before still runs.
    """

    warps: int
    eights: int
    ahead: bool
    early: bool = False

    @property
    def launch(self) -> dict[str, int | bool]:
        return {"num_warps": self.warps, "num_stages": 1} | ({"launch_pdl": True} if self.early else {})


def few_config(width: int, columns: int, rows: int, paired: bool = False, six_bits: bool = False) -> FewConfig:
    """The fastest of those timed on an H200 (docs/LOG.md). `six_bits`: one of the matrices is Q6_K, which takes so many
    instructions per weight that asking for the next step ahead pays."""
    if rows > 16:
        warps, eights, ahead = 2 * (1 + paired), 4, False
    elif rows > 8:
        warps, eights, ahead = 2 * (1 + paired), 2, True
    elif six_bits or rows > 1:
        warps, eights, ahead = 4, int(rows > 1), six_bits
    else:
        # A narrow matrix takes more warps beside one another, so that enough loads are in flight.
        warps, eights, ahead = (8 if paired or width < WIDE else 4), 0, False
    most = (1 + paired) * (1 << (columns // 256).bit_length() - 1)  # no warp without a step of its own
    return FewConfig(min(warps, most), eights, ahead)


@triton.jit
def _segment(
    x, x_stride, rows, residual, out, codes, high, scales, supers, width, pid,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, ADD: tl.constexpr, NT: tl.constexpr, WARPS: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """16 outputs of one matrix for 8 · NT rows of x, or for the only row."""
    g, t, warp = threads(WARPS)
    row = tl.minimum(pid * 16 + g, width - 1).to(tl.int64)
    row2 = tl.minimum(pid * 16 + g + 8, width - 1).to(tl.int64)
    if NT == 0:
        single = tile_products_single(
            single_address(x, WARPS), codes, high, scales, supers, row, row2, warp, COLUMNS, TYPE, WARPS, AHEAD, EARLY
        )  # fmt: skip
        store_single(out, residual, single_over_warps(single, WARPS), pid * 16, width, ADD)
    else:
        m = tl.program_id(0) * 8 * NT + 8 * tl.arange(0, NT)[:, None] + g
        address = (x + tl.minimum(m, rows - 1).to(tl.int64) * x_stride + 4 * t).to(tl.int64)
        acc = tile_products(
            address, codes, high, scales, supers, row, row2, warp, COLUMNS, TYPE, WARPS, AHEAD, EARLY
        )  # fmt: skip
        acc = over_warps(acc, NT, WARPS)
        store_tile(out, residual, acc, tl.program_id(0) * 8 * NT, rows, pid * 16, width, NT, ADD)


@triton.jit
def _products_kernel(
    x, x_stride, rows, residual,
    out0, codes0, high0, scales0, supers0, width0,
    out1, codes1, high1, scales1, supers1, width1,
    out2, codes2, high2, scales2, supers2, width2,
    out3, codes3, high3, scales3, supers3, width3,
    COLUMNS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr, TYPE3: tl.constexpr,
    ADD: tl.constexpr, NT: tl.constexpr, WARPS: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Up to four matrices behind one another; a program belongs to one of them."""
    if EARLY:
        gdc_launch_dependents()
    pid = tl.program_id(1)
    end = tl.cdiv(width0, 16)
    if pid < end:
        _segment(
            x, x_stride, rows, residual, out0, codes0, high0, scales0, supers0, width0, pid,
            COLUMNS, TYPE0, ADD, NT, WARPS, AHEAD, EARLY,
        )  # fmt: skip
    if TYPE1 != "none":
        pid -= end
        end = tl.cdiv(width1, 16)
        if (pid >= 0) & (pid < end):
            _segment(
                x, x_stride, rows, residual, out1, codes1, high1, scales1, supers1, width1, pid,
                COLUMNS, TYPE1, False, NT, WARPS, AHEAD, EARLY,
            )  # fmt: skip
    if TYPE2 != "none":
        pid -= end
        end = tl.cdiv(width2, 16)
        if (pid >= 0) & (pid < end):
            _segment(
                x, x_stride, rows, residual, out2, codes2, high2, scales2, supers2, width2, pid,
                COLUMNS, TYPE2, False, NT, WARPS, AHEAD, EARLY,
            )  # fmt: skip
    if TYPE3 != "none":
        pid -= end
        if pid >= 0:
            _segment(
                x, x_stride, rows, residual, out3, codes3, high3, scales3, supers3, width3, pid,
                COLUMNS, TYPE3, False, NT, WARPS, AHEAD, EARLY,
            )  # fmt: skip


@triton.jit
def _gated_products_kernel(
    x, x_stride, rows, out, width, codes, high, scales, supers, up_codes, up_high, up_scales, up_supers,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, NT: tl.constexpr, WARPS: tl.constexpr,
    AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """silu(gate x) · (up x): 16 outputs for 8 · NT rows of x; even warps take gate, odd ones up."""
    if EARLY:
        gdc_launch_dependents()
    pid = tl.program_id(1)
    g, t, warp = threads(WARPS)
    row = tl.minimum(pid * 16 + g, width - 1).to(tl.int64)
    row2 = tl.minimum(pid * 16 + g + 8, width - 1).to(tl.int64)
    is_up = warp % 2 == 1
    codes = tl.where(is_up, up_codes, codes)
    high = tl.where(is_up, up_high, high)
    scales = tl.where(is_up, up_scales, scales)
    supers = tl.where(is_up, up_supers, supers)
    if NT == 0:
        single = tile_products_single(
            single_address(x, WARPS), codes, high, scales, supers, row, row2, warp // 2,
            COLUMNS, TYPE, WARPS // 2, AHEAD, EARLY,
        )  # fmt: skip
        store_single(out, out, single_gated_over_warps(single, WARPS), pid * 16, width, False)
    else:
        m = tl.program_id(0) * 8 * NT + 8 * tl.arange(0, NT)[:, None] + g
        address = (x + tl.minimum(m, rows - 1).to(tl.int64) * x_stride + 4 * t).to(tl.int64)
        acc = tile_products(
            address, codes, high, scales, supers, row, row2, warp // 2, COLUMNS, TYPE, WARPS // 2, AHEAD, EARLY
        )  # fmt: skip
        acc = gated_over_warps(acc, NT, WARPS)
        store_tile(out, out, acc, tl.program_id(0) * 8 * NT, rows, pid * 16, width, NT, False)


def multiply(
    x: Tensor, weights: list[Packed], residual: Tensor | None = None, config: FewConfig | None = None
) -> list[Tensor]:
    """x [rows, in] through up to SEGMENTS matrices in one launch; residual belongs to the first."""
    rows, columns = x.shape
    widths = [weight.rows for weight in weights]
    config = config or few_config(sum(widths), columns, rows, six_bits=any(w.type == "Q6_K" for w in weights))
    x = x if x.stride(1) == 1 and x.stride(0) % 4 == 0 else x.contiguous()
    dtypes = [x.dtype if residual is None else residual.dtype] + [x.dtype] * (len(weights) - 1)
    outs = [torch.empty(rows, n, dtype=dtype, device=x.device) for n, dtype in zip(widths, dtypes, strict=True)]
    arguments: list[Tensor | int] = []
    for weight, out in zip(weights, outs, strict=True):
        arguments += [out, *_planes(weight), weight.rows]
    arguments += arguments[:6] * (SEGMENTS - len(weights))  # of absent matrices, never read
    types = [weight.type for weight in weights] + ["none"] * (SEGMENTS - len(weights))
    grid = (_programs(rows, config), sum(triton.cdiv(n, 16) for n in widths))
    _products_kernel[grid](
        x, x.stride(0), rows, outs[0] if residual is None else residual, *arguments, columns, *types,
        ADD=residual is not None, NT=config.eights, WARPS=config.warps, AHEAD=config.ahead, EARLY=config.early,
        **config.launch,
    )  # fmt: skip
    return outs


def swiglu(x: Tensor, gate: Packed, up: Packed, config: FewConfig | None = None) -> Tensor:
    """silu(gate x) · (up x); both matrices of one type."""
    rows, columns = x.shape
    config = config or few_config(gate.rows, columns, rows, paired=True, six_bits=gate.type == "Q6_K")
    x = x if x.stride(1) == 1 and x.stride(0) % 4 == 0 else x.contiguous()
    out = torch.empty(rows, gate.rows, dtype=x.dtype, device=x.device)
    _gated_products_kernel[(_programs(rows, config), triton.cdiv(gate.rows, 16))](
        x, x.stride(0), rows, out, gate.rows, *_planes(gate), *_planes(up), columns, gate.type,
        NT=config.eights, WARPS=config.warps, AHEAD=config.ahead, EARLY=config.early,
        **config.launch,
    )  # fmt: skip
    return out


def _programs(rows: int, config: FewConfig) -> int:
    """Programs beside one another for all rows of x."""
    assert config.eights > 0 or rows == 1, f"the form for a single row was asked for {rows}"
    return triton.cdiv(rows, max(1, 8 * config.eights))


def _planes(weight: Packed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert weight.supers is not None, f"{weight.type} has supers"
    return weight.codes, weight.codes if weight.high is None else weight.high, weight.scales, weight.supers

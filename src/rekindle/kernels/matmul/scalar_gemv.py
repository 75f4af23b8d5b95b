"""One row through planes of any type, on any GPU, without the tensor cores: bound by reading weights.

Every thread multiplies whole blocks against a few rows of the matrix.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels.device import filling, pdl_arguments
from rekindle.kernels.matmul.tensor_core import SEGMENTS
from rekindle.kernels.matmul.tiles import block_numbers, dot_blocks, either
from rekindle.kernels.matmul.types import Packed, planes_of

WARPS_EACH = 16  # in flight on a multiprocessor, to keep the memory busy


class RowConfig(NamedTuple):
    """One row: rows and blocks of a tile. A warp covers 32 blocks, so warps lie side by side along a row."""

    rows: int
    blocks: int
    warps: int


def row_config(out: int, columns: int, device: torch.device) -> RowConfig:
    """Small matrices take more warps beside one another along each row, so that enough loads are in flight."""
    blocks, enough = columns // 32, filling(device, WARPS_EACH)
    warps = next((w for w in (4, 2) if blocks % (32 * w) == 0), 1)
    while out // 4 * warps < enough and warps < 4 and blocks > 32 * warps:
        warps *= 2
    return RowConfig(4, 32 * warps, warps)


@triton.jit
def _row_tile(
    x, out, codes, high_bits, scales, super_scales, rows, nought, pid,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr,
    MASKED: tl.constexpr, RAGGED: tl.constexpr,
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
            acc += dot_blocks(x, codes, high_bits, scales, super_scales, b, b_mask, blk, mask, nought, TYPE, MASKED)
        y = tl.sum(acc, 0)
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
    x, nought,
    out0, codes0, high_bits0, scales0, super_scales0, rows0,
    out1, codes1, high_bits1, scales1, super_scales1, rows1,
    out2, codes2, high_bits2, scales2, super_scales2, rows2,
    out3, codes3, high_bits3, scales3, super_scales3, rows3,
    COLUMNS: tl.constexpr, TYPE0: tl.constexpr, TYPE1: tl.constexpr, TYPE2: tl.constexpr, TYPE3: tl.constexpr,
    BN: tl.constexpr, BB: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Up to four matrices, their tiles numbered one after another; a program belongs to one of them."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pid = tl.program_id(0)
    end = tl.cdiv(rows0, BN)
    if pid < end:
        _row_tile(
            x, out0, codes0, high_bits0, scales0, super_scales0, rows0, nought, pid,
            COLUMNS, TYPE0, BN, BB, MASKED, RAGGED,
        )  # fmt: skip
    if TYPE1 != "none":
        pid -= end
        end = tl.cdiv(rows1, BN)
        if (pid >= 0) & (pid < end):
            _row_tile(
                x, out1, codes1, high_bits1, scales1, super_scales1, rows1, nought, pid,
                COLUMNS, TYPE1, BN, BB, MASKED, RAGGED,
            )  # fmt: skip
    if TYPE2 != "none":
        pid -= end
        end = tl.cdiv(rows2, BN)
        if (pid >= 0) & (pid < end):
            _row_tile(
                x, out2, codes2, high_bits2, scales2, super_scales2, rows2, nought, pid,
                COLUMNS, TYPE2, BN, BB, MASKED, RAGGED,
            )  # fmt: skip
    if TYPE3 != "none":
        pid -= end
        if pid >= 0:
            _row_tile(
                x, out3, codes3, high_bits3, scales3, super_scales3, rows3, nought, pid,
                COLUMNS, TYPE3, BN, BB, MASKED, RAGGED,
            )  # fmt: skip


def launch_row(x: Tensor, weights: list[Packed | Tensor], config: RowConfig | None = None) -> list[Tensor]:
    columns = x.shape[1]
    sizes = [weight.shape[0] if isinstance(weight, Tensor) else weight.rows for weight in weights]
    types = [_type_of(weight) for weight in weights]
    config = config or row_config(sum(sizes), columns, x.device)
    outs = [torch.empty(1, size, dtype=x.dtype, device=x.device) for size in sizes]
    arguments: list[Tensor | int] = []
    for weight, out, size in zip(weights, outs, sizes, strict=True):
        arguments += [out, *planes_of(weight), size]
    arguments += arguments[:6] * (SEGMENTS - len(weights))  # of absent matrices, never read
    types += ["none"] * (SEGMENTS - len(weights))
    _row_kernel[(sum(triton.cdiv(size, config.rows) for size in sizes),)](
        x, 0, *arguments, columns, *types,
        BN=config.rows, BB=config.blocks, MASKED=columns % (32 * config.blocks) != 0,
        RAGGED=any(size % config.rows for size in sizes),
        num_warps=config.warps, **pdl_arguments(x.device),
    )  # fmt: skip
    return outs


def _type_of(weight: Packed | Tensor) -> str:
    return "dense" if isinstance(weight, Tensor) else weight.type


@triton.jit
def _swiglu_row_kernel(
    x, out, rows, nought,
    codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales, up_super_scales,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr,
    BN: tl.constexpr, BB: tl.constexpr, MASKED: tl.constexpr, RAGGED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BN outputs: a tile of 2 · BN rows, gate and up by turns, shares what is read of x."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    blocks: tl.constexpr = COLUMNS // 32
    t = tl.arange(0, 2 * BN)
    row = tl.program_id(0) * BN + t // 2
    if RAGGED:
        row = tl.minimum(row, rows - 1)
    is_up = (t % 2 == 1)[None, :]
    codes = either(is_up, up_codes, codes)
    high_bits = either(is_up, up_high_bits, high_bits)
    scales = either(is_up, up_scales, scales)
    super_scales = either(is_up, up_super_scales, super_scales)
    acc = tl.zeros([BB, 2 * BN], tl.float32)
    for start in range(0, blocks, BB):
        b = start + tl.arange(0, BB)
        b_mask = b < blocks
        blk = block_numbers(b, row, blocks)
        mask = b_mask[:, None] & (row >= 0)[None, :]
        acc += dot_blocks(x, codes, high_bits, scales, super_scales, b, b_mask, blk, mask, nought, TYPE, MASKED)
    gate, up = tl.split(tl.sum(acc, 0).reshape(BN, 2))
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    tl.store(out + n, gate * tl.sigmoid(gate) * up, n < rows)


def swiglu_row(x: Tensor, gate: Packed, up: Packed, config: RowConfig | None = None) -> Tensor:
    """x [1, in] -> silu(gate x) · (up x) [1, width]; both matrices of one type."""
    config = config or row_config(2 * gate.rows, gate.columns, x.device)
    out = torch.empty(1, gate.rows, dtype=x.dtype, device=x.device)
    half = max(1, config.rows // 2)
    _swiglu_row_kernel[(triton.cdiv(gate.rows, half),)](
        x, out, gate.rows, 0, *planes_of(gate), *planes_of(up), gate.columns, gate.type,
        BN=half, BB=config.blocks, MASKED=gate.columns % (32 * config.blocks) != 0, RAGGED=gate.rows % half != 0,
        num_warps=config.warps, **pdl_arguments(x.device),
    )  # fmt: skip
    return out

"""Planes as values: whole matrices, for many rows through the vendor's library, or single rows of a table."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.buffers import SCRATCH
from rekindle.kernels.device import pdl_arguments
from rekindle.kernels.matmul.scratch import scratch
from rekindle.kernels.matmul.tiles import load_weights
from rekindle.kernels.matmul.types import Packed, planes_of, row_slab


@triton.jit(do_not_specialize=["rows"])
def _expand_kernel(
    out, ids, codes, high_bits, scales, super_scales, rows, blocks, nought,
    TYPE: tl.constexpr, GATHER: tl.constexpr, BN: tl.constexpr, BB: tl.constexpr, MASKED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out[n] = the values of row n, or of row ids[n]."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.minimum(n, rows - 1)
    if GATHER:
        row = tl.load(ids + row).to(tl.int32)
    b = tl.program_id(1) * BB + tl.arange(0, BB)
    blk = b[:, None] + row[None, :] * blocks
    mask = (b < blocks)[:, None] & (row >= 0)[None, :]
    values = load_weights(codes, high_bits, scales, super_scales, blk, mask, nought, TYPE, out.dtype.element_ty, MASKED)
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
        **pdl_arguments(out.device),
    )  # fmt: skip
    return out


def gather_rows(weight: Packed, ids: Tensor) -> Tensor:
    """The rows `ids` (any integers, [n]) as float32 [n, columns]."""
    blocks = weight.columns // 32
    out = torch.empty(ids.shape[0], weight.columns, dtype=torch.float32, device=ids.device)
    _expand_kernel[(ids.shape[0], triton.cdiv(blocks, 32))](
        out, ids, *planes_of(weight), ids.shape[0], blocks, 0, weight.type, GATHER=True,
        BN=1, BB=32, MASKED=blocks % 32 != 0, num_warps=1, **pdl_arguments(out.device),
    )  # fmt: skip
    return out


def many_rows(x: Tensor, weight: Packed) -> Tensor:
    """Expand, then multiply through the vendor's library; slab by slab where the matrix is larger than the scratch."""
    step = max(1, SCRATCH // weight.columns)
    slabs = [row_slab(weight, at, min(weight.rows, at + step)) for at in range(0, weight.rows, step)]
    if len(slabs) == 1:
        return linear(x, expand(weight, scratch(x, weight.rows, weight.columns)))
    outs = [linear(x, expand(slab, scratch(x, slab.rows, slab.columns))) for slab in slabs]
    return torch.cat(outs, dim=1)

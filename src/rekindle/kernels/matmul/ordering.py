"""A few rows of x in the order of mma's registers, with the sums that skinny products take minima and lifts off by."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels.device import pdl_arguments

MOST_ROWS = 16  # that are put in order


@triton.jit(do_not_specialize=["rows"])
def _order_kernel(x, x_stride, values, sums, half_sums, rows, PDL: tl.constexpr):
    """256 columns of eight rows; rows past the end are zero."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    pair, eight, eights = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    m = tl.arange(0, 8)[:, None]
    row = eight * 8 + m
    column = tl.arange(0, 256)[None, :]
    here = tl.load(x + row.to(tl.int64) * x_stride + pair * 256 + column, row < rows, other=0.0)
    inner = column % 32
    place = (pair * 8 + column // 32) * eights + eight
    tl.store(values + place * 256 + (4 * m + inner % 16 // 4) * 8 + inner // 16 * 4 + inner % 4, here)
    half = tl.arange(0, 16)[None, :]
    by_half = tl.sum(here.to(tl.float32).reshape(8, 16, 16), 2)
    block = half // 2
    at = ((pair * eights + eight) * 32 + 4 * m + block % 4) * 8 + block // 4 * 2 + half % 2
    store_twice(half_sums + at, 4, by_half * -160.0)
    block = tl.arange(0, 8)[None, :]
    by_block = tl.sum(by_half.reshape(8, 8, 2), 2)
    at = ((pair * eights + eight) * 32 + 4 * m + block // 2) * 4 + block % 2
    store_twice(sums + at, 2, by_block * -128.0)


@triton.jit
def store_twice(p, apart, value):
    """A number as the sum of two of less precision."""
    upper = value.to(p.dtype.element_ty)
    tl.store(p, upper)
    tl.store(p + apart, (value - upper.to(tl.float32)).to(p.dtype.element_ty))


def ordered(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x as `Fragments` has it, values [blocks, n_tiles, 32 threads, 8], and what the tensor core multiplies by scales,
    as the sum of two numbers each: −128 · Σ x by block, sums [pairs of groups, n_tiles, 32 threads, 4], and −160 · Σ x
    by half of a block, half_sums [pairs of groups, n_tiles, 32 threads, 8]. Thread 4 · g + t has row g: blocks 2 · t
    and 2 · t + 1, or the halves of blocks t and t + 4."""
    rows, columns = x.shape
    pairs, n_tiles = columns // 256, tiles_of(rows)
    values, sums, half_sums = (
        torch.empty(count, n_tiles, 32, size, dtype=x.dtype, device=x.device)
        for count, size in ((8 * pairs, 8), (pairs, 4), (pairs, 8))
    )
    _order_kernel[(pairs, n_tiles)](
        x, x.stride(0), values, sums, half_sums, rows, num_warps=4, **pdl_arguments(x.device)
    )
    return values, sums, half_sums


def tiles_of(rows: int) -> int:
    """Of eight rows each."""
    assert 2 <= rows <= MOST_ROWS, f"{rows} rows"
    return 1 if rows <= 8 else 2

"""float32 rows through a matrix of 16-bit values that stays as it is stored, on a GPU.

Matrix units multiply only values of one type. So every row of x goes in as two rows of the matrix's type, of which the
second holds what the first has lost: together they keep 22 bits of float16, 16 of bfloat16. Products and sums are
float32. A row is first divided by a power of two that puts its largest value near the top of float16: nothing
overflows, and what is lost of a small value is small beside the largest.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels.device import pdl_arguments

PRODUCTS = 1 << 23  # values of the sums of one slab of outputs: 32 MiB
BLOCK = 1024


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x float32 [rows, in], weight float16 or bfloat16 [out, in] -> float32 [rows, out]."""
    halves, scales = split(x, weight.dtype)
    rows, width = x.shape[0], weight.shape[0]
    out = torch.empty(rows, width, dtype=torch.float32, device=x.device)
    step = max(1, PRODUCTS // (2 * rows))
    for at in range(0, width, step):
        _join(_products(halves, weight[at : at + step]), scales, out[:, at : at + step])
    return out


def split(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(halves [2 · rows, in], scales float32 [rows]): x[r] is (halves[r] + halves[rows + r]) · scales[r]."""
    rows, columns = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    halves = torch.empty(2 * rows, columns, dtype=dtype, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    _split_kernel[(rows,)](x, x.stride(0), halves, scales, columns, BLOCK=BLOCK, num_warps=4, **pdl_arguments(x.device))
    return halves, scales


def _products(halves: Tensor, weight: Tensor) -> Tensor:
    """[2 · rows, out], in float32 as the tensor cores sum them."""
    return torch.mm(halves, weight.t(), out_dtype=torch.float32)


def _join(products: Tensor, scales: Tensor, out: Tensor) -> None:
    rows, width = out.shape
    _join_kernel[(rows, triton.cdiv(width, BLOCK))](
        products, scales, out, out.stride(0), width, BLOCK=BLOCK, num_warps=4, **pdl_arguments(out.device)
    )


@triton.jit(do_not_specialize=["x_stride"])
def _split_kernel(x, x_stride, halves, scales, columns, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    p_x = x + row * x_stride
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, columns, BLOCK):
        largest = tl.maximum(largest, tl.abs(tl.load(p_x + start + k, start + k < columns, other=0.0)))
    # 2^(e − 14) for a largest value in [2^e, 2^(e + 1)), by its exponent: what is divided stays below 2^15.
    exponent = tl.maximum((tl.max(largest, 0).to(tl.int32, bitcast=True) >> 23) - 14, 1)
    scale = (exponent << 23).to(tl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    tl.store(scales + row, scale)
    p_high = halves + row * columns
    p_low = p_high + tl.num_programs(0).to(tl.int64) * columns
    for start in range(0, columns, BLOCK):
        mask = start + k < columns
        value = tl.load(p_x + start + k, mask, other=0.0) * inverse
        high = value.to(halves.dtype.element_ty)
        tl.store(p_high + start + k, high, mask)
        tl.store(p_low + start + k, (value - high.to(tl.float32)).to(halves.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["out_stride"])
def _join_kernel(products, scales, out, out_stride, width, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    high = tl.load(products + row * width + n, n < width, other=0.0)
    low = tl.load(products + (row + tl.num_programs(0)) * width + n, n < width, other=0.0)
    tl.store(out + row * out_stride + n, (high + low) * tl.load(scales + row), n < width)

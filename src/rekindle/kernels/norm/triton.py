"""RMS norms on a GPU: one program per row, or per few heads of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels.device import pdl_arguments

HEADS = 4  # heads one program of the gated norm takes


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, x, weight, out, out, eps, added=False)
    return out


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, y, weight, total, out, eps, added=True)
    return total, out


def _launch(x: Tensor, y: Tensor, weight: Tensor, total: Tensor, out: Tensor, eps: float, *, added: bool) -> None:
    rows, n = x.shape
    parts = y if y.dim() == 3 else y[None]
    assert x.stride(1) == parts.stride(2) == 1, "the values of a row lie side by side"
    block = triton.next_power_of_2(n)
    _norm_kernel[(rows,)](
        x, y, weight, total, out, x.stride(0), parts.stride(1), parts.stride(0), n, eps,
        PARTS=len(parts) if added else 0, BLOCK=block, num_warps=8 if block > 2048 else 4, **pdl_arguments(x.device),
    )  # fmt: skip


@triton.jit
def _norm_kernel(
    x, y, weight, total, out, x_row, y_row, y_part, n, eps,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """PARTS: of y, which are added up first; 0: there is no y."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < n
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)  # asked for now, not behind the reduction
    if PDL:
        gdc_wait()
    value = tl.load(x + row * x_row + at, mask=inside, other=0.0)
    if PARTS > 0:
        other = tl.load(y + row * y_row + at, mask=inside, other=0.0)
        for part in tl.static_range(1, PARTS):
            other += tl.load(y + part * y_part + row * y_row + at, mask=inside, other=0.0)
        # rounded to the type of the stream before the sum and before the norm, as the definition has it
        other = other.to(total.dtype.element_ty)
        value = (value.to(tl.float32) + other.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * n + at, value, mask=inside)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / n + eps)
    normed = wide * scale * factor
    tl.store(out + row * n + at, normed.to(out.dtype.element_ty), mask=inside)


def gated_rms_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows, heads, dim = o.shape
    assert all((o.is_contiguous(), z.stride(1) == 1)), "heads of a row lie side by side"
    out = torch.empty((rows, heads * dim), dtype=z.dtype, device=z.device)
    _gated_kernel[(rows, triton.cdiv(heads, HEADS))](
        o, z, weight, out, z.stride(0), heads, dim, eps,
        HEADS=HEADS, DIM=triton.next_power_of_2(dim), num_warps=2, **pdl_arguments(o.device),
    )  # fmt: skip
    return out


@triton.jit
def _gated_kernel(
    o, z, weight, out, z_row, heads, dim, eps, HEADS: tl.constexpr, DIM: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    lane = tl.arange(0, DIM)
    inside = (head < heads)[:, None] & (lane < dim)[None, :]
    at = head[:, None] * dim + lane[None, :]
    value = tl.load(o + row * heads * dim + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(z + row * z_row + at, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + lane, mask=lane < dim, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(value * value, axis=1) / dim + eps)
    normed = value * scale[:, None] * factor[None, :]
    tl.store(out + row * heads * dim + at, (normed * gate * tl.sigmoid(gate)).to(out.dtype.element_ty), mask=inside)

"""RMS norms, by definition: statistics in float32, result in the type of the input."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [rows, n] over its root mean square, times weight [n]."""
    return _normalised(x, weight, eps).to(x.dtype)


def add(x: Tensor, y: Tensor) -> Tensor:
    """x [rows, n] + y [rows, n], or + the parts of y [parts, rows, n], which are added up in their own type first."""
    return x + (y if y.dim() == 2 else y.sum(0).to(x.dtype))


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum x + y (rounded to x.dtype, as the residual stream carries it) and its norm."""
    total = add(x, y)
    return total, rms_norm(total, weight, eps)


def gated_rms_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(o [rows, heads, dim]) · weight [dim] · silu(z [rows, heads · dim]) -> [rows, heads · dim]."""
    gate = silu(z.float()).view(o.shape)
    return (_normalised(o, weight, eps) * gate).to(z.dtype).view(z.shape)


def _normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()

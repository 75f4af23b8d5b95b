"""RMS norms on a CPU, by the kernels in C; of float32, whose residual sums nothing rounds."""

from __future__ import annotations

import torch
from torch import Tensor

from rekindle.kernels import native


def reads(x: Tensor) -> bool:
    plain = x.dtype is torch.float32 and not x.is_cuda and x.dim() == 2 and x.is_contiguous()
    return plain and native.library() is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty_like(x)
    native.library().rms_norm(x.data_ptr(), None, weight.data_ptr(), eps, *x.shape, None, out.data_ptr())
    return out


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + y, rms_norm(x + y))."""
    y, total, out = y.contiguous(), torch.empty_like(x), torch.empty_like(x)
    native.library().rms_norm(
        x.data_ptr(), y.data_ptr(), weight.data_ptr(), eps, *x.shape, total.data_ptr(), out.data_ptr()
    )
    return total, out


def add(x: Tensor, y: Tensor) -> Tensor:
    y, out = y.contiguous(), torch.empty_like(x)
    native.library().add_rows(x.data_ptr(), y.data_ptr(), x.numel(), out.data_ptr())
    return out

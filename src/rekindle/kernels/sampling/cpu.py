"""The highest logit on a CPU, by the kernels in C."""

from __future__ import annotations

import torch
from torch import Tensor

from rekindle.kernels import native


def reads(logits: Tensor) -> bool:
    plain = logits.dtype is torch.float32 and not logits.is_cuda and logits.dim() == 2 and logits.stride(1) == 1
    return plain and logits.shape[1] > 0 and native.library() is not None


def argmax(logits: Tensor) -> Tensor:
    """`sampling.argmax`."""
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    native.library().argmax_rows(logits.data_ptr(), logits.stride(0), *logits.shape, out.data_ptr())
    return out

"""Products with values, and in which type they are kept."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def kept_dtype(type: str, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Of a matrix that is stored as `type` and is kept as values, beside activations of dtype.

    16-bit values stay as they are on a GPU that computes in float32: twice the bytes would say nothing more.
    """
    narrow = device.type == "cuda" and dtype == torch.float32 and type in ("F16", "BF16")
    return PLAIN[type] if narrow else dtype


def product(x: Tensor, values: Tensor) -> Tensor:
    """x [rows, in] through values [out, in] of its type or, on a GPU, of a narrower one -> [rows, out] in x.dtype."""
    if values.dtype == x.dtype:
        return linear(x, values)
    if x.shape[0] == 1:
        from rekindle.kernels.matmul import scalar_gemv

        return scalar_gemv.launch_row(x, [values])[0]
    from rekindle.kernels.matmul import split_fp32

    return split_fp32.multiply(x, values)

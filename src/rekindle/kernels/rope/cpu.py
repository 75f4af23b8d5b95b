"""Rotary positions and the storing of K and V on a CPU, by the kernels in C."""

from __future__ import annotations

import torch
from torch import Tensor

from rekindle.kernels import native
from rekindle.kernels.attention.cpu import KV_TYPES
from rekindle.kernels.ragged import Ragged


def reads(kv: Tensor) -> bool:
    return not kv.is_cuda and native.library() is not None


def norm_rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    frequencies: Tensor,
    kv: Tensor,
    ragged: Ragged,
) -> Tensor:
    """`rope.norm_rope_store`."""
    rows, heads, dim = q.shape
    dtype = q.dtype
    q, k, v = q.float(), k.float().contiguous(), v.float().contiguous()
    query = torch.empty(rows, heads, dim)
    native.library().turn_and_store(
        q.data_ptr(), q.stride(0), q.stride(1), k.data_ptr(), v.data_ptr(), rows, heads, k.shape[1], dim,
        frequencies.shape[0], None if q_weight is None else q_weight.data_ptr(),
        None if k_weight is None else k_weight.data_ptr(), eps, frequencies.data_ptr(),
        ragged.row_positions.data_ptr(), ragged.row_places.data_ptr(), ragged.row_segments.data_ptr(),
        ragged.tables.data_ptr(), ragged.tables.stride(0), kv.data_ptr(), KV_TYPES[kv.dtype], query.data_ptr(),
    )  # fmt: skip
    return query if dtype is torch.float32 else query.to(dtype)

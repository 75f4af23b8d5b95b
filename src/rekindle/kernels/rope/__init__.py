"""Rotary positions: the first rope_dim of a head turn in pairs (j, j + rope_dim / 2), after the per-head norm."""

from __future__ import annotations

import torch
from torch import Tensor

from rekindle.kernels import attention
from rekindle.kernels.ragged import Ragged
from rekindle.kernels.rope import cpu, naive
from rekindle.spec import AttentionSpec


def rope_frequencies(spec: AttentionSpec, device: torch.device | str) -> Tensor:
    """Radians per position, float32 [rope_dim / 2]; computed in float64 on the host so that devices agree."""
    pairs = torch.arange(0, spec.rope_dim, 2, dtype=torch.float64)
    frequencies = spec.rope_theta ** (-pairs / spec.rope_dim)
    if spec.rope_factors is not None:
        assert len(spec.rope_factors) == spec.rope_dim // 2, (
            f"{len(spec.rope_factors)} rope factors for {spec.rope_dim // 2} pairs"
        )
        frequencies = frequencies / torch.tensor(spec.rope_factors, dtype=torch.float64)
    return frequencies.float().to(device)


def norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    row_positions: Tensor,
    frequencies: Tensor,
) -> tuple[Tensor, Tensor]:
    """q [rows, heads, dim] (any row and head stride), k [rows, kv_heads, dim] -> both normed, turned, contiguous."""
    if q.is_cuda:
        from rekindle.kernels.rope import triton

        return triton.norm_rope(q, k, q_weight, k_weight, eps, row_positions, frequencies)
    return naive.norm_rope(q, k, q_weight, k_weight, eps, row_positions, frequencies)


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
    """norm_rope, then store_kv of the turned k and of v; returns the turned q. One launch on a GPU (packed: two), one
    call on a CPU."""
    if q.is_cuda and not attention.is_packed(kv):
        from rekindle.kernels.rope import triton

        return triton.norm_rope_store(q, k, v, q_weight, k_weight, eps, frequencies, kv, ragged)
    if cpu.reads(kv):
        return cpu.norm_rope_store(q, k, v, q_weight, k_weight, eps, frequencies, kv, ragged)
    q, k = norm_rope(q, k, q_weight, k_weight, eps, ragged.row_positions, frequencies)
    attention.store_kv(kv, k, v, ragged)
    return q


__all__ = ["norm_rope", "norm_rope_store", "rope_frequencies"]

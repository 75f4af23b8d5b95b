"""RoPE after an optional per-head norm, by definition."""

from __future__ import annotations

import torch
from torch import Tensor

from rekindle.kernels.norm.naive import rms_norm


def norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    row_positions: Tensor,
    frequencies: Tensor,
) -> tuple[Tensor, Tensor]:
    """q [rows, heads, dim], k [rows, kv_heads, dim]: per-head norm where a weight is given, then the rotation."""
    # A float32 product is off by 0.03 rad at a million positions, and differently for each position; float64 is not.
    angles = row_positions.double()[:, None] * frequencies.double()  # [rows, rope_dim / 2]
    cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
    return _one(q, q_weight, eps, cos, sin), _one(k, k_weight, eps, cos, sin)


def _one(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    wide = x.float()
    if weight is not None:
        wide = rms_norm(wide, weight, eps)
    half = cos.shape[-1]
    a, b, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).to(x.dtype)

"""Routed experts by definition."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

LEAST_SUM = 6.1e-5  # the sum of the chosen weights is never taken to be less


def route(h: Tensor, router: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """Softmax over all experts, the `used` largest (of equals the lowest id), their weights made to sum to one."""
    chances = torch.softmax(h.float() @ router.float().T, dim=-1)
    weights, ids = torch.sort(chances, dim=-1, descending=True, stable=True)
    weights, ids = weights[:, :used], ids[:, :used]
    return ids.int(), weights / weights.sum(-1, keepdim=True).clamp_min(LEAST_SUM)


def moe(h: Tensor, ids: Tensor, weights: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Σ over the chosen experts of weight · down(silu(gate h) · (up h)), float32 [rows, hidden]."""
    rows = []
    for row, chosen, share in zip(h.float(), ids.tolist(), weights.tolist(), strict=True):
        total = torch.zeros_like(row)
        for expert, weight in zip(chosen, share, strict=True):
            inner = silu(gate[expert].float() @ row) * (up[expert].float() @ row)
            total = total + weight * (down[expert].float() @ inner)
        rows.append(total)
    return torch.stack(rows)


def shared_expert(h: Tensor, gate: Tensor, up: Tensor, down: Tensor, scale: Tensor) -> Tensor:
    """sigmoid(⟨scale, h⟩) · down(silu(gate h) · (up h)), float32 [rows, hidden]."""
    wide = h.float()
    inner = silu(wide @ gate.float().T) * (wide @ up.float().T)
    return torch.sigmoid(wide @ scale.float())[:, None] * (inner @ down.float().T)

"""Routed experts of which some are dense, in torch: one product per expert that occurs."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from rekindle.kernels.matmul.dense import product
from rekindle.kernels.matmul.types import row_slab
from rekindle.kernels.moe.types import ExpertStack


def moe(h: Tensor, ids: Tensor, weights: Tensor, gate: ExpertStack, up: ExpertStack, down: ExpertStack) -> Tensor:
    """Σ over the chosen experts, float32 [rows, hidden]; a row's result does not depend on its neighbours' order."""
    rows, used = ids.shape
    shares = torch.empty(rows, used, h.shape[1], dtype=torch.float32, device=h.device)
    for expert in ids.unique().tolist():
        row, place = torch.nonzero(ids == expert, as_tuple=True)
        x = h.index_select(0, row)
        inner = silu(product(x, _values(gate, expert, h))) * product(x, _values(up, expert, h))
        shares[row, place] = product(inner, _values(down, expert, h)).float()
    return (shares * weights[:, :, None]).sum(1)


def _values(stack: ExpertStack, expert: int, like: Tensor) -> Tensor:
    """One expert [out, in]; from planes it is expanded, for layers that mix types with and without them."""
    if stack.packed is None:
        return stack.values[expert]
    from rekindle.kernels.matmul.expand import expand

    slab = row_slab(stack.packed, expert * stack.rows, (expert + 1) * stack.rows)
    return expand(slab, torch.empty(stack.rows, stack.columns, dtype=like.dtype, device=like.device))

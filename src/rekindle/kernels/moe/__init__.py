"""Routed experts: who is chosen, and what the chosen compute."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rekindle.kernels.matmul import expanded, multiply, stays_quantised, swiglu
from rekindle.kernels.matmul.packing import pack
from rekindle.kernels.matmul.upload import upload
from rekindle.kernels.moe import by_expert, naive
from rekindle.kernels.moe.types import ExpertStack, SharedExpert


def make_stack(
    raw: np.ndarray, type: str, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> ExpertStack:
    """raw uint8 [experts · out, bytes of a row] -> the experts on the device, as `matmul` would keep them."""
    if stays_quantised(type, device):
        return ExpertStack(shape, packed=pack(upload(raw, device), type, shape[2]))
    return ExpertStack(shape, dense=expanded(raw, type, shape[2], device, dtype).view(shape))


def route(h: Tensor, router: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """h [rows, hidden], router [experts, hidden] -> ids int32 and weights float32, both [rows, used].

    Softmax over all experts, the `used` largest (of equals the lowest id), renormalised to sum one.
    """
    return _gpu().route(h, router, used) if h.is_cuda else naive.route(h, router, used)


def moe(
    h: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: ExpertStack,
    up: ExpertStack,
    down: ExpertStack,
    shared: SharedExpert | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """h [rows, hidden] through its chosen experts and the shared one -> [rows, hidden] in h.dtype, plus residual."""
    if gate.packed is not None and up.packed is not None and down.packed is not None:
        return _gpu().moe(h, ids, weights, gate, up, down, shared, residual)
    total = by_expert.moe(h, ids, weights, gate, up, down)
    if shared is not None:
        share = torch.sigmoid(h.float() @ shared.scale.float())[:, None]
        total = total + share * multiply(swiglu(h, shared.gate, shared.up), shared.down).float()
    if residual is not None:
        total = total + residual.float()
    return total.to(h.dtype if residual is None else residual.dtype)


def _gpu():  # type: ignore[no-untyped-def]
    """The Triton forms; imported at first use, since a machine without a GPU may have no Triton."""
    from rekindle.kernels.moe import triton

    return triton


__all__ = ["ExpertStack", "SharedExpert", "make_stack", "moe", "route"]

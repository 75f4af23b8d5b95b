"""Routed experts: which are chosen, and what the chosen compute.

On a CPU one call of the kernels in C (`native/experts.c`) takes any number of rows. On a GPU `triton.choose` picks the
kernels, here by file and function. "Tensor cores": all three stacks can use them, as `kernels.matmul` says. A shared
expert that is no pair like the others (of two types, or of another width) keeps a layer from `by_pair`.

    experts                           rows of h   kernels
    tensor cores                      1-8         tensor_core.by_pair
    tensor cores                      9-32        integers.run_experts
    tensor cores                      33-1280     along_outputs.grouped_shares
    tensor cores                      1281-3071   groups.run_grouped
    tensor cores                      3072-       groups.run_grouped, expanded
    otherwise                         1-4         pairs.by_pair
    otherwise                         5-3071      groups.run_grouped
    otherwise                         3072-       groups.run_grouped, expanded
    gate and up of two types          1-3071      groups.run_grouped
    gate and up of two types          3072-       groups.run_grouped, expanded

Layers with stacks that are kept as values go expert by expert (`by_expert`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rekindle.kernels.matmul import Lanes, expanded, lay_rows, multiply, stays_quantised, swiglu
from rekindle.kernels.matmul.cpu import can_multiply
from rekindle.kernels.matmul.packing import pack
from rekindle.kernels.moe import by_expert, cpu, naive
from rekindle.kernels.moe.types import ExpertStack, SharedExpert
from rekindle.kernels.upload import Raw, as_array, upload


def make_stack(
    raw: Raw, type: str, shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype
) -> ExpertStack:
    """raw uint8 [experts · out, bytes of a row] -> the experts on the device, as `matmul` would keep them."""
    if stays_quantised(type, device):
        return ExpertStack(shape, packed=pack(upload(raw, device), type, shape[2]))
    if device.type == "cpu" and can_multiply():
        return ExpertStack(shape, lanes=lay_rows(as_array(raw), type, shape, dtype))
    return ExpertStack(shape, dense=expanded(raw, type, shape[2], device, dtype).view(shape))


def make_router(values: Tensor) -> Tensor | Lanes:
    """values float32 [experts, hidden] as `route` takes them: near ties must not be decided by rounding."""
    if values.is_cuda or not can_multiply():
        return values
    return lay_rows(values.view(torch.uint8).numpy(), "F32", tuple(values.shape), values.dtype)


def route(h: Tensor, router: Tensor | Lanes, used: int) -> tuple[Tensor, Tensor]:
    """h [rows, hidden], router [experts, hidden] -> ids int32 and weights float32, both [rows, used].

    Softmax over all experts, the `used` largest (of equals the lowest id), renormalised to sum one.
    """
    if isinstance(router, Lanes):
        return cpu.route(h, router, used)
    if h.is_cuda:
        from rekindle.kernels.moe import router as gpu

        return gpu.route(h, router, used)
    return naive.route(h, router, used)


def moe(
    h: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: ExpertStack,
    up: ExpertStack,
    down: ExpertStack,
    shared: SharedExpert | None = None,
) -> Tensor:
    """h [rows, hidden] through its chosen experts and the shared one -> [rows, hidden] in h.dtype."""
    if gate.packed is not None and up.packed is not None and down.packed is not None:
        return _gpu().moe(h, ids, weights, gate, up, down, shared)
    if gate.lanes is not None and up.lanes is not None and down.lanes is not None:
        return cpu.moe(h, ids, weights, gate.lanes, up.lanes, down.lanes, shared)
    total = by_expert.moe(h, ids, weights, gate, up, down)
    if shared is not None:
        total = add_shared(total, h, shared)
    return total.to(h.dtype)


def sum_shares(shares: Tensor, weights: Tensor) -> Tensor:
    """Σ of weights [rows, used] · shares [rows, used, hidden], both float32, as `moe` adds them up on this device."""
    if not shares.is_cuda and can_multiply():
        return cpu.sum_shares(shares, weights)
    return (shares * weights[:, :, None]).sum(1)


def add_shared(total: Tensor, h: Tensor, shared: SharedExpert) -> Tensor:
    """total float32 [rows, hidden] and what the shared expert gives for h, added as `moe` does it on this device."""
    extra = multiply(swiglu(h, shared.gate, shared.up), shared.down).float()
    if shared.gate.lanes is not None:
        return cpu.add_shared(total, extra, h, shared)
    return total + torch.sigmoid(h.float() @ shared.scale.float())[:, None] * extra


def _gpu():  # type: ignore[no-untyped-def]
    """The Triton forms; imported at first use, since a machine without a GPU may have no Triton."""
    from rekindle.kernels.moe import triton

    return triton


__all__ = [
    "ExpertStack",
    "SharedExpert",
    "add_shared",
    "make_router",
    "make_stack",
    "moe",
    "route",
    "sum_shares",
]

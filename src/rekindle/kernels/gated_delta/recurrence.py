"""One row of the gated delta rule, as the decode step, the blocks to verify and the replay run it."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rekindle.spec import DeltaSpec


def check_layout(mixed: Tensor, a: Tensor, b: Tensor, states: Tensor, spec: DeltaSpec) -> None:
    assert mixed.stride(1) == a.stride(1) == b.stride(1) == 1, "channels and heads lie side by side"
    assert all((lies_by_slot(states), states.dtype == torch.float32)), "a slot's states are contiguous float32"
    sizes = (spec.key_dim, spec.value_dim)
    assert all(size >= 16 and size & (size - 1) == 0 for size in sizes), f"head sizes {sizes} must be powers of two"


def lies_by_slot(tensor: Tensor) -> bool:
    """Whether a slot's values lie side by side; slots may lie apart, with other layers' state between them."""
    return tensor[0].is_contiguous()


@triton.jit
def log_decay(a, decay, dt_bias):
    """g = decay · softplus(a + dt_bias)."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    return decay.to(tl.float32) * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))


@triton.jit
def step_state(state, k, delta, forget):
    """e^g · S + k δᵀ. Fused by hand, so that recurrence and replay round alike whatever the compiler likes to fuse."""
    return tl.fma(k[:, None] + tl.zeros_like(state), delta[None, :] + tl.zeros_like(state), state * forget)


@triton.jit
def step_outputs(state, q, k, v, beta, forget):
    """(δ, o) from the state before the step: o = Sᵀq after it is e^g · Sᵀq before it + δ (k · q), so both readings of
    the state are one reduction."""
    read = tl.sum(state * k[:, None], axis=0)
    asked = tl.sum(state * q[:, None], axis=0)
    delta = beta * (v - forget * read)
    return delta, forget * asked + delta * tl.sum(q * k, axis=0)

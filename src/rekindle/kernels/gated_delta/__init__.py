"""The gated delta rule: the recurrent mixer of three layers in four."""

from __future__ import annotations

from torch import Tensor

from rekindle.kernels.conv import conv_silu
from rekindle.kernels.gated_delta import chunked, naive
from rekindle.kernels.gated_delta.naive import DeltaRows
from rekindle.kernels.norm import gated_rms_norm
from rekindle.kernels.ragged import Ragged
from rekindle.spec import DeltaSpec


def gated_delta(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    ragged: Ragged,
    spec: DeltaSpec,
) -> Tensor:
    """mixed [rows, channels] (q | k | v after the convolution), a, b [rows, value_heads] -> [rows, value_heads, Dv].

    states float32 [slots, value_heads, Dk, Dv] move on in place. A single row takes the recurrent step, more rows the
    chunked form with sub-chunks counted from the segment's first row. Segments do not touch one another's bits.
    """
    if mixed.is_cuda:
        from rekindle.kernels.gated_delta import triton

        return triton.gated_delta(mixed, a, b, decay, dt_bias, states, ragged, spec)
    out = mixed.new_empty(mixed.shape[0], spec.value_heads, spec.value_dim)
    start = 0
    for slot, length in zip(ragged.slot_list, ragged.lengths, strict=True):
        rows = slice(start, start + length)
        inputs = naive.split_inputs(mixed[rows], a[rows], b[rows], decay, dt_bias, spec)
        state = states[slot]
        o = naive.run_rows(inputs, state)[0] if length == 1 else chunked.run_chunked(inputs, state)
        out[rows] = o.to(out.dtype)
        start += length
    return out


def gated_delta_step(
    inputs: Tensor,
    taps: Tensor,
    windows: Tensor,
    a: Tensor,
    b: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    ragged: Ragged,
    spec: DeltaSpec,
    z: Tensor,
    weight: Tensor,
    eps: float,
) -> Tensor:
    """gated_rms_norm(gated_delta(conv_silu(inputs, taps, windows), …), z, weight, eps) -> [rows, inner].

    On a GPU single rows take one launch where the convolution has the usual four taps.
    """
    if inputs.is_cuda and ragged.decodes and spec.conv_width == 4:
        from rekindle.kernels.gated_delta import triton

        return triton.gated_delta_step(
            inputs, taps, windows, a, b, decay, dt_bias, states, ragged, spec, z, weight, eps
        )
    mixed = conv_silu(inputs, taps, windows, ragged)
    return gated_rms_norm(gated_delta(mixed, a, b, decay, dt_bias, states, ragged, spec), z, weight, eps)


def gated_delta_rows(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    ragged: Ragged,
    spec: DeltaSpec,
) -> tuple[Tensor, DeltaRows]:
    """gated_delta, row after row, and what every row did to the state; states move on to the end of the segments."""
    if mixed.is_cuda:
        from rekindle.kernels.gated_delta import triton

        return triton.gated_delta_rows(mixed, a, b, decay, dt_bias, states, ragged, spec)
    return naive.gated_delta_rows(mixed, a, b, decay, dt_bias, states, ragged, spec)


def replay_rows(state: Tensor, k: Tensor, delta: Tensor, g: Tensor, count: int) -> Tensor:
    """The state [value_heads, Dk, Dv] after `count` rows of one segment, bit for bit as gated_delta_rows made it.

    `state` is a copy from before the segment; k, delta, g are the segment's rows of DeltaRows.
    """
    if state.is_cuda:
        from rekindle.kernels.gated_delta import triton

        return triton.replay_rows(state, k, delta, g, count)
    return naive.replay_rows(state, k, delta, g, count)


__all__ = ["DeltaRows", "gated_delta", "gated_delta_rows", "gated_delta_step", "replay_rows"]

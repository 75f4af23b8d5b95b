"""The gated delta rule: the recurrent mixer of three layers in four."""

from __future__ import annotations

from torch import Tensor

from rekindle.kernels.conv import conv_silu
from rekindle.kernels.gated_delta import chunked, naive
from rekindle.kernels.kept import KeptRows
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
    for _, slot, rows in ragged.walk():
        inputs = naive.split_inputs(mixed[rows], a[rows], b[rows], decay, dt_bias, spec)
        state = states[slot]
        single = rows.stop - rows.start == 1
        o = naive.run_rows(inputs, state)[0] if single else chunked.run_chunked(inputs, state)
        out[rows] = o.to(out.dtype)
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

    On a GPU single rows take one launch where the convolution has the usual four taps. It may read the state before
    the launch in front of it is done: between two steps on one state a launch must lie that does not start early, as
    the copy of its inputs does with which every forward begins (`starting_early`).
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
    kept: KeptRows,
) -> Tensor:
    """gated_delta, row after row; `kept` gets the states as they were and what every row did to them."""
    if mixed.is_cuda:
        from rekindle.kernels.gated_delta import triton

        return triton.gated_delta_rows(mixed, a, b, decay, dt_bias, states, ragged, spec, kept)
    return naive.gated_delta_rows(mixed, a, b, decay, dt_bias, states, ragged, spec, kept)


def replay_rows(kept: KeptRows, where: Tensor, states: Tensor, windows: Tensor) -> None:
    """Put a slot's state and window where they stood after the first `count` rows of its last block, bit for bit as
    gated_delta_rows and conv_silu made them. where: int32 [2], slot and count.
    """
    if states.is_cuda:
        from rekindle.kernels.gated_delta import triton

        triton.replay_rows(kept, where, states, windows)
    else:
        naive.replay_rows(kept, where, states, windows)


__all__ = ["KeptRows", "gated_delta", "gated_delta_rows", "gated_delta_step", "replay_rows"]

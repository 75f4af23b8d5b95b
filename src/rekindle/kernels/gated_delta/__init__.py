"""The gated delta rule: the recurrent mixer of three layers in four."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from rekindle.kernels.conv import conv_silu
from rekindle.kernels.gated_delta import chunked, cpu, naive
from rekindle.kernels.norm import gated_rms_norm
from rekindle.kernels.ragged import Ragged
from rekindle.kernels.rewind_log import RewindLog
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
    log: RewindLog | None = None,
) -> Tensor:
    """gated_rms_norm(gated_delta(conv_silu(inputs, taps, windows), …), z, weight, eps) -> [rows, inner].

    With `log` windows move on and states do not: the log gets every segment's rows, and `replay_rows` moves a slot's
    state on by as many of them as stay.

    On a CPU it is one call, which takes row after row. On a GPU single rows take one launch where the convolution has
    the usual four taps. It may read the state before the previous launch is done: a forward begins with one launch
    without PDL, the copy of its inputs, and only after it may kernels read state before their wait (`pdl_arguments`).
    """
    if cpu.reads(inputs, spec.conv_width):
        return cpu.gated_delta_step(
            inputs, taps, windows, a, b, decay, dt_bias, states, ragged, spec, z, weight, eps, log
        )
    if log is not None:
        mixed = conv_silu(inputs, taps, windows, ragged, log)
        return gated_rms_norm(gated_delta_rows(mixed, a, b, decay, dt_bias, states, ragged, spec, log), z, weight, eps)
    if inputs.is_cuda and ragged.decodes and spec.conv_width == 4:
        from rekindle.kernels.gated_delta import step

        return step.gated_delta_step(inputs, taps, windows, a, b, decay, dt_bias, states, ragged, spec, z, weight, eps)
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
    log: RewindLog,
) -> Tensor:
    """gated_delta, row after row; states stay as they are, and `log` gets what every row does to them."""
    if mixed.is_cuda:
        from rekindle.kernels.gated_delta import rows

        return rows.gated_delta_rows(mixed, a, b, decay, dt_bias, states, ragged, spec, log)
    return naive.gated_delta_rows(mixed, a, b, decay, dt_bias, states, ragged, spec, log)


def replay_rows(log: RewindLog, where: Tensor, states: Tensor, windows: Tensor) -> None:
    """Move a slot's state on by the first `count` rows of its last block, bit for bit as single steps would, and put
    its window where it stood after them. Once per block: it starts from the states. where: int32 [2], slot and count.
    """
    if states.is_cuda:
        replay_of([log], [states], [windows])(where)
    elif cpu.reads(states, windows.shape[1] + 1):
        cpu.replay_rows(log, where, states, windows)
    else:
        naive.replay_rows(log, where, states, windows)


def replay_of(
    logs: Sequence[RewindLog], states: Sequence[Tensor], windows: Sequence[Tensor]
) -> Callable[[Tensor], None]:
    """`replay_rows` of layers that are alike, on a GPU: all in one launch, which can be recorded."""
    from rekindle.kernels.gated_delta import rows

    addresses = rows.replay_addresses(logs, states, windows)
    return lambda where: rows.replay_rows(addresses, logs[0], where, states[0], windows[0])


__all__ = ["RewindLog", "gated_delta", "gated_delta_rows", "gated_delta_step", "replay_of", "replay_rows"]

"""The mixer of a DeltaNet layer on a CPU, by the kernels in C: row after row, be it alone or among others."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from rekindle.kernels import native
from rekindle.kernels.matmul.cpu import as_rows
from rekindle.kernels.ragged import Ragged
from rekindle.kernels.rewind_log import RewindLog
from rekindle.spec import DeltaSpec

MOST_TAPS = 8


class _LogStruct(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("windows", "inputs", "k", "delta", "g")),
        ("rows", ctypes.c_int64),
    )


def reads(x: Tensor, taps: int) -> bool:
    return not x.is_cuda and taps <= MOST_TAPS and native.library() is not None


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
    log: RewindLog | None,
) -> Tensor:
    """`gated_delta.gated_delta_step`, for any number of rows; with `log` states stay, and it gets the rows."""
    dtype = z.dtype
    inputs, a, b, z = (as_rows(x).contiguous() for x in (inputs, a, b, z))
    rows, out = inputs.shape[0], torch.empty_like(z)
    holder = None if log is None else _log_struct(log)
    native.library().delta_run(
        spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim, spec.conv_width, taps.data_ptr(),
        decay.data_ptr(), dt_bias.data_ptr(), weight.data_ptr(), eps, inputs.data_ptr(),
        a.data_ptr(), b.data_ptr(), z.data_ptr(), ragged.starts.data_ptr(),
        ragged.slots.data_ptr(), ragged.segments, rows, windows.data_ptr(), windows.stride(0),
        states.data_ptr(), states.stride(0),
        None if holder is None else ctypes.byref(holder), out.data_ptr(),
    )  # fmt: skip
    return out if dtype is torch.float32 else out.to(dtype)


def replay_rows(log: RewindLog, where: Tensor, states: Tensor, windows: Tensor) -> None:
    """What gated_delta_step without a log makes of the state in these rows, bit for bit."""
    slot, count = where.tolist()
    holder, (value_heads, key_dim, value_dim) = _log_struct(log), states.shape[1:]
    native.library().delta_replay(
        log.k.shape[2], value_heads, key_dim, value_dim, windows.shape[1] + 1, ctypes.byref(holder), slot, count,
        states.data_ptr(), states.stride(0), windows.data_ptr(), windows.stride(0),
    )  # fmt: skip


def _log_struct(log: RewindLog) -> _LogStruct:
    return _LogStruct(*(tensor.data_ptr() for tensor in log.tensors), log.rows)

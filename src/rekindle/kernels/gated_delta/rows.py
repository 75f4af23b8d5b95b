"""The recurrence row by row, for single rows and blocks to verify, and the replay of such a block (rewind)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels.device import pdl_arguments
from rekindle.kernels.gated_delta.recurrence import check_layout, lies_by_slot, log_decay, step_outputs, step_state
from rekindle.kernels.ragged import Ragged
from rekindle.kernels.rewind_log import RewindLog
from rekindle.spec import DeltaSpec

ROWS = (8, 1)  # value columns of a head and warps of one program


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
    assert max(ragged.lengths) <= log.rows, f"a block of {max(ragged.lengths)} rows, room for {log.rows}"
    out = torch.empty((mixed.shape[0], spec.value_heads, spec.value_dim), dtype=mixed.dtype, device=mixed.device)
    run_rows(mixed, a, b, decay, dt_bias, states, ragged, spec, out, log=log)
    return out


def run_rows(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    ragged: Ragged,
    spec: DeltaSpec,
    out: Tensor,
    *,
    log: RewindLog | None = None,
    only_single: bool = False,
) -> None:
    check_layout(mixed, a, b, states, spec)
    columns, warps = min(ROWS[0], spec.value_dim), ROWS[1]
    saved = (None,) * 3 if log is None else (log.k, log.delta, log.g)
    _rows_kernel[(spec.value_dim // columns, spec.value_heads, ragged.segments)](
        mixed, a, b, decay, dt_bias, states, out, *saved, ragged.starts, ragged.slots,
        mixed.stride(0), a.stride(0), b.stride(0), states.stride(0), 0 if log is None else log.rows, spec.key_dim**-0.5,
        KEY_HEADS=spec.key_heads, VALUE_HEADS=spec.value_heads, DK=spec.key_dim, DV=spec.value_dim, COLUMNS=columns,
        SAVED=log is not None, ONLY_SINGLE=only_single, num_warps=warps, **pdl_arguments(mixed.device),
    )  # fmt: skip


@triton.jit
def _read_row(mixed, a, b, row, mixed_row, a_row, b_row, q_at, k_at, v_at, head):
    """What one row of one head brings, as it lies in memory."""
    base = mixed + row * mixed_row
    q, k, v = tl.load(base + q_at), tl.load(base + k_at), tl.load(base + v_at)
    return q, k, v, tl.load(a + row * a_row + head), tl.load(b + row * b_row + head)


@triton.jit
def _made_ready(raw, decay, dt_bias, scale):
    """q and k of unit length, v, g and β from `_read_row`: all that needs no state."""
    q, k, v = raw[0].to(tl.float32), raw[1].to(tl.float32), raw[2].to(tl.float32)
    q = q * (1.0 / tl.sqrt(tl.sum(q * q, axis=0) + 1e-6)) * scale
    k = k * (1.0 / tl.sqrt(tl.sum(k * k, axis=0) + 1e-6))
    return q, k, v, log_decay(raw[3], decay, dt_bias), tl.sigmoid(raw[4].to(tl.float32))


@triton.jit(do_not_specialize=["log_rows"])
def _rows_kernel(
    mixed, a, b, decay, dt_bias, states, out, log_k, log_delta, log_g, starts, slots,
    mixed_row, a_row, b_row, state_slot, log_rows, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr,
    SAVED: tl.constexpr, ONLY_SINGLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row after the other. While one is computed the next is prepared and the one after that is being loaded:
    there are hardly more programs than schedulers, so that nothing else would hide these trips to memory. Rows that
    are SAVED leave the state as it is: `_replay_kernel` moves it on by those that stay."""
    if PDL:
        gdc_launch_dependents()
    head, segment = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + segment).to(tl.int64)
    stop = tl.load(starts + segment + 1).to(tl.int64)
    if start == stop:  # padding that no row was left for
        return
    if ONLY_SINGLE:  # noqa: SIM102  decided at compile time; the inner one on the device
        if stop - start > 1:
            return
    key_head = head % KEY_HEADS
    i = tl.arange(0, DK)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slots + segment).to(tl.int64)
    at = slot * state_slot + head * DK * DV + i[:, None] * DV + j[None, :]
    state = tl.load(states + at)  # before gdc_wait, as in `_step_kernel`
    head_decay, head_bias = tl.load(decay + head), tl.load(dt_bias + head)
    if PDL:
        gdc_wait()
    q_at, k_at, v_at = key_head * DK + i, (KEY_HEADS + key_head) * DK + i, 2 * KEY_HEADS * DK + head * DV + j
    raw = _read_row(mixed, a, b, start, mixed_row, a_row, b_row, q_at, k_at, v_at, head)
    coming = _read_row(mixed, a, b, tl.minimum(start + 1, stop - 1), mixed_row, a_row, b_row, q_at, k_at, v_at, head)
    ready = _made_ready(raw, head_decay, head_bias, scale)
    for row in range(start, stop):
        later = _read_row(mixed, a, b, tl.minimum(row + 2, stop - 1), mixed_row, a_row, b_row, q_at, k_at, v_at, head)
        q, k, v, g, beta = ready
        forget = tl.exp(g)
        delta, o = step_outputs(state, q, k, v, beta, forget)
        state = step_state(state, k, delta, forget)
        tl.store(out + (row * VALUE_HEADS + head) * DV + j, o.to(out.dtype.element_ty))
        if SAVED:
            to = slot * log_rows + row - start
            tl.store(log_delta + (to * VALUE_HEADS + head) * DV + j, delta)
            tl.store(log_g + to * VALUE_HEADS + head, g)  # the same value from every run of columns
            if head < KEY_HEADS:
                tl.store(log_k + (to * KEY_HEADS + head) * DK + i, k)
        ready = _made_ready(coming, head_decay, head_bias, scale)
        coming = later
    if not SAVED:
        tl.store(states + at, state)


def replay_addresses(logs: Sequence[RewindLog], states: Sequence[Tensor], windows: Sequence[Tensor]) -> Tensor:
    """Of layers that are alike, for `replay_rows`: int64 [layers, 7] on their device. Whoever holds it holds them."""
    device = states[0].device
    for tensors in (states, windows):
        assert all(map(lies_by_slot, tensors)), "a slot's states and windows are dense"
        assert len({tensor.stride(0) for tensor in tensors}) == 1, "slots of all layers lie as far apart"
    places = [
        [tensor.data_ptr() for tensor in (log.k, log.delta, log.g, state, log.windows, log.inputs, window)]
        for log, state, window in zip(logs, states, windows, strict=True)
    ]
    return torch.tensor(places, dtype=torch.int64, device=device)


def replay_rows(addresses: Tensor, log: RewindLog, where: Tensor, states: Tensor, windows: Tensor) -> None:
    """All layers in one launch each for states and windows; log, states, windows: of any one of them."""
    _, heads, dk, dv = states.shape
    columns, layers = min(ROWS[0], dv), len(addresses)
    _replay_kernel[(dv // columns, heads, layers)](
        addresses, where, states.stride(0), log.rows,
        KEY_HEADS=log.k.shape[2], VALUE_HEADS=heads, DK=dk, DV=dv, COLUMNS=columns, num_warps=ROWS[1],
        **pdl_arguments(states.device),
    )  # fmt: skip
    _, rows, channels = windows.shape
    _window_kernel[(triton.cdiv(channels, 256), rows, layers)](
        addresses, log.inputs, where, windows.stride(0), log.rows, channels,
        BLOCK=256, num_warps=2, **pdl_arguments(states.device),
    )  # fmt: skip


# Both kernels read what earlier steps left: the states, which the block did not touch, and its log. `where` was copied
# since by a plain launch: so they read before the launch in front is done, and wait for it before they write.


@triton.jit(do_not_specialize=["log_rows"])
def _replay_kernel(
    addresses, where, state_slot, log_rows,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    head = tl.program_id(1)
    log_k, log_delta = _tensor_at(addresses, 0), _tensor_at(addresses, 1)
    log_g, states = _tensor_at(addresses, 2), _tensor_at(addresses, 3)
    slot, count = tl.load(where).to(tl.int64), tl.load(where + 1)
    i = tl.arange(0, DK)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = slot * state_slot + head * DK * DV + i[:, None] * DV + j[None, :]
    state = tl.load(states + at)
    for step in range(count):
        row = slot * log_rows + step
        k = tl.load(log_k + (row * KEY_HEADS + head % KEY_HEADS) * DK + i)
        delta = tl.load(log_delta + (row * VALUE_HEADS + head) * DV + j)
        state = step_state(state, k, delta, tl.exp(tl.load(log_g + row * VALUE_HEADS + head)))
    if PDL:
        gdc_wait()
    tl.store(states + at, state)


@triton.jit
def _tensor_at(addresses, number):
    """A float32 tensor of this program's layer."""
    address = tl.load(addresses + tl.program_id(2) * 7 + number)
    return tl.multiple_of(address.to(tl.pointer_type(tl.float32)), 16)


@triton.jit(do_not_specialize=["log_rows"])
def _window_kernel(
    addresses, like_inputs, where, window_slot, log_rows, channels, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Row i of the window is row count + i of [window before the block ‖ its rows]. like_inputs: has their type."""
    if PDL:
        gdc_launch_dependents()
    log_windows, windows = _tensor_at(addresses, 4), _tensor_at(addresses, 6)
    address = tl.load(addresses + tl.program_id(2) * 7 + 5)
    log_inputs = tl.multiple_of(address.to(tl.pointer_type(like_inputs.dtype.element_ty)), 16)
    width = tl.num_programs(1)
    slot, count = tl.load(where).to(tl.int64), tl.load(where + 1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    row = count + tl.program_id(1)
    old = tl.load(log_windows + (slot * width + row) * channels + channel, mask=inside & (row < width), other=0.0)
    at = (slot * log_rows + row - width) * channels + channel
    new = tl.load(log_inputs + at, mask=inside & (row >= width), other=0.0).to(tl.float32)
    value = tl.where(row < width, old, new)
    if PDL:
        gdc_wait()
    tl.store(windows + slot * window_slot + tl.program_id(1) * channels + channel, value, mask=inside)

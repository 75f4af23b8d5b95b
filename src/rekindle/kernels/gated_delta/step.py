"""A decode step in one launch: convolution, recurrence and gated norm.

One program per value head, or two with half of its columns each where a single row would leave the card idle. The state
passes through registers, in slices of its columns where there are many programs.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels.device import pdl_arguments, processors, shared_memory_carveout
from rekindle.kernels.gated_delta.recurrence import check_layout, lies_by_slot, log_decay, step_outputs, step_state
from rekindle.kernels.matmul.tile_semaphores import is_last_program, semaphores
from rekindle.kernels.ragged import Ragged
from rekindle.spec import DeltaSpec

WIDTH = 4  # of the convolution that a decode step can take along
STEP_WARPS = 4  # of a program of the decode step; more than a head has values are no use
STEP_SLICES = 4  # of a program's columns: while one is worked on two are on their way, and three programs fit


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
    """Single rows only: convolution, recurrent step and gated norm in one launch -> [rows, inner]."""
    assert ragged.decodes, "longer segments take the parts one by one"
    assert spec.conv_width == WIDTH, f"the step takes along a convolution of {WIDTH} taps, not {spec.conv_width}"
    assert all((taps.is_contiguous(), lies_by_slot(windows), z.stride(1) == 1)), "channels lie side by side"
    check_layout(inputs, a, b, states, spec)
    out = torch.empty((inputs.shape[0], spec.inner), dtype=z.dtype, device=z.device)
    parts = 2 if ragged.segments == 1 else 1
    # What fits the card at once stays whole: two large programs to a multiprocessor lie evenly, three small ones less.
    slices = STEP_SLICES if spec.value_heads * ragged.segments * parts > 2 * processors(z.device) else 1
    raw = torch.empty((inputs.shape[0], spec.inner), dtype=torch.float32, device=z.device) if parts > 1 else out
    _step_kernel[(spec.value_heads * parts, ragged.segments)](
        inputs, taps, windows, a, b, decay, dt_bias, states, out, raw, z, weight, ragged.slots,
        _window_semaphores(windows, spec), semaphores(z.device), inputs.stride(0), a.stride(0), b.stride(0),
        z.stride(0), states.stride(0), windows.stride(0),
        spec.key_dim**-0.5, eps,
        KEY_HEADS=spec.key_heads, VALUE_HEADS=spec.value_heads, DK=spec.key_dim, DV=spec.value_dim, PARTS=parts,
        SLICES=slices, num_warps=STEP_WARPS, **pdl_arguments(inputs.device),
    )  # fmt: skip
    return out


_semaphores = WeakTensorKeyDictionary()


def _window_semaphores(windows: Tensor, spec: DeltaSpec) -> Tensor:
    """Zeros [slots, key_heads] that live as long as the windows: who of a key head's programs comes last."""
    found = _semaphores.get(windows)
    if found is None:
        found = torch.zeros((windows.shape[0], spec.key_heads), dtype=torch.int32, device=windows.device)
        _semaphores[windows] = found
    assert isinstance(found, Tensor), "one tensor of semaphores for every tensor of windows"
    return found


@shared_memory_carveout
@triton.jit
def _step_kernel(
    inputs, taps, windows, a, b, decay, dt_bias, states, out, raw, z, weight, slots, window_semaphores, semaphores,
    input_row, a_row, b_row, z_row, state_slot, window_slot, scale, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PARTS: tl.constexpr,
    SLICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """PARTS programs share a head by its columns, and take theirs in SLICES; the last to have its outputs norms them
    all."""
    if PDL:
        gdc_launch_dependents()
    head, row = tl.program_id(0) // PARTS, tl.program_id(1).to(tl.int64)
    key_head = head % KEY_HEADS
    keys: tl.constexpr = KEY_HEADS * DK
    channels: tl.constexpr = 2 * keys + VALUE_HEADS * DV
    sharers: tl.constexpr = VALUE_HEADS // KEY_HEADS * PARTS
    columns: tl.constexpr = DV // PARTS
    wide: tl.constexpr = columns // SLICES
    i, j = tl.arange(0, DK), tl.program_id(0) % PARTS * columns + tl.arange(0, columns)
    first = tl.program_id(0) % PARTS * columns + tl.arange(0, wide)
    slot = tl.load(slots + row).to(tl.int64)
    head_decay, head_bias = tl.load(decay + head), tl.load(dt_bias + head)
    every = tl.arange(0, DV)
    norm_weight = tl.load(weight + every)
    # Everything is asked for before anything is used, or every barrier in between would cost a trip to memory; and the
    # state, which is large, first: a barrier keeps the compiler from putting that off. It is asked for even before the
    # launch in front is done: it was last written in the step before, and every step begins with a copy of its inputs,
    # which waits for all that went before.
    at = states + slot * state_slot + head * DK * DV + i[:, None] * DV + first[None, :]
    state = tl.load(at)
    later = tl.load(at + wide) if SLICES > 1 else state
    tl.debug_barrier()
    if PDL:
        gdc_wait()
    raw_a, raw_b = tl.load(a + row * a_row + head), tl.load(b + row * b_row + head)
    gate = tl.load(z + row * z_row + head * DV + every)
    window = windows + slot * window_slot
    base = inputs + row * input_row
    q_at, k_at, v_at = key_head * DK + i, keys + key_head * DK + i, 2 * keys + head * DV + j
    q0, q1, q2, q_new = _read_window(base, window, q_at, channels)
    k0, k1, k2, k_new = _read_window(base, window, k_at, channels)
    v0, v1, v2, v_new = _read_window(base, window, v_at, channels)
    q_taps, k_taps, v_taps = _read_taps(taps, q_at), _read_taps(taps, k_at), _read_taps(taps, v_at)
    q = _convolved(q0, q1, q2, q_new, q_taps)
    k = _convolved(k0, k1, k2, k_new, k_taps)
    v = _convolved(v0, v1, v2, v_new, v_taps)
    q = q * (1.0 / tl.sqrt(tl.sum(q * q, axis=0) + 1e-6)) * scale
    k = k * (1.0 / tl.sqrt(tl.sum(k * k, axis=0) + 1e-6))
    # Several programs read one key head's windows; the last to have read them moves them on. The sums above needed
    # every thread's reads, so the count itself need not wait for memory (the state is still on its way). It goes back
    # by as much as it went up, so it ends at zero even where padded rows share a slot.
    tl.debug_barrier()
    semaphore = window_semaphores + slot * KEY_HEADS + key_head
    if tl.atomic_add(semaphore, 1, sem="relaxed") % sharers == sharers - 1:
        _write_window(window, q_at, channels, q1, q2, q_new)
        _write_window(window, k_at, channels, k1, k2, k_new)
        tl.atomic_add(semaphore, -sharers, sem="relaxed")
    _write_window(window, v_at, channels, v1, v2, v_new)
    g = log_decay(raw_a, head_decay, head_bias)
    beta = tl.sigmoid(raw_b.to(tl.float32))
    forget = tl.exp(g)
    o = tl.zeros([columns], tl.float32)
    for s in tl.static_range(SLICES):
        last = tl.load(at + (s + 2) * wide) if s + 2 < SLICES else later
        delta, part = step_outputs(state, q, k, _slice(v, s, wide), beta, forget)
        tl.store(at + s * wide, step_state(state, k, delta, forget))
        o = _with_slice(o, part, s)
        state = later
        later = last
    at_head = (row * VALUE_HEADS + head) * DV
    if PARTS == 1:
        _store_normed(o, gate, norm_weight, out + at_head + every, eps, DV)
    else:
        tl.store(raw + at_head + j, o)
        if is_last_program(semaphores + row * VALUE_HEADS + head, PARTS):
            whole = tl.load(raw + at_head + every, cache_modifier=".cg")
            _store_normed(whole, gate, norm_weight, out + at_head + every, eps, DV)


@triton.jit
def _slice(whole, s: tl.constexpr, wide: tl.constexpr):
    """whole[s · wide : (s + 1) · wide]"""
    if whole.shape[0] == wide:
        return whole
    else:
        return tl.gather(whole, s * wide + tl.arange(0, wide), 0)


@triton.jit
def _with_slice(whole, part, s: tl.constexpr):
    """whole, with `part` as its slice number s."""
    wide: tl.constexpr = part.shape[0]
    if whole.shape[0] == wide:
        return part
    else:
        n = tl.arange(0, whole.shape[0])
        return tl.where(n // wide == s, tl.gather(part, n % wide, 0), whole)


@triton.jit
def _store_normed(o, gate, weight, to, eps, DV: tl.constexpr):
    norm = 1.0 / tl.sqrt(tl.sum(o * o, axis=0) / DV + eps)
    gate = gate.to(tl.float32)
    o = o * norm * (weight.to(tl.float32) * gate * tl.sigmoid(gate))
    tl.store(to, o.to(to.dtype.element_ty))


@triton.jit
def _read_window(base, window, channel, channels: tl.constexpr):
    """The window's rows, oldest first, and the new row."""
    return (
        tl.load(window + channel),
        tl.load(window + channels + channel),
        tl.load(window + 2 * channels + channel),
        tl.load(base + channel),
    )


@triton.jit
def _read_taps(taps, channel):
    return (
        tl.load(taps + channel * 4),
        tl.load(taps + channel * 4 + 1),
        tl.load(taps + channel * 4 + 2),
        tl.load(taps + channel * 4 + 3),
    )


@triton.jit
def _convolved(row0, row1, row2, new, taps):
    """silu of the convolution, rounded to the type of the rows as the convolution by itself leaves it."""
    total = row0 * taps[0].to(tl.float32) + row1 * taps[1].to(tl.float32) + row2 * taps[2].to(tl.float32)
    total += new.to(tl.float32) * taps[3].to(tl.float32)
    return (total * tl.sigmoid(total)).to(new.dtype).to(tl.float32)


@triton.jit
def _write_window(window, channel, channels: tl.constexpr, row1, row2, new):
    tl.store(window + channel, row1)
    tl.store(window + channels + channel, row2)
    tl.store(window + 2 * channels + channel, new.to(tl.float32))

"""The gated delta rule on a GPU.

A decode step is one launch: convolution, recurrence and gated norm, one program per value head, or two with half of
its columns each where a single row would leave the card idle. The state passes through registers, in slices of its
columns where there are many programs. Blocks to verify run the same recurrence row by row. Longer segments run
sub-chunks of CHUNK rows in two launches:
  prepare  parallel over sub-chunks and heads: T = (I + A)⁻¹, the mixing matrix M, the factors of every row;
  pass     one program per head and run of value columns walks the sub-chunks with the state S in registers:
             δ = T (β v − β e^b r_k (K S));  o = e^b r_q (Q S) + M δ;  S ← e^(b_last) S + Kᵀ (e^(b_last − b) r_k δ)
           (b: running sum of g; r_q, r_k: what makes q and k unit length; chunked.py derives the form).
Tensor cores multiply in the type of the activations, and float32 operands go in as a high and a low half of that
type. K and Q enter as they are, so their products are exact before accumulation, and the halves keep 16 bits or more:
outputs and states stay within 1e-4 of the float32 definition. float32 activations split into three tf32 products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels.device import is_roomy, processors, reads_much, starting_early
from rekindle.kernels.kept import KeptRows
from rekindle.kernels.matmul.arrivals import all_arrived, counters
from rekindle.kernels.ragged import Ragged
from rekindle.spec import DeltaSpec

CHUNK = 64
WIDTH = 4  # of the convolution that a decode step can take along
STEP_WARPS = 4  # of a program of the decode step; more than a head has values are no use
STEP_SLICES = 4  # of a program's columns: while one is worked on two are on their way, and three programs fit
ROWS = (8, 1)  # value columns of a head and warps of one program of the recurrence over rows
PASS = (32, 4, 2)  # value columns, warps and pipeline stages of one program of the pass …
PASS_WIDE = (64, 4, 2)  # … where programs of that width would need a second wave …
PROGRAMS = 132  # … of so many
PASS_SMALL = (32, 4, 1)  # the same with little shared memory


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
    out = torch.empty((mixed.shape[0], spec.value_heads, spec.value_dim), dtype=mixed.dtype, device=mixed.device)
    if not ragged.decodes:
        _run_chunked(mixed, a, b, decay, dt_bias, states, ragged, spec, out)
    if ragged.decodes or 1 in ragged.lengths:
        _run_rows(mixed, a, b, decay, dt_bias, states, ragged, spec, out, only_single=not ragged.decodes)
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
    """Single rows only: convolution, recurrent step and gated norm in one launch -> [rows, inner]."""
    assert ragged.decodes, "longer segments take the parts one by one"
    assert spec.conv_width == WIDTH, f"the step takes along a convolution of {WIDTH} taps, not {spec.conv_width}"
    assert all((taps.is_contiguous(), windows.is_contiguous(), z.stride(1) == 1)), "channels lie side by side"
    _check(inputs, a, b, states, spec)
    out = torch.empty((inputs.shape[0], spec.inner), dtype=z.dtype, device=z.device)
    parts = 2 if ragged.segments == 1 else 1
    # What fits the card at once stays whole: two large programs to a multiprocessor lie evenly, three small ones less.
    slices = STEP_SLICES if spec.value_heads * ragged.segments * parts > 2 * processors(z.device) else 1
    raw = torch.empty((inputs.shape[0], spec.inner), dtype=torch.float32, device=z.device) if parts > 1 else out
    _step_kernel[(spec.value_heads * parts, ragged.segments)](
        inputs, taps, windows, a, b, decay, dt_bias, states, out, raw, z, weight, ragged.slots,
        _arrivals(windows, spec), counters(z.device), inputs.stride(0), a.stride(0), b.stride(0), z.stride(0),
        spec.key_dim**-0.5, eps,
        KEY_HEADS=spec.key_heads, VALUE_HEADS=spec.value_heads, DK=spec.key_dim, DV=spec.value_dim, PARTS=parts,
        SLICES=slices, num_warps=STEP_WARPS, **starting_early(inputs.device),
    )  # fmt: skip
    return out


_counters = WeakTensorKeyDictionary()


def _arrivals(windows: Tensor, spec: DeltaSpec) -> Tensor:
    """Zeros [slots, key_heads] that live as long as the windows: who of a key head's programs comes last."""
    counters = _counters.get(windows)
    if counters is None:
        counters = torch.zeros((windows.shape[0], spec.key_heads), dtype=torch.int32, device=windows.device)
        _counters[windows] = counters
    assert isinstance(counters, Tensor), "one tensor of counters for every tensor of windows"
    return counters


@reads_much
@triton.jit
def _step_kernel(
    inputs, taps, windows, a, b, decay, dt_bias, states, out, raw, z, weight, slots, arrivals, arrived,
    input_row, a_row, b_row, z_row, scale, eps,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, PARTS: tl.constexpr,
    SLICES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """PARTS programs share a head by its columns, and take theirs in SLICES; the last to have its outputs norms them
    all."""
    if EARLY:
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
    at = states + (slot * VALUE_HEADS + head) * DK * DV + i[:, None] * DV + first[None, :]
    state = tl.load(at)
    later = tl.load(at + wide) if SLICES > 1 else state
    tl.debug_barrier()
    if EARLY:
        gdc_wait()
    raw_a, raw_b = tl.load(a + row * a_row + head), tl.load(b + row * b_row + head)
    gate = tl.load(z + row * z_row + head * DV + every)
    window = windows + slot * 3 * channels
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
    counter = arrivals + slot * KEY_HEADS + key_head
    if tl.atomic_add(counter, 1, sem="relaxed") % sharers == sharers - 1:
        _write_window(window, q_at, channels, q1, q2, q_new)
        _write_window(window, k_at, channels, k1, k2, k_new)
        tl.atomic_add(counter, -sharers, sem="relaxed")
    _write_window(window, v_at, channels, v1, v2, v_new)
    g = _log_decay(raw_a, head_decay, head_bias)
    beta = tl.sigmoid(raw_b.to(tl.float32))
    forget = tl.exp(g)
    o = tl.zeros([columns], tl.float32)
    for s in tl.static_range(SLICES):
        last = tl.load(at + (s + 2) * wide) if s + 2 < SLICES else later
        delta, part = _step_outputs(state, q, k, _slice(v, s, wide), beta, forget)
        tl.store(at + s * wide, _step_state(state, k, delta, forget))
        o = _with_slice(o, part, s)
        state = later
        later = last
    at_head = (row * VALUE_HEADS + head) * DV
    if PARTS == 1:
        _store_normed(o, gate, norm_weight, out + at_head + every, eps, DV)
    else:
        tl.store(raw + at_head + j, o)
        if all_arrived(arrived + row * VALUE_HEADS + head, PARTS):
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


@triton.jit
def _step_outputs(state, q, k, v, beta, forget):
    """(δ, o) from the state before the step: o = Sᵀq after it is e^g · Sᵀq before it + δ (k · q), so both readings of
    the state are one reduction."""
    read = tl.sum(state * k[:, None], axis=0)
    asked = tl.sum(state * q[:, None], axis=0)
    delta = beta * (v - forget * read)
    return delta, forget * asked + delta * tl.sum(q * k, axis=0)


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
    assert max(ragged.lengths) <= kept.rows, f"a block of {max(ragged.lengths)} rows, room for {kept.rows}"
    out = torch.empty((mixed.shape[0], spec.value_heads, spec.value_dim), dtype=mixed.dtype, device=mixed.device)
    _run_rows(mixed, a, b, decay, dt_bias, states, ragged, spec, out, kept=kept)
    return out


def _run_rows(
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
    kept: KeptRows | None = None,
    only_single: bool = False,
) -> None:
    _check(mixed, a, b, states, spec)
    columns, warps = min(ROWS[0], spec.value_dim), ROWS[1]
    saved = (None,) * 4 if kept is None else (kept.states, kept.k, kept.delta, kept.g)
    _rows_kernel[(spec.value_dim // columns, spec.value_heads, ragged.segments)](
        mixed, a, b, decay, dt_bias, states, out, *saved, ragged.starts, ragged.slots,
        mixed.stride(0), a.stride(0), b.stride(0), 0 if kept is None else kept.rows, spec.key_dim**-0.5,
        KEY_HEADS=spec.key_heads, VALUE_HEADS=spec.value_heads, DK=spec.key_dim, DV=spec.value_dim, COLUMNS=columns,
        SAVED=kept is not None, ONLY_SINGLE=only_single, num_warps=warps, **starting_early(mixed.device),
    )  # fmt: skip


def _check(mixed: Tensor, a: Tensor, b: Tensor, states: Tensor, spec: DeltaSpec) -> None:
    assert mixed.stride(1) == a.stride(1) == b.stride(1) == 1, "channels and heads lie side by side"
    assert all((states.is_contiguous(), states.dtype == torch.float32)), "states are contiguous float32"
    sizes = (spec.key_dim, spec.value_dim)
    assert all(size >= 16 and size & (size - 1) == 0 for size in sizes), f"head sizes {sizes} must be powers of two"


@triton.jit
def _log_decay(a, decay, dt_bias):
    """g = decay · softplus(a + dt_bias)."""
    x = a.to(tl.float32) + dt_bias.to(tl.float32)
    return decay.to(tl.float32) * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))


@triton.jit
def _step_state(state, k, delta, forget):
    """e^g · S + k δᵀ. Fused by hand, so that recurrence and replay round alike whatever the compiler likes to fuse."""
    return tl.fma(k[:, None] + tl.zeros_like(state), delta[None, :] + tl.zeros_like(state), state * forget)


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
    return q, k, v, _log_decay(raw[3], decay, dt_bias), tl.sigmoid(raw[4].to(tl.float32))


@triton.jit(do_not_specialize=["kept_rows"])
def _rows_kernel(
    mixed, a, b, decay, dt_bias, states, out, kept_states, kept_k, kept_delta, kept_g, starts, slots,
    mixed_row, a_row, b_row, kept_rows, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr,
    SAVED: tl.constexpr, ONLY_SINGLE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row after the other. While one is worked on the next is made ready and the one behind that is on its way:
    there are hardly more programs than schedulers, so that nothing else would hide these trips to memory."""
    if EARLY:
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
    at = (slot * VALUE_HEADS + head) * DK * DV + i[:, None] * DV + j[None, :]
    state = tl.load(states + at)  # before the launch in front is done, as in `_step_kernel`
    head_decay, head_bias = tl.load(decay + head), tl.load(dt_bias + head)
    if SAVED:
        tl.store(kept_states + at, state)
    if EARLY:
        gdc_wait()
    q_at, k_at, v_at = key_head * DK + i, (KEY_HEADS + key_head) * DK + i, 2 * KEY_HEADS * DK + head * DV + j
    raw = _read_row(mixed, a, b, start, mixed_row, a_row, b_row, q_at, k_at, v_at, head)
    coming = _read_row(mixed, a, b, tl.minimum(start + 1, stop - 1), mixed_row, a_row, b_row, q_at, k_at, v_at, head)
    ready = _made_ready(raw, head_decay, head_bias, scale)
    for row in range(start, stop):
        later = _read_row(mixed, a, b, tl.minimum(row + 2, stop - 1), mixed_row, a_row, b_row, q_at, k_at, v_at, head)
        q, k, v, g, beta = ready
        forget = tl.exp(g)
        delta, o = _step_outputs(state, q, k, v, beta, forget)
        state = _step_state(state, k, delta, forget)
        tl.store(out + (row * VALUE_HEADS + head) * DV + j, o.to(out.dtype.element_ty))
        if SAVED:
            to = slot * kept_rows + row - start
            tl.store(kept_delta + (to * VALUE_HEADS + head) * DV + j, delta)
            tl.store(kept_g + to * VALUE_HEADS + head, g)  # the same value from every run of columns
            if head < KEY_HEADS:
                tl.store(kept_k + (to * KEY_HEADS + head) * DK + i, k)
        ready = _made_ready(coming, head_decay, head_bias, scale)
        coming = later
    tl.store(states + at, state)


def replay_rows(kept: KeptRows, where: Tensor, states: Tensor, windows: Tensor) -> None:
    _, heads, dk, dv = states.shape
    assert all((states.is_contiguous(), windows.is_contiguous())), "states and windows are dense"
    columns = min(ROWS[0], dv)
    _replay_kernel[(dv // columns, heads)](
        kept.states, kept.k, kept.delta, kept.g, where, states, kept.rows,
        KEY_HEADS=kept.k.shape[2], VALUE_HEADS=heads, DK=dk, DV=dv, COLUMNS=columns, num_warps=ROWS[1],
        **starting_early(states.device),
    )  # fmt: skip
    _, rows, channels = windows.shape
    _window_kernel[(triton.cdiv(channels, 256), rows)](
        kept.windows, kept.inputs, where, windows, kept.rows, channels, BLOCK=256, num_warps=2,
        **starting_early(states.device),
    )  # fmt: skip


# Going back reads what the block wrote, and `where` was copied since by a plain launch: so both kernels read before the
# launch in front is done, and wait for it before they write.


@triton.jit(do_not_specialize=["kept_rows"])
def _replay_kernel(
    kept_states, kept_k, kept_delta, kept_g, where, states, kept_rows,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    head = tl.program_id(1)
    slot, count = tl.load(where).to(tl.int64), tl.load(where + 1)
    i = tl.arange(0, DK)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = (slot * VALUE_HEADS + head) * DK * DV + i[:, None] * DV + j[None, :]
    state = tl.load(kept_states + at)
    for step in range(count):
        row = slot * kept_rows + step
        k = tl.load(kept_k + (row * KEY_HEADS + head % KEY_HEADS) * DK + i)
        delta = tl.load(kept_delta + (row * VALUE_HEADS + head) * DV + j)
        state = _step_state(state, k, delta, tl.exp(tl.load(kept_g + row * VALUE_HEADS + head)))
    if EARLY:
        gdc_wait()
    tl.store(states + at, state)


@triton.jit(do_not_specialize=["kept_rows"])
def _window_kernel(
    kept_windows, kept_inputs, where, windows, kept_rows, channels, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Row i of the window is row count + i of [window before the block ‖ its rows]."""
    if EARLY:
        gdc_launch_dependents()
    width = tl.num_programs(1)
    slot, count = tl.load(where).to(tl.int64), tl.load(where + 1)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    row = count + tl.program_id(1)
    old = tl.load(kept_windows + (slot * width + row) * channels + channel, mask=inside & (row < width), other=0.0)
    at = (slot * kept_rows + row - width) * channels + channel
    new = tl.load(kept_inputs + at, mask=inside & (row >= width), other=0.0)
    value = tl.where(row < width, old, new)
    if EARLY:
        gdc_wait()
    tl.store(windows + (slot * width + tl.program_id(1)) * channels + channel, value, mask=inside)


def _run_chunked(
    mixed: Tensor,
    a: Tensor,
    b: Tensor,
    decay: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    ragged: Ragged,
    spec: DeltaSpec,
    out: Tensor,
) -> None:
    _check(mixed, a, b, states, spec)
    device, heads = mixed.device, spec.value_heads
    # sub-chunk c of segment i has the place starts[i] // CHUNK + i + c: no two share one, and no list is needed
    places = mixed.shape[0] // CHUNK + ragged.segments
    wide = mixed.dtype == torch.float32
    tiles = (places, heads, 1 if wide else 2, CHUNK, CHUNK)  # float32, or the two halves
    solve = torch.empty(tiles, dtype=mixed.dtype, device=device)
    mixing = torch.empty(tiles, dtype=mixed.dtype, device=device)
    factors = torch.empty((places, heads, 5, CHUNK), dtype=torch.float32, device=device)
    _prepare_kernel[(triton.cdiv(max(ragged.lengths), CHUNK), heads, ragged.segments)](
        mixed, a, b, decay, dt_bias, solve, mixing, factors, ragged.starts,
        mixed.stride(0), a.stride(0), b.stride(0), spec.key_dim**-0.5,
        KEY_HEADS=spec.key_heads, VALUE_HEADS=heads, DK=spec.key_dim, CHUNK=CHUNK, LEVELS=CHUNK.bit_length() - 1,
        WIDE=wide, num_warps=4, num_stages=1,
    )  # fmt: skip
    columns, warps, stages = PASS if is_roomy(device) else PASS_SMALL
    if is_roomy(device) and heads * ragged.segments * spec.value_dim > PROGRAMS * columns:
        columns, warps, stages = PASS_WIDE
    columns = min(columns, spec.value_dim)
    _pass_kernel[(spec.value_dim // columns, heads, ragged.segments)](
        mixed, states, out, solve, mixing, factors, ragged.starts, ragged.slots, mixed.stride(0),
        KEY_HEADS=spec.key_heads, VALUE_HEADS=heads, DK=spec.key_dim, DV=spec.value_dim, COLUMNS=columns, CHUNK=CHUNK,
        WIDE=wide, num_warps=warps, num_stages=stages,
    )  # fmt: skip


@triton.jit
def _dot2(exact, x, WIDE: tl.constexpr):
    """exact @ x, with x float32 in two halves of the type of `exact`."""
    if WIDE:
        return tl.dot(exact, x, input_precision="tf32x3")
    high = x.to(exact.dtype)
    low = (x - high.to(tl.float32)).to(exact.dtype)
    return tl.dot(exact, low, tl.dot(exact, high))


@triton.jit
def _dot3(x, y, kind: tl.constexpr, WIDE: tl.constexpr):
    """x @ y, both float32."""
    if WIDE:
        return tl.dot(x, y, input_precision="tf32x3")
    high = x.to(kind)
    return _dot_halves(high, (x - high.to(tl.float32)).to(kind), y)


@triton.jit
def _dot_halves(high, low, y):
    """(high + low) @ y with y float32, in halves too; the product of the low halves is too small to matter."""
    y_high = y.to(high.dtype)
    y_low = (y - y_high.to(tl.float32)).to(high.dtype)
    return tl.dot(high, y_high, tl.dot(high, y_low, tl.dot(low, y_high)))


@triton.jit
def _store_tile(to, x, kind: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr):
    i = tl.arange(0, CHUNK)
    at = i[:, None] * CHUNK + i[None, :]
    high = x.to(kind)
    tl.store(to + at, high)
    if not WIDE:
        tl.store(to + CHUNK * CHUNK + at, (x - high.to(tl.float32)).to(kind))


@triton.jit
def _dot_tile(tile, y, CHUNK: tl.constexpr, WIDE: tl.constexpr):
    """A stored tile [CHUNK, CHUNK] times y."""
    i = tl.arange(0, CHUNK)
    at = i[:, None] * CHUNK + i[None, :]
    if WIDE:
        return tl.dot(tl.load(tile + at), y, input_precision="tf32x3")
    return _dot_halves(tl.load(tile + at), tl.load(tile + CHUNK * CHUNK + at), y)


@triton.jit
def _prepare_kernel(
    mixed, a, b, decay, dt_bias, solve, mixing, factors, starts, mixed_row, a_row, b_row, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    chunk, head, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + segment).to(tl.int64)
    length = (tl.load(starts + segment + 1) - start).to(tl.int32)
    if (length == 1) | (chunk * CHUNK >= length):
        return
    kind = mixed.dtype.element_ty
    i = tl.arange(0, CHUNK)
    live = chunk * CHUNK + i < length
    row = start + chunk * CHUNK + i
    d = tl.arange(0, DK)
    base = mixed + row[:, None] * mixed_row + (head % KEY_HEADS) * DK + d[None, :]
    q = tl.load(base, mask=live[:, None], other=0.0)
    k = tl.load(base + KEY_HEADS * DK, mask=live[:, None], other=0.0)
    q_unit = scale / tl.sqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), axis=1) + 1e-6)
    k_unit = 1.0 / tl.sqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), axis=1) + 1e-6)
    g = _log_decay(
        tl.load(a + row * a_row + head, mask=live, other=0.0), tl.load(decay + head), tl.load(dt_bias + head)
    )
    g = tl.where(live, g, 0.0)  # rows behind the end leave the state alone: no decay, β = 0
    beta = tl.where(live, tl.sigmoid(tl.load(b + row * b_row + head, mask=live, other=0.0).to(tl.float32)), 0.0)
    run = tl.cumsum(g, axis=0)
    last = tl.sum(g, axis=0)
    below = i[:, None] >= i[None, :]
    decays = tl.exp(tl.where(below, run[:, None] - run[None, :], 0.0))
    keys = tl.trans(k)
    if WIDE:
        kk = tl.dot(k, keys, input_precision="tf32x3")
        qk = tl.dot(q, keys, input_precision="tf32x3")
    else:
        kk = tl.dot(k, keys)
        qk = tl.dot(q, keys)
    place = ((start // CHUNK + segment + chunk) * VALUE_HEADS + head).to(tl.int64)
    tile = place * (CHUNK * CHUNK * (1 if WIDE else 2))
    mix = tl.where(below, decays * qk * q_unit[:, None] * k_unit[None, :], 0.0)
    _store_tile(mixing + tile, mix, kind, CHUNK, WIDE)
    system = tl.where(i[:, None] > i[None, :], decays * kk * (beta * k_unit)[:, None] * k_unit[None, :], 0.0)
    # Blockwise substitution, block size doubling from 1: for two neighbours with inverses D₁, D₂ and the block E below
    # the diagonal between them, the inverse of both is [[D₁, 0], [−D₂ E D₁, D₂]], that is D − D E D.
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    inverse -= tl.where(_between(i, 1), system, 0.0)
    for level in tl.static_range(1, LEVELS):
        block = tl.where(_between(i, 1 << level), system, 0.0)
        inverse -= _dot3(_dot3(inverse, block, kind, WIDE), inverse, kind, WIDE)
    _store_tile(solve + tile, inverse, kind, CHUNK, WIDE)
    to = factors + place * 5 * CHUNK + i
    tl.store(to, beta)
    tl.store(to + CHUNK, beta * tl.exp(run) * k_unit)
    tl.store(to + 2 * CHUNK, tl.exp(run) * q_unit)
    tl.store(to + 3 * CHUNK, tl.exp(last - run) * k_unit)
    tl.store(to + 4 * CHUNK, tl.exp(last) + tl.zeros([CHUNK], tl.float32))


@triton.jit
def _between(i, size: tl.constexpr):
    """Entries whose row lies in the second and whose column in the first half of one block of 2 · size."""
    half = i // size
    return (half[:, None] == half[None, :] + 1) & (half[None, :] % 2 == 0)


@triton.jit
def _pass_kernel(
    mixed, states, out, solve, mixing, factors, starts, slots, mixed_row,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    head, segment = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + segment).to(tl.int64)
    length = (tl.load(starts + segment + 1) - start).to(tl.int32)
    if length == 1:
        return
    i, d = tl.arange(0, CHUNK), tl.arange(0, DK)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slots + segment).to(tl.int64)
    state_at = states + (slot * VALUE_HEADS + head) * DK * DV + d[:, None] * DV + j[None, :]
    state = tl.load(state_at)
    place = (start // CHUNK + segment) * VALUE_HEADS + head
    for chunk in range(tl.cdiv(length, CHUNK)):
        live = (chunk * CHUNK + i < length)[:, None]
        row = start + chunk * CHUNK + i
        base = mixed + row[:, None] * mixed_row
        keys_at = base + (head % KEY_HEADS) * DK + d[None, :]
        q = tl.load(keys_at, mask=live, other=0.0)
        k = tl.load(keys_at + KEY_HEADS * DK, mask=live, other=0.0)
        v = tl.load(base + 2 * KEY_HEADS * DK + head * DV + j[None, :], mask=live, other=0.0).to(tl.float32)
        tile = (place + chunk * VALUE_HEADS) * (CHUNK * CHUNK * (1 if WIDE else 2))
        factor = factors + (place + chunk * VALUE_HEADS) * 5 * CHUNK
        beta, reads = tl.load(factor + i), tl.load(factor + CHUNK + i)
        asks, writes = tl.load(factor + 2 * CHUNK + i), tl.load(factor + 3 * CHUNK + i)
        forget = tl.load(factor + 4 * CHUNK)
        target = beta[:, None] * v - reads[:, None] * _dot2(k, state, WIDE)
        delta = _dot_tile(solve + tile, target, CHUNK, WIDE)
        o = asks[:, None] * _dot2(q, state, WIDE) + _dot_tile(mixing + tile, delta, CHUNK, WIDE)
        tl.store(out + (row[:, None] * VALUE_HEADS + head) * DV + j[None, :], o.to(out.dtype.element_ty), mask=live)
        state = state * forget + _dot2(tl.trans(k), writes[:, None] * delta, WIDE)
    tl.store(state_at, state)

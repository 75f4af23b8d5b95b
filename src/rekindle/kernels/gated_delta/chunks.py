"""The chunked form on a GPU: sub-chunks of SUB_CHUNK rows in two launches.

  prepare  parallel over sub-chunks and heads: T = (I + A)⁻¹, the mixing matrix M, the factors of every row;
  pass     one program per head and run of value columns walks the sub-chunks with the state S in registers:
             δ = T (β v − β e^b r_k (K S));  o = e^b r_q (Q S) + M δ;  S ← e^(b_last) S + Kᵀ (e^(b_last − b) r_k δ)
           (b: running sum of g; r_q, r_k: what makes q and k unit length; chunked.py derives the form).
Tensor cores multiply in the type of the activations, and float32 operands go in as a high and a low half of that
type. K and Q enter as they are, so their products are exact before accumulation, and the halves keep 16 bits or more:
outputs and states stay within 1e-4 of the float32 definition. float32 activations split into three tf32 products.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rekindle.kernels.device import LEAST, ORDINARY, ROOMY, dot_precision, fitting, is_roomy, processors
from rekindle.kernels.gated_delta.recurrence import check_layout, log_decay
from rekindle.kernels.ragged import Ragged
from rekindle.spec import DeltaSpec
from rekindle.spec.delta import SUB_CHUNK

PREPARE = {ORDINARY: 4, LEAST: 8}  # warps of one program of prepare
# Value columns, warps and pipeline stages of one program of the pass …
PASS = {ROOMY: (32, 4, 2), LEAST: (32, 8, 1)}
PASS_WIDE = (64, 4, 2)  # … where there is room, and programs of that width would need a second wave


def run_chunked(
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
    check_layout(mixed, a, b, states, spec)
    device, heads = mixed.device, spec.value_heads
    busy = sum(length > 0 for length in ragged.lengths)
    singles = 1 in ragged.lengths  # `run_rows` takes those
    # sub-chunk c of segment i has the place starts[i] // SUB_CHUNK + i + c: no two share one, and no list is needed
    places = mixed.shape[0] // SUB_CHUNK + ragged.segments
    precision = dot_precision(device, mixed.dtype) if mixed.dtype == torch.float32 else None
    tiles = (places, heads, 2 if precision is None else 1, SUB_CHUNK, SUB_CHUNK)  # float32, or the two halves
    solve = torch.empty(tiles, dtype=mixed.dtype, device=device)
    mixing = torch.empty(tiles, dtype=mixed.dtype, device=device)
    factors = torch.empty((places, heads, 5, SUB_CHUNK), dtype=torch.float32, device=device)
    _prepare_kernel[(triton.cdiv(max(ragged.lengths), SUB_CHUNK), heads, ragged.segments)](
        mixed, a, b, decay, dt_bias, solve, mixing, factors, ragged.starts,
        mixed.stride(0), a.stride(0), b.stride(0), spec.key_dim**-0.5,
        KEY_HEADS=spec.key_heads, VALUE_HEADS=heads, DK=spec.key_dim, CHUNK=SUB_CHUNK,
        LEVELS=SUB_CHUNK.bit_length() - 1,
        PRECISION=precision, SINGLES=singles, num_warps=fitting(device, PREPARE), num_stages=1,
    )  # fmt: skip
    columns, warps, stages = fitting(device, PASS)
    if is_roomy(device) and heads * busy * spec.value_dim > processors(device) * columns:
        columns, warps, stages = PASS_WIDE
    columns = min(columns, spec.value_dim)
    _pass_kernel[(spec.value_dim // columns, heads, ragged.segments)](
        mixed, states, out, solve, mixing, factors, ragged.starts, ragged.slots, mixed.stride(0), states.stride(0),
        KEY_HEADS=spec.key_heads, VALUE_HEADS=heads, DK=spec.key_dim, DV=spec.value_dim, COLUMNS=columns,
        CHUNK=SUB_CHUNK,
        PRECISION=precision, SINGLES=singles, num_warps=warps, num_stages=stages,
    )  # fmt: skip


@triton.jit
def _dot2(exact, x, PRECISION: tl.constexpr):
    """exact @ x, with x float32 in two halves of the type of `exact`, unless that is float32 too (PRECISION)."""
    if PRECISION is not None:
        return tl.dot(exact, x, input_precision=PRECISION)
    high = x.to(exact.dtype)
    low = (x - high.to(tl.float32)).to(exact.dtype)
    return tl.dot(exact, low, tl.dot(exact, high))


@triton.jit
def _dot3(x, y, kind: tl.constexpr, PRECISION: tl.constexpr):
    """x @ y, both float32."""
    if PRECISION is not None:
        return tl.dot(x, y, input_precision=PRECISION)
    high = x.to(kind)
    return _dot_halves(high, (x - high.to(tl.float32)).to(kind), y)


@triton.jit
def _dot_halves(high, low, y):
    """(high + low) @ y with y float32, in halves too; the product of the low halves is too small to matter."""
    y_high = y.to(high.dtype)
    y_low = (y - y_high.to(tl.float32)).to(high.dtype)
    return tl.dot(high, y_high, tl.dot(high, y_low, tl.dot(low, y_high)))


@triton.jit
def _store_tile(to, x, kind: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    i = tl.arange(0, CHUNK)
    at = i[:, None] * CHUNK + i[None, :]
    high = x.to(kind)
    tl.store(to + at, high)
    if PRECISION is None:
        tl.store(to + CHUNK * CHUNK + at, (x - high.to(tl.float32)).to(kind))


@triton.jit
def _dot_tile(tile, y, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """A stored tile [CHUNK, CHUNK] times y."""
    i = tl.arange(0, CHUNK)
    at = i[:, None] * CHUNK + i[None, :]
    if PRECISION is not None:
        return tl.dot(tl.load(tile + at), y, input_precision=PRECISION)
    return _dot_halves(tl.load(tile + at), tl.load(tile + CHUNK * CHUNK + at), y)


@triton.jit
def _prepare_kernel(
    mixed, a, b, decay, dt_bias, solve, mixing, factors, starts, mixed_row, a_row, b_row, scale,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, CHUNK: tl.constexpr, LEVELS: tl.constexpr,
    PRECISION: tl.constexpr, SINGLES: tl.constexpr,
):  # fmt: skip
    chunk, head, segment = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + segment).to(tl.int64)
    length = (tl.load(starts + segment + 1) - start).to(tl.int32)
    if (SINGLES & (length == 1)) | (chunk * CHUNK >= length):
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
    g = log_decay(tl.load(a + row * a_row + head, mask=live, other=0.0), tl.load(decay + head), tl.load(dt_bias + head))
    g = tl.where(live, g, 0.0)  # rows behind the end leave the state alone: no decay, β = 0
    beta = tl.where(live, tl.sigmoid(tl.load(b + row * b_row + head, mask=live, other=0.0).to(tl.float32)), 0.0)
    run = tl.cumsum(g, axis=0)
    last = tl.sum(g, axis=0)
    below = i[:, None] >= i[None, :]
    decays = tl.exp(tl.where(below, run[:, None] - run[None, :], 0.0))
    keys = tl.trans(k)
    if PRECISION is not None:
        kk = tl.dot(k, keys, input_precision=PRECISION)
        qk = tl.dot(q, keys, input_precision=PRECISION)
    else:
        kk = tl.dot(k, keys)
        qk = tl.dot(q, keys)
    place = ((start // CHUNK + segment + chunk) * VALUE_HEADS + head).to(tl.int64)
    tile = place * (CHUNK * CHUNK * (2 if PRECISION is None else 1))
    mix = tl.where(below, decays * qk * q_unit[:, None] * k_unit[None, :], 0.0)
    _store_tile(mixing + tile, mix, kind, CHUNK, PRECISION)
    system = tl.where(i[:, None] > i[None, :], decays * kk * (beta * k_unit)[:, None] * k_unit[None, :], 0.0)
    # Blockwise substitution, block size doubling from 1: for two neighbours with inverses D₁, D₂ and the block E below
    # the diagonal between them, the inverse of both is [[D₁, 0], [−D₂ E D₁, D₂]], that is D − D E D.
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0)
    inverse -= tl.where(_between(i, 1), system, 0.0)
    for level in tl.static_range(1, LEVELS):
        block = tl.where(_between(i, 1 << level), system, 0.0)
        inverse -= _dot3(_dot3(inverse, block, kind, PRECISION), inverse, kind, PRECISION)
    _store_tile(solve + tile, inverse, kind, CHUNK, PRECISION)
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
    mixed, states, out, solve, mixing, factors, starts, slots, mixed_row, state_slot,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr, SINGLES: tl.constexpr,
):  # fmt: skip
    head, segment = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + segment).to(tl.int64)
    length = (tl.load(starts + segment + 1) - start).to(tl.int32)
    if SINGLES & (length == 1):
        return
    i, d = tl.arange(0, CHUNK), tl.arange(0, DK)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slots + segment).to(tl.int64)
    state_at = states + slot * state_slot + head * DK * DV + d[:, None] * DV + j[None, :]
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
        tile = (place + chunk * VALUE_HEADS) * (CHUNK * CHUNK * (2 if PRECISION is None else 1))
        factor = factors + (place + chunk * VALUE_HEADS) * 5 * CHUNK
        beta, reads = tl.load(factor + i), tl.load(factor + CHUNK + i)
        asks, writes = tl.load(factor + 2 * CHUNK + i), tl.load(factor + 3 * CHUNK + i)
        forget = tl.load(factor + 4 * CHUNK)
        target = beta[:, None] * v - reads[:, None] * _dot2(k, state, PRECISION)
        delta = _dot_tile(solve + tile, target, CHUNK, PRECISION)
        o = asks[:, None] * _dot2(q, state, PRECISION) + _dot_tile(mixing + tile, delta, CHUNK, PRECISION)
        tl.store(out + (row[:, None] * VALUE_HEADS + head) * DV + j[None, :], o.to(out.dtype.element_ty), mask=live)
        state = state * forget + _dot2(tl.trans(k), writes[:, None] * delta, PRECISION)
    tl.store(state_at, state)

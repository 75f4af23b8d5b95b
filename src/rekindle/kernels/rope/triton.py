"""Per-head norm and rotary positions on a GPU, one program per row and head; with the KV store in the same launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels.device import pdl_arguments
from rekindle.kernels.ragged import Ragged
from rekindle.spec import PAGE


def norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    row_positions: Tensor,
    frequencies: Tensor,
) -> tuple[Tensor, Tensor]:
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    _launch(q, k, k, q_weight, k_weight, eps, row_positions, frequencies, q_out, k_out, None)
    return q_out, k_out


def norm_rope_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    frequencies: Tensor,
    kv: Tensor,
    ragged: Ragged,
) -> Tensor:
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(q, k, v, q_weight, k_weight, eps, ragged.row_positions, frequencies, q_out, kv, ragged)
    return q_out


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    row_positions: Tensor,
    frequencies: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    ragged: Ragged | None,
) -> None:
    rows, heads, dim = q.shape
    kv_heads, half = k.shape[1], frequencies.shape[0]
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1, "the values of a head lie side by side"
    assert ragged is None or k_out.is_contiguous(), "kv is one contiguous block of pages"
    per_row = heads + kv_heads * (1 if ragged is None else 2)
    _turn_kernel[(rows, per_row)](
        q, k, v, q_weight, k_weight, row_positions, frequencies, q_out, k_out,
        row_positions if ragged is None else ragged.row_places,
        row_positions if ragged is None else ragged.row_segments,
        row_positions if ragged is None else ragged.tables,
        0 if ragged is None else ragged.tables.stride(0),
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, HALF=half, STORED=ragged is not None, PAGE=PAGE,
        BLOCK_HALF=triton.next_power_of_2(half), BLOCK_REST=triton.next_power_of_2(max(dim - 2 * half, 1)),
        BLOCK_DIM=triton.next_power_of_2(dim), num_warps=1, **pdl_arguments(q.device),
    )  # fmt: skip


@triton.jit(do_not_specialize=["table_row"])
def _turn_kernel(
    q, k, v, q_weight, k_weight, row_positions, frequencies, q_out, k_out, row_places, row_segments, tables, table_row,
    q_row, q_head, k_row, k_head, v_row, v_head, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, STORED: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_DIM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(row_positions + row)
    if head < HEADS:
        _turn_head(
            q + row * q_row + head * q_head, q_weight, q_out + (row * HEADS + head) * DIM, frequencies, position, eps,
            DIM, HALF, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        head -= HEADS
        k_to = k_out + (row * KV_HEADS + head) * DIM
        if STORED:
            place = tl.load(row_places + row)
            page = tl.load(tables + tl.load(row_segments + row) * table_row + place // PAGE).to(tl.int64)
            k_to = k_out + ((page * 2 * PAGE + place % PAGE) * KV_HEADS + head % KV_HEADS) * DIM
        if head < KV_HEADS:
            _turn_head(
                k + row * k_row + head * k_head, k_weight, k_to, frequencies, position, eps,
                DIM, HALF, BLOCK_HALF, BLOCK_REST,
            )  # fmt: skip
        else:
            head -= KV_HEADS
            v_to = k_to + PAGE * KV_HEADS * DIM
            _copy_head(v + row * v_row + head * v_head, v_to, DIM, BLOCK_DIM)


@triton.jit
def _turn_head(
    x, weight, out, frequencies, position, eps,
    DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    pair = tl.arange(0, BLOCK_HALF)
    turns = pair < HALF
    rest = 2 * HALF + tl.arange(0, BLOCK_REST)
    stays = rest < DIM
    a = tl.load(x + pair, mask=turns, other=0.0).to(tl.float32)
    b = tl.load(x + HALF + pair, mask=turns, other=0.0).to(tl.float32)
    c = tl.load(x + rest, mask=stays, other=0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0) + tl.sum(c * c, axis=0)
        scale = 1.0 / tl.sqrt(squares / DIM + eps)
        a *= scale * tl.load(weight + pair, mask=turns, other=0.0).to(tl.float32)
        b *= scale * tl.load(weight + HALF + pair, mask=turns, other=0.0).to(tl.float32)
        c *= scale * tl.load(weight + rest, mask=stays, other=0.0).to(tl.float32)
    frequency = tl.load(frequencies + pair, mask=turns, other=0.0)
    at = tl.full([BLOCK_HALF], 1.0, tl.float32) * position.to(tl.float32)
    angle = at * frequency
    lost = tl.fma(at, frequency, -angle)  # to rounding: with it as good as float64 up to millions of positions
    # Less its whole turns of 2 π, in two parts: above 100,000 the device's own sine would take a long way round.
    whole = tl.floor(angle * 0.15915494309189535 + 0.5)
    angle = tl.fma(whole, 1.7484556000744883e-07, tl.fma(whole, -6.2831854820251465, angle)) + lost
    cos, sin = tl.cos(angle), tl.sin(angle)
    kind = out.dtype.element_ty
    tl.store(out + pair, (a * cos - b * sin).to(kind), mask=turns)
    tl.store(out + HALF + pair, (b * cos + a * sin).to(kind), mask=turns)
    tl.store(out + rest, c.to(kind), mask=stays)


@triton.jit
def _copy_head(x, out, DIM: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < DIM, other=0.0).to(out.dtype.element_ty), mask=at < DIM)

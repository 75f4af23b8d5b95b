"""The same on a GPU. Sizes follow from the shapes of the tensors alone, so that a pass can be recorded: what a ring
holds, and which slot a block belongs to, stand in memory of the device."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rekindle.kernels.device import dot_precision

SPLIT = 256  # places of a ring that one program attends
TILE = 64  # of them at a time


def store_ring(ring: Tensor, k: Tensor, v: Tensor, slots: Tensor, firsts: Tensor, counts: Tensor) -> None:
    assert ring.is_contiguous(), "a ring is one block of memory"
    rows, values = len(k) // len(slots), ring.shape[3] * ring.shape[4]
    _store_kernel[(len(slots), rows)](
        ring, k.reshape(len(k), values), v.reshape(len(v), values), slots, firsts, counts, ring.shape[2],
        ROWS=rows, VALUES=values, BLOCK=triton.next_power_of_2(values), num_warps=4,
    )  # fmt: skip


@triton.jit
def _store_kernel(
    ring, k, v, slots, firsts, counts, places, ROWS: tl.constexpr, VALUES: tl.constexpr, BLOCK: tl.constexpr
):
    block, row = tl.program_id(0), tl.program_id(1)
    count = tl.load(counts + block)
    if (row < count) & (row >= count - places):
        at = tl.arange(0, BLOCK)
        place = (tl.load(firsts + block) + row) % places
        to = ring + ((tl.load(slots + block) * 2 * places + place) * VALUES).to(tl.int64) + at
        source = (block * ROWS + row) * VALUES + at
        tl.store(to, tl.load(k + source, at < VALUES), at < VALUES)
        tl.store(to + places * VALUES, tl.load(v + source, at < VALUES), at < VALUES)


def attend_ring(
    query: Tensor, k: Tensor, v: Tensor, ring: Tensor, slots: Tensor, starts: Tensor, stops: Tensor,
    window: int | None, causal: bool,
) -> Tensor:  # fmt: skip
    """In parts that are merged: a program for SPLIT places of a ring and a K/V head, and one for the block itself."""
    blocks, (_, heads, dim), kv_heads, places = len(slots), query.shape, ring.shape[3], ring.shape[2]
    rows, shared, splits = len(query) // blocks, heads // kv_heads, triton.cdiv(places, SPLIT) + 1
    query, k, v = query.contiguous(), k.contiguous(), v.contiguous()
    width, wide = triton.next_power_of_2(dim), query.dtype == torch.float32  # wide: registers are short
    sums = torch.empty(blocks, kv_heads, splits, rows * shared, width, dtype=torch.float32, device=query.device)
    weights = torch.empty(2, blocks, kv_heads, splits, rows * shared, dtype=torch.float32, device=query.device)
    _attend_kernel[(splits, kv_heads, blocks)](
        query, k, v, ring, slots, starts, stops, sums, weights, places, dim**-0.5,
        ROWS=rows, SHARED=shared, KV_HEADS=kv_heads, DIM=dim, WIDTH=width,
        M=max(16, triton.next_power_of_2(rows * shared)), N=max(16, triton.next_power_of_2(rows)),
        WINDOW=window or 0, CAUSAL=causal, SPLIT=SPLIT, TILE=TILE // 2 if wide else TILE,
        PRECISION=dot_precision(query.device, query.dtype), num_warps=8 if wide else 4,
    )  # fmt: skip
    out = torch.empty_like(query)
    _merge_kernel[(rows * shared, kv_heads, blocks)](
        sums, weights, out, splits, ROWS=rows, SHARED=shared, KV_HEADS=kv_heads, DIM=dim, WIDTH=width,
        SPLITS=triton.next_power_of_2(splits), num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _attend_kernel(
    query, k, v, ring, slots, starts, stops, sums, weights, places, scale,
    ROWS: tl.constexpr, SHARED: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, WINDOW: tl.constexpr, CAUSAL: tl.constexpr, SPLIT: tl.constexpr,
    TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, at = tl.arange(0, M), tl.arange(0, WIDTH)
    row = m // SHARED
    real = row < ROWS
    q = tl.load(
        query + ((block * ROWS + row) * KV_HEADS * SHARED + head * SHARED + m % SHARED)[:, None] * DIM + at[None, :],
        real[:, None] & (at < DIM)[None, :], other=0.0,
    )  # fmt: skip
    acc = tl.zeros([M, WIDTH], tl.float32)
    most = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if split == tl.num_programs(0) - 1:  # the block itself
        key = tl.arange(0, N)
        source = ((block * ROWS + key) * KV_HEADS + head)[:, None] * DIM + at[None, :]
        live = (key < ROWS)[:, None] & (at < DIM)[None, :]
        seen = (key < ROWS)[None, :] & real[:, None]
        if CAUSAL:
            seen &= key[None, :] <= row[:, None]
        keys, values = tl.load(k + source, live, other=0.0), tl.load(v + source, live, other=0.0)
        acc, most, total = _added(q, keys.to(q.dtype), values.to(q.dtype), seen, acc, most, total, scale, PRECISION)
    else:
        start, stop = tl.load(starts + block), tl.load(stops + block)
        base = ring + tl.load(slots + block).to(tl.int64) * (2 * places * KV_HEADS * DIM) + head * DIM
        for tile in range(split * SPLIT, tl.minimum((split + 1) * SPLIT, places), TILE):
            place = tile + tl.arange(0, TILE)
            back = (stop - 1 - place + places) % places  # stop - 1 - position; positions before 0 are no positions
            position = stop - 1 - back
            held = (place < places) & (position >= start) & (position >= 0)
            source = place[:, None] * (KV_HEADS * DIM) + at[None, :]
            live = held[:, None] & (at < DIM)[None, :]
            seen = held[None, :] & real[:, None]
            if WINDOW:
                seen &= stop + row[:, None] - position[None, :] < WINDOW
            keys = tl.load(base + source, live, other=0.0)
            values = tl.load(base + places * KV_HEADS * DIM + source, live, other=0.0)
            acc, most, total = _added(q, keys.to(q.dtype), values.to(q.dtype), seen, acc, most, total, scale, PRECISION)
    part = ((block * KV_HEADS + head) * tl.num_programs(0) + split) * (ROWS * SHARED)
    tl.store(sums + (part + m)[:, None] * WIDTH + at[None, :], acc, real[:, None] & (at < WIDTH)[None, :])
    parts = tl.num_programs(2) * KV_HEADS * tl.num_programs(0) * (ROWS * SHARED)
    tl.store(weights + part + m, most, real)
    tl.store(weights + parts + part + m, total, real)


@triton.jit
def _added(q, keys, values, seen, acc, most, total, scale, PRECISION: tl.constexpr):
    scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
    scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(most, tl.max(scores, 1))
    safe = tl.where(higher == float("-inf"), 0.0, higher)  # nothing was seen yet
    p = tl.exp(scores - safe[:, None])
    kept = tl.exp(most - safe)
    acc = acc * kept[:, None] + tl.dot(p.to(values.dtype), values, input_precision=PRECISION)
    return acc, higher, total * kept + tl.sum(p, 1)


@triton.jit
def _merge_kernel(
    sums, weights, out, splits, ROWS: tl.constexpr, SHARED: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    m, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    split, at = tl.arange(0, SPLITS), tl.arange(0, WIDTH)
    part = ((block * KV_HEADS + head) * splits + split) * (ROWS * SHARED) + m
    parts = tl.num_programs(2) * KV_HEADS * splits * (ROWS * SHARED)
    most = tl.load(weights + part, split < splits, other=float("-inf"))
    total = tl.load(weights + parts + part, split < splits, other=0.0)
    factor = tl.exp(most - tl.max(most, 0))  # a row sees itself at least
    acc = tl.load(
        sums + part[:, None] * WIDTH + at[None, :], (split < splits)[:, None] & (at < WIDTH)[None, :], other=0.0
    )
    mixed = tl.sum(acc * factor[:, None], 0) / tl.sum(total * factor, 0)
    to = out + ((block * ROWS + m // SHARED) * KV_HEADS * SHARED + head * SHARED + m % SHARED) * DIM + at
    tl.store(to, mixed, at < DIM)


def convolve(x: Tensor, base: Tensor, computed: Tensor, side: int, block: int) -> Tensor:
    rows, channels = x.shape
    taps = base.shape[1]
    assert x.is_contiguous() and computed.is_contiguous(), "rows lie one behind the other"
    out = torch.empty_like(x)
    size = min(1024, triton.next_power_of_2(channels))
    _convolve_kernel[(rows, triton.cdiv(channels, size))](
        x, base, computed, out, channels, computed.shape[1] // (2 * taps), side, block,
        TAPS=taps, SIZE=size, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _convolve_kernel(x, base, computed, out, channels, groups, side, block, TAPS: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0)
    c = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    here = c < channels
    group = c // (channels // groups)
    acc = tl.zeros([SIZE], tl.float32)
    for back in tl.static_range(TAPS):
        live = here & (row % block >= back)
        weight = tl.load(base + (side * TAPS + back) * channels + c, here, other=0.0).to(tl.float32)
        weight += tl.load(computed + ((row * 2 + side) * TAPS + back) * groups + group, here, other=0.0).to(tl.float32)
        acc += weight * tl.load(x + (row - back) * channels + c, live, other=0.0).to(tl.float32)
    tl.store(out + row * channels + c, acc, here)


def walk(values: Tensor, first: Tensor, steps: Tensor) -> Tensor:
    blocks, rows, candidates = values.shape
    chosen = torch.empty(blocks, rows, dtype=torch.int64, device=values.device)
    _walk_kernel[(blocks,)](
        values.contiguous(), first.contiguous(), steps.contiguous(), chosen, rows, candidates,
        SIZE=triton.next_power_of_2(candidates), num_warps=1,
    )  # fmt: skip
    return chosen


@triton.jit
def _walk_kernel(values, first, steps, chosen, rows, candidates, SIZE: tl.constexpr):
    block = tl.program_id(0)
    at = tl.arange(0, SIZE)
    here = at < candidates
    values += block * rows * candidates + at
    score = tl.load(values, here, other=float("-inf")) + tl.load(first + block * candidates + at, here, other=0.0)
    best = tl.argmax(score, 0)
    tl.store(chosen + block * rows, best)
    for row in range(1, rows):
        step = steps + ((block * (rows - 1) + row - 1) * candidates + best) * candidates + at
        score = tl.load(values + row * candidates, here, other=float("-inf")) + tl.load(step, here, other=0.0)
        best = tl.argmax(score, 0)
        tl.store(chosen + block * rows + row, best)

"""Attention of few rows over pages that lie anywhere, each read by its address: in the pool, or over the link.

Every key is read once for all rows of a segment, so that the link alone decides the time. Programs take pages in turns
(program s the pages s, s + splits, …): together they walk through host memory from one end to the other. Each leaves
its part in float32 with its log-sum-exp, and a second kernel merges and gates them.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rekindle.kernels.attention.rows import is_packed
from rekindle.kernels.attention.triton import load_tile, views
from rekindle.kernels.device import dot_precision, filling, is_roomy
from rekindle.kernels.ragged import Ragged
from rekindle.spec import PAGE
from rekindle.spec.attention import Q8_BLOCK, most_splits

PROGRAMS_EACH = 2  # on a multiprocessor, that ask for pages: more than the link has in flight, few enough to merge
TILE_KEYS = 32  # keys that a program asks for at a time


def attend_far(
    q: Tensor, kv: Tensor, page_addresses: Tensor, ragged: Ragged, scale: float, gate: Tensor | None
) -> Tensor:
    rows, heads, dim = q.shape
    kv_heads, segments, longest = kv.shape[3], ragged.segments, max(ragged.lengths)
    assert q.stride(2) == 1, "the values of a head lie side by side"
    assert dim & (dim - 1) == 0, f"head dim {dim} must be a power of two"
    group = heads // kv_heads
    tile_rows, stages = _tile(longest * group, q)
    tiles = triton.cdiv(longest * group, tile_rows)
    busy = sum(length > 0 for length in ragged.lengths)
    programs = filling(q.device, PROGRAMS_EACH) // (tiles * kv_heads * busy)
    splits = max(1, min(programs, ragged.tables.shape[1], most_splits(rows, heads)))
    parts = torch.empty((splits, rows, heads, dim), dtype=torch.float32, device=q.device)
    part_lse = torch.empty((splits, rows, heads), dtype=torch.float32, device=q.device)
    values, scales = views(kv)
    _far_kernel[(splits * tiles, kv_heads, segments)](
        q, values, scales, page_addresses, ragged.tables, ragged.starts, ragged.row_places, parts, part_lse,
        ragged.tables.stride(0), q.stride(0), q.stride(1), rows, splits, scale * 1.4426950408889634,
        GROUP=group, KV_HEADS=kv_heads, DIM=dim, TILE_ROWS=tile_rows, TILE_KEYS=TILE_KEYS, PAGE=PAGE,
        PRECISION=dot_precision(q.device, q.dtype), PACKED=is_packed(kv), BLOCK=Q8_BLOCK,
        num_warps=4 if tile_rows < 128 else 8, num_stages=stages,
    )  # fmt: skip
    out = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
    columns = min(64, dim)
    _merge_far_kernel[(dim // columns, heads, rows)](
        parts, part_lse, out, gate, ragged.row_segments, ragged.starts, ragged.row_places,
        0 if gate is None else gate.stride(0), 0 if gate is None else gate.stride(1), splits,
        HEADS=heads, DIM=dim, COLUMNS=columns, BLOCK=32, PAGE=PAGE, num_warps=4,
    )  # fmt: skip
    return out.flatten(1)


def _tile(flat_rows: int, q: Tensor) -> tuple[int, int]:
    """(flat rows, pipeline stages) of one program: as many rows as fit beside the keys, which each tile reads again."""
    roomy = is_roomy(q.device)
    most = (32 if roomy else 16) if q.dtype == torch.float32 else (128 if roomy else 32)
    return min(most, max(16, triton.next_power_of_2(flat_rows))), 2 if roomy else 1


@triton.jit
def _pages_seen(starts, row_places, segment, PAGE: tl.constexpr):
    """Pages that the rows of a segment see; both kernels ask, so both agree which programs had work."""
    return tl.load(row_places + tl.load(starts + segment + 1) - 1) // PAGE + 1


@triton.jit(do_not_specialize=["table_row", "rows", "splits"])
def _far_kernel(
    q, kv, scales, page_addresses, tables, starts, row_places, parts, part_lse,
    table_row, q_row, q_head, rows, splits, scale,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr,
    PAGE: tl.constexpr, PRECISION: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    split, tile = tl.program_id(0) % splits, tl.program_id(0) // splits
    kv_head, segment = tl.program_id(1), tl.program_id(2)
    start = tl.load(starts + segment)
    length = tl.load(starts + segment + 1) - start
    if tile * TILE_ROWS >= length * GROUP:
        return
    pages = _pages_seen(starts, row_places, segment, PAGE)
    if split >= pages:
        return
    flat = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    live = flat < length * GROUP
    row = (start + flat // GROUP).to(tl.int64)
    head = kv_head * GROUP + flat % GROUP
    place = tl.load(row_places + row, mask=live, other=-1)
    highest = tl.max(place, axis=0)
    d, n = tl.arange(0, DIM), tl.arange(0, TILE_KEYS)
    queries = tl.load(q + row[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=live[:, None], other=0.0)
    top = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, DIM], tl.float32)
    table = tables + segment.to(tl.int64) * table_row
    per_page: tl.constexpr = PAGE // TILE_KEYS
    for i in range(0, tl.cdiv(pages - split, splits) * per_page):
        page = split + i // per_page * splits
        first = i % per_page * TILE_KEYS
        address = tl.multiple_of(tl.load(page_addresses + tl.load(table + page)), 16)
        at_values = tl.multiple_of(address.to(tl.pointer_type(kv.dtype.element_ty)), 16)
        at_scales = tl.multiple_of(address.to(tl.pointer_type(scales.dtype.element_ty)), 16)
        key = page * PAGE + first + n
        written = (key <= highest)[:, None]  # later keys are uninitialised memory, NaN perhaps
        at = first * KV_HEADS + kv_head
        keys = load_tile(at_values, at_scales, at, n, written, queries.dtype, KV_HEADS, DIM, PACKED, BLOCK)
        at += PAGE * KV_HEADS
        values = load_tile(at_values, at_scales, at, n, written, queries.dtype, KV_HEADS, DIM, PACKED, BLOCK)
        scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale
        scores = tl.where(key[None, :] <= place[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - safe[:, None])
        fade = tl.exp2(top - safe)
        acc = tl.dot(weights.to(queries.dtype), values, acc * fade[:, None], input_precision=PRECISION)
        total = total * fade + tl.sum(weights, axis=1)
        top = new_top
    to = (split.to(tl.int64) * rows + row) * (KV_HEADS * GROUP) + head
    sum_or_one = tl.where(total > 0.0, total, 1.0)  # a row may see none of these pages
    tl.store(parts + to[:, None] * DIM + d[None, :], acc / sum_or_one[:, None], mask=live[:, None])
    tl.store(part_lse + to, tl.where(total > 0.0, top + tl.log2(sum_or_one), float("-inf")), mask=live)


@triton.jit(do_not_specialize=["splits"])
def _merge_far_kernel(
    parts, part_lse, out, gate, row_segments, starts, row_places, gate_row, gate_head, splits,
    HEADS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    worked = tl.minimum(splits, _pages_seen(starts, row_places, tl.load(row_segments + row), PAGE))
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, worked, BLOCK):
        s = first + tl.arange(0, BLOCK)
        at = (s.to(tl.int64) * tl.num_programs(2) + row) * HEADS + head
        logs = tl.load(part_lse + at, mask=s < worked, other=float("-inf"))
        part = tl.load(parts + at[:, None] * DIM + j[None, :], mask=(s < worked)[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(logs, axis=0))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(logs - safe)
        fade = tl.exp2(top - safe)
        acc = acc * fade + tl.sum(part * weights[:, None], axis=0)
        total = total * fade + tl.sum(weights, axis=0)
        top = new_top
    acc = acc / total
    if gate is not None:
        acc = acc * tl.sigmoid(tl.load(gate + row * gate_row + head * gate_head + j).to(tl.float32))
    tl.store(out + (row * HEADS + head) * DIM + j, acc.to(out.dtype.element_ty))

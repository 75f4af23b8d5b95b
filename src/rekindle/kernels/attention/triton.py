"""Attention over paged KV on a GPU.

One kernel for prefill, verify and decode. The query heads of one kv head are packed under one another: flat row m of a
segment is row m // group, query head m % group of that kv head, so every key and value is loaded once per tile of
flat rows. Few flat rows over a long context are split over the positions (flash decoding): every split leaves its part
in float32 with its log-sum-exp, and a second kernel merges them. Where the device has room for it every page has a
program, which asks for it while the launch before still runs. How many splits have work is computed from the position
on the device, so a captured graph serves every context length. Packed rows (rows.py) are unpacked tile by
tile, on the way to the tensor cores. float32 queries over 16-bit pages go in, and so do the weights of values, as two
numbers of the pages' type, of which the second holds what the first has lost.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels.attention.rows import is_packed
from rekindle.kernels.device import (
    LEAST,
    ORDINARY,
    ROOMY,
    dot_precision,
    fitting,
    is_roomy,
    pdl_arguments,
    processors,
)
from rekindle.kernels.matmul.ptx import ask_for
from rekindle.kernels.ragged import Ragged
from rekindle.spec import PAGE
from rekindle.spec.attention import Q8_BLOCK, most_splits

WIDE = 128  # flat rows from which a program has a multiprocessor to itself: a second wave would only add parts to merge
FEW_ROWS = 16  # rows of a block to verify: up to here keys are read for few queries, and bandwidth decides
COLUMNS = 32  # values of a head that one program merges …
PARTS = 64  # … and splits that it reads at a time


class LaunchShape(NamedTuple):
    """How a launch is cut up."""

    rows: int  # flat rows of one program
    keys: int  # of a tile
    warps: int
    stages: int  # of the pipeline
    least: int = 4  # tiles a split takes at least; below that merging costs more than it saves
    ahead: bool = False  # the first tiles are asked for early, and one loop runs over all of them


# Of few flat rows, of some, of many, and of float32 queries over 16-bit pages.
# The page of a tile is itself a load, so each buffered tile costs two stages.
FEW = {ROOMY: LaunchShape(16, 32, 4, 7), ORDINARY: LaunchShape(16, 32, 4, 5), LEAST: LaunchShape(16, 32, 8, 2)}
SOME = {ROOMY: LaunchShape(64, 64, 8, 2), ORDINARY: LaunchShape(64, 32, 8, 3), LEAST: LaunchShape(64, 32, 8, 1)}
MANY = SOME | {ROOMY: LaunchShape(128, 64, 8, 2)}
IN_HALVES = {ROOMY: LaunchShape(64, 64, 4, 2), ORDINARY: LaunchShape(32, 32, 4, 3), LEAST: LaunchShape(32, 32, 8, 2)}


def store_kv(kv: Tensor, k: Tensor, v: Tensor, ragged: Ragged) -> None:
    rows, kv_heads, dim = k.shape
    assert all((kv.is_contiguous(), k.stride(2) == 1, v.stride(2) == 1)), "pages are dense, heads side by side"
    values, scales = views(kv)
    _store_kernel[(rows, 2 * kv_heads)](
        values, scales, k, v, ragged.row_places, ragged.row_segments, ragged.tables, ragged.tables.stride(0),
        k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        KV_HEADS=kv_heads, DIM=dim, WIDE=triton.next_power_of_2(dim), PAGE=PAGE, PACKED=is_packed(kv), BLOCK=Q8_BLOCK,
        num_warps=1,
    )  # fmt: skip


def views(kv: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernels read: values, and for packed rows the same memory as scales."""
    if not is_packed(kv):
        return kv, kv
    assert kv.shape[4] % 2 == 0, f"scales of packed rows lie on even bytes, a row has {kv.shape[4]}"
    return kv.view(torch.int8), kv.view(torch.float16)


@triton.jit(do_not_specialize=["table_row"])
def _store_kernel(
    kv, scales, k, v, row_places, row_segments, tables, table_row, k_row, k_head, v_row, v_head,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, PAGE: tl.constexpr, PACKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) % KV_HEADS
    which = tl.program_id(1) // KV_HEADS
    at = tl.arange(0, WIDE)
    place = tl.load(row_places + row)
    page = tl.load(tables + tl.load(row_segments + row) * table_row + place // PAGE).to(tl.int64)
    if which == 0:
        value = tl.load(k + row * k_row + head * k_head + at, mask=at < DIM, other=0.0)
    else:
        value = tl.load(v + row * v_row + head * v_head + at, mask=at < DIM, other=0.0)
    to = ((page * 2 + which) * PAGE + place % PAGE) * KV_HEADS + head  # the row of kv
    if PACKED:
        count: tl.constexpr = WIDE // BLOCK
        row_bytes: tl.constexpr = DIM + 2 * (DIM // BLOCK)
        blocks = tl.reshape(value.to(tl.float32), [count, BLOCK])
        scale = tl.div_rn(tl.max(tl.abs(blocks), axis=1), tl.full([count], 127.0, tl.float32)).to(tl.float16)
        step = tl.where(scale == 0.0, 1.0, scale.to(tl.float32))  # a block of zeros stays zeros
        quotient = tl.div_rn(blocks, step[:, None] + tl.zeros_like(blocks))
        rounded = (quotient + 12582912.0) - 12582912.0  # to the nearest, to even on ties: 1.5 · 2^23 leaves no fraction
        rounded = tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int8)
        tl.store(kv + to * row_bytes + at, tl.reshape(rounded, [WIDE]), mask=at < DIM)
        block = tl.arange(0, count)
        tl.store(scales + (to * row_bytes + DIM) // 2 + block, scale, mask=block < DIM // BLOCK)
    else:
        tl.store(kv + to * DIM + at, value.to(kv.dtype.element_ty), mask=at < DIM)


def attend(q: Tensor, kv: Tensor, ragged: Ragged, scale: float) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _attend(q, kv, ragged, scale, out, None)
    return out


def attend_gated(q: Tensor, kv: Tensor, ragged: Ragged, scale: float, gate: Tensor) -> Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _attend(q, kv, ragged, scale, out, gate)
    return out.flatten(1)


def _attend(q: Tensor, kv: Tensor, ragged: Ragged, scale: float, out: Tensor, gate: Tensor | None) -> None:
    """Segments of few rows and segments of many want other tiles and splits, so they go in launches of their own."""
    few = [n for n in ragged.lengths if 0 < n <= FEW_ROWS]
    many = [n for n in ragged.lengths if n > FEW_ROWS]
    for lengths, shortest in ((few, 1), (many, FEW_ROWS + 1 if few else 1)):
        if lengths:
            _launch(
                q, kv, ragged.tables, None, ragged.starts, ragged.row_places,
                shortest, max(lengths), len(lengths), scale, out, gate, None, early=True,
            )  # fmt: skip


def attend_partial(
    q: Tensor, kv: Tensor, pages: Tensor, page_positions: Tensor, row_positions: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    rows, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
    starts = torch.arange(2, dtype=torch.int32, device=q.device) * rows
    _launch(q, kv, pages[None], page_positions, starts, row_positions, 1, rows, 1, scale, out, None, lse)
    return out, lse


def attend_whole(q: Tensor, kv: Tensor, pages: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    rows, heads, _ = q.shape
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty((rows, heads), dtype=torch.float32, device=q.device)
    starts = torch.arange(2, dtype=torch.int32, device=q.device) * rows
    places = torch.full((rows,), pages.shape[0] * PAGE - 1, dtype=torch.int32, device=q.device)
    _launch(q, kv, pages[None], None, starts, places, 1, rows, 1, scale, out, None, lse)
    return out, lse


def _launch(
    q: Tensor,
    kv: Tensor,
    tables: Tensor,
    page_positions: Tensor | None,
    starts: Tensor,
    row_positions: Tensor,
    shortest: int,
    longest: int,
    busy: int,
    scale: float,
    out: Tensor,
    gate: Tensor | None,
    lse: Tensor | None,
    early: bool = False,
) -> None:
    """Attend the segments of shortest to longest rows; there are `busy` of them.

    early: positions and tables were written before the previous launch began, as in every forward, whose first launch
    copies them: they are read before gdc_wait."""
    _, heads, dim = q.shape
    kv_heads = kv.shape[3]
    assert all((kv.is_contiguous(), q.stride(2) == 1)), "pages are dense, heads side by side"
    assert dim & (dim - 1) == 0, f"head dim {dim} must be a power of two"
    group, segments = heads // kv_heads, starts.shape[0] - 1
    pages = tables.shape[1]
    programs = 2 * processors(q.device)  # fill it
    shape = _form(longest * group, early and pages * kv_heads * busy <= programs, q, kv)
    tiles = triton.cdiv(longest * group, shape.rows)
    most = triton.cdiv(pages * PAGE, shape.least * shape.keys)  # splits that could have work
    programs = programs // 2 if shape.rows >= WIDE else programs
    splits = max(1, min(programs // (tiles * kv_heads * busy), most, 256, most_splits(segments * longest, heads)))
    single = longest == 1 and busy == segments
    split = splits > 1
    parts = (
        torch.empty((splits, segments * longest, heads, dim), dtype=torch.float32, device=q.device) if split else out
    )
    part_lse = torch.empty((splits, segments * longest, heads), dtype=torch.float32, device=q.device) if split else lse
    values, scales = views(kv)
    _attend_kernel[(tiles * splits, kv_heads, segments)](
        q, values, scales, tables, page_positions, starts, row_positions, parts, part_lse, None if split else gate,
        tables.stride(0), pages, q.stride(0), q.stride(1),
        0 if gate is None else gate.stride(0), 0 if gate is None else gate.stride(1), shortest, longest, splits,
        scale * 1.4426950408889634,
        SPLIT=split, SINGLE=single, AHEAD=shape.ahead, GROUP=group, KV_HEADS=kv_heads, DIM=dim, TILE_ROWS=shape.rows,
        TILE_KEYS=shape.keys, PAGE=PAGE, LEAST=shape.least, PRECISION=dot_precision(q.device, q.dtype),
        PACKED=is_packed(kv), BLOCK=Q8_BLOCK, HALVES=_in_halves(q, kv),
        num_warps=shape.warps, num_stages=shape.stages, **pdl_arguments(q.device),
    )  # fmt: skip
    if split:
        # Many rows are merged from few splits: a program takes more values of a head then, and not so many splits.
        block = PARTS if longest <= FEW_ROWS else min(PARTS, triton.next_power_of_2(splits))
        columns = min(COLUMNS * PARTS // block, dim)
        _merge_kernel[(dim // columns, heads, segments * longest)](
            parts, part_lse, out, lse, gate, starts, row_positions, pages,
            0 if gate is None else gate.stride(0), 0 if gate is None else gate.stride(1), shortest, longest, splits,
            HEADS=heads, DIM=dim, COLUMNS=columns, BLOCK=block, TILE_KEYS=shape.keys, PAGE=PAGE, LEAST=shape.least,
            LISTED=page_positions is not None, SINGLE=single, AHEAD=early, num_warps=4, **pdl_arguments(q.device),
        )  # fmt: skip


def _in_halves(q: Tensor, kv: Tensor) -> bool:
    return q.dtype == torch.float32 and kv.dtype in (torch.float16, torch.bfloat16)


def _form(flat_rows: int, paged: bool, q: Tensor, kv: Tensor) -> LaunchShape:
    """For segments of up to flat_rows flat rows; paged: the device has room for a program per page."""
    halves = _in_halves(q, kv)
    if q.dtype == torch.float32 and not halves:
        return LaunchShape(16, 16, 4, 1, ahead=paged and flat_rows <= 16)
    if flat_rows <= 16:
        if paged and is_roomy(q.device):
            return LaunchShape(16, PAGE, 4, 3, least=1, ahead=True)  # all of the page is on its way at once
        return fitting(q.device, FEW)
    return fitting(q.device, IN_HALVES if halves else SOME if flat_rows <= 64 else MANY)


@triton.jit
def _share(keys, splits, TILE_KEYS: tl.constexpr, LEAST: tl.constexpr):
    """Tiles that one split takes of `keys` positions; both kernels ask, so both agree."""
    return tl.maximum(tl.cdiv(tl.cdiv(keys, TILE_KEYS), splits), LEAST)


@triton.jit
def _bounds(starts, segment, SINGLE: tl.constexpr):
    """First row and rows of a segment; where all are single rows, without a trip to memory."""
    if SINGLE:
        start = segment
        length = 1
    else:
        start = tl.load(starts + segment)
        length = tl.load(starts + segment + 1) - start
    return start, length


@triton.jit
def load_tile(
    kv, scales, at, n, written, kind: tl.constexpr,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows at, at + KV_HEADS, … of kv as [keys, DIM] of the given type."""
    d = tl.arange(0, DIM)
    size: tl.constexpr = DIM + 2 * (DIM // BLOCK) if PACKED else DIM
    rows = kv + at * size + n[:, None] * (KV_HEADS * size) + d[None, :]
    tile = tl.load(rows) if written is None else tl.load(rows, mask=written, other=0)
    if PACKED:
        count: tl.constexpr = DIM // BLOCK
        block = tl.arange(0, count)
        places = scales + (at * size + DIM) // 2 + n[:, None] * (KV_HEADS * size // 2) + block[None, :]
        scale = tl.load(places) if written is None else tl.load(places, mask=written, other=0.0)
        blocks = tl.reshape(tile, [tile.shape[0], count, BLOCK]).to(tl.float32) * scale.to(tl.float32)[:, :, None]
        return tl.reshape(blocks, [tile.shape[0], DIM]).to(kind)
    return tile.to(kind)


@triton.jit
def _halves(x, kind: tl.constexpr):
    """x float32 as two of a narrower type, of which the second holds what the first has lost."""
    high = x.to(kind)
    return high, (x - high.to(tl.float32)).to(kind)


@triton.jit
def _scores(queries, lost, keys, scale, PRECISION: tl.constexpr, HALVES: tl.constexpr):
    """In powers of two; queries in halves have been scaled."""
    if HALVES:
        return tl.dot(queries, tl.trans(keys), tl.dot(lost, tl.trans(keys)))
    return tl.dot(queries, tl.trans(keys), input_precision=PRECISION) * scale


@triton.jit
def _add_values(weights, values, acc, PRECISION: tl.constexpr, HALVES: tl.constexpr):
    if HALVES:
        high, low = _halves(weights, values.dtype)
        return tl.dot(high, values, tl.dot(low, values, acc))
    return tl.dot(weights.to(values.dtype), values, acc, input_precision=PRECISION)


@triton.jit
def _ask_for_tile(
    kv, at, n, written, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """What `load_tile` will load is on its way to the L2."""
    width: tl.constexpr = kv.dtype.element_ty.primitive_bitwidth // 8
    size: tl.constexpr = DIM + 2 * (DIM // BLOCK) if PACKED else DIM
    lines: tl.constexpr = DIM * width // 128 if DIM * width >= 128 else 1
    line = tl.arange(0, lines) * (128 // width)
    live = (written[:, None] & (line >= 0)[None, :]).to(tl.int32)
    ask_for(kv + (at + n[:, None] * KV_HEADS) * size + line[None, :], live)


@triton.jit(do_not_specialize=["table_row", "table_pages", "shortest", "longest", "splits"])
def _attend_kernel(
    q, kv, scales, tables, page_positions, starts, row_positions, out, lse, gate,
    table_row, table_pages, q_row, q_head, gate_row, gate_head, shortest, longest, splits, scale,
    SPLIT: tl.constexpr, SINGLE: tl.constexpr, AHEAD: tl.constexpr, GROUP: tl.constexpr, KV_HEADS: tl.constexpr,
    DIM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, PAGE: tl.constexpr, LEAST: tl.constexpr,
    PRECISION: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr, HALVES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        if not AHEAD:
            gdc_wait()
    kv_head, segment = tl.program_id(1), tl.program_id(2)
    split = tl.program_id(0) % splits
    # the last tiles see the most keys: start them first
    tile = tl.num_programs(0) // splits - 1 - tl.program_id(0) // splits
    start, length = _bounds(starts, segment, SINGLE)
    idle = (length < shortest) | (length > longest) | (tile * TILE_ROWS >= length * GROUP)
    if not AHEAD:  # noqa: SIM102  decided at compile time; the inner one on the device
        if idle:
            return
    flat = tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
    live = flat < length * GROUP
    row = (start + flat // GROUP).to(tl.int64)
    head = kv_head * GROUP + flat % GROUP
    position = tl.load(row_positions + row, mask=live, other=-1)
    highest = tl.max(position, axis=0)
    if page_positions is None:
        lowest = tl.load(row_positions + start + tile * TILE_ROWS // GROUP, mask=not idle, other=0)
        # keys of the segment: splits share these
        whole = tl.load(row_positions + start + length - 1, mask=not idle, other=0) + 1
    else:
        lowest = -1  # pages may lie anywhere: every tile is masked
        whole = table_pages * PAGE
    share = _share(whole, splits, TILE_KEYS, LEAST)
    first = split * share
    last = tl.cdiv(whole, TILE_KEYS)
    if page_positions is None:
        last = tl.cdiv(highest + 1, TILE_KEYS)  # the keys this tile sees
    if SPLIT:
        idle = idle | (first * TILE_KEYS >= whole)
        last = tl.minimum(last, first + share)
    n = tl.arange(0, TILE_KEYS)
    table = tables + segment.to(tl.int64) * table_row
    if AHEAD and PDL:
        # What this step itself stores may not be there yet, so keys are asked for and not loaded.
        for t in range(first, tl.where(idle, first, tl.minimum(last, first + LEAST))):
            page = tl.load(table + t * TILE_KEYS // PAGE).to(tl.int64)
            at = (page * 2 * PAGE + t * TILE_KEYS % PAGE) * KV_HEADS + kv_head
            written = t * TILE_KEYS + n <= highest
            _ask_for_tile(kv, at, n, written, KV_HEADS, DIM, PACKED, BLOCK)
            _ask_for_tile(kv, at + PAGE * KV_HEADS, n, written, KV_HEADS, DIM, PACKED, BLOCK)
        gdc_wait()
    if idle:
        return
    d = tl.arange(0, DIM)
    queries = tl.load(q + row[:, None] * q_row + head[:, None] * q_head + d[None, :], mask=live[:, None], other=0.0)
    kind: tl.constexpr = kv.dtype.element_ty if HALVES else queries.dtype
    lost = queries
    if HALVES:
        queries, lost = _halves(queries * scale, kind)
    top = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, DIM], tl.float32)
    # Weights in halves are at most 2^15 and not 1: float16 has more room above it than below.
    RISE: tl.constexpr = 15.0 if HALVES else 0.0
    # Tiles before this one need no mask. But a second loop waits for its own first keys, so few tiles go in one.
    clear = first if AHEAD else tl.minimum(tl.maximum((lowest + 1) // TILE_KEYS, first), last)
    for t in range(first, clear):
        page = tl.load(table + t * TILE_KEYS // PAGE).to(tl.int64)
        at = (page * 2 * PAGE + t * TILE_KEYS % PAGE) * KV_HEADS + kv_head  # the tile's first row of kv
        keys = load_tile(kv, scales, at, n, None, kind, KV_HEADS, DIM, PACKED, BLOCK)
        scores = _scores(queries, lost, keys, scale, PRECISION, HALVES)
        new_top = tl.maximum(top, tl.max(scores, axis=1) - RISE)
        weights = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        at += PAGE * KV_HEADS
        values = load_tile(kv, scales, at, n, None, kind, KV_HEADS, DIM, PACKED, BLOCK)
        acc = _add_values(weights, values, acc * fade[:, None], PRECISION, HALVES)
        total = total * fade + tl.sum(weights, axis=1)
        top = new_top
    for t in range(clear, last):
        page = tl.load(table + t * TILE_KEYS // PAGE).to(tl.int64)
        at = (page * 2 * PAGE + t * TILE_KEYS % PAGE) * KV_HEADS + kv_head
        key = t * TILE_KEYS + n
        if page_positions is not None:
            key = tl.load(page_positions + t * TILE_KEYS // PAGE).to(tl.int32) + t * TILE_KEYS % PAGE + n
        written = (key <= highest)[:, None]  # later keys are uninitialised memory, NaN perhaps
        keys = load_tile(kv, scales, at, n, written, kind, KV_HEADS, DIM, PACKED, BLOCK)
        scores = _scores(queries, lost, keys, scale, PRECISION, HALVES)
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) - RISE)
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - safe[:, None])
        fade = tl.exp2(top - safe)
        at += PAGE * KV_HEADS
        values = load_tile(kv, scales, at, n, written, kind, KV_HEADS, DIM, PACKED, BLOCK)
        acc = _add_values(weights, values, acc * fade[:, None], PRECISION, HALVES)
        total = total * fade + tl.sum(weights, axis=1)
        top = new_top
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if gate is not None:
        gated = tl.load(
            gate + row[:, None] * gate_row + head[:, None] * gate_head + d[None, :], mask=live[:, None], other=0.0
        )
        acc = acc * tl.sigmoid(gated.to(tl.float32))
    to = row
    if SPLIT:  # parts lie by segment and row inside it
        to = (split * tl.num_programs(2) + segment).to(tl.int64) * longest + flat // GROUP
    to = to * (KV_HEADS * GROUP) + head
    tl.store(out + to[:, None] * DIM + d[None, :], acc.to(out.dtype.element_ty), mask=live[:, None])
    if lse is not None:
        # scores are in powers of two; the caller's log-sum-exp is natural
        natural = tl.where(total > 0.0, (top + tl.log2(total)) * 0.6931471805599453, float("-inf"))
        tl.store(lse + to, natural, mask=live)


@triton.jit(do_not_specialize=["table_pages", "shortest", "longest", "splits"])
def _merge_kernel(
    parts, part_lse, out, lse, gate, starts, row_positions, table_pages, gate_row, gate_head,
    shortest, longest, splits, HEADS: tl.constexpr, DIM: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
    TILE_KEYS: tl.constexpr, PAGE: tl.constexpr, LEAST: tl.constexpr, LISTED: tl.constexpr, SINGLE: tl.constexpr,
    AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        if not AHEAD:
            gdc_wait()
    head = tl.program_id(1)
    segment, local = tl.program_id(2) // longest, tl.program_id(2) % longest
    start, length = _bounds(starts, segment, SINGLE)
    idle = (length < shortest) | (length > longest) | (local >= length)
    row = (start + local).to(tl.int64)
    whole = table_pages * PAGE if LISTED else tl.load(row_positions + start + length - 1, mask=not idle, other=0) + 1
    share = _share(whole, splits, TILE_KEYS, LEAST)
    worked = tl.cdiv(tl.cdiv(whole, TILE_KEYS), share)
    if AHEAD and PDL:
        gdc_wait()
    if idle:
        return
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    if gate is not None:
        opening = tl.sigmoid(tl.load(gate + row * gate_row + head * gate_head + j).to(tl.float32))
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([COLUMNS], tl.float32)
    for first in range(0, worked, BLOCK):
        s = first + tl.arange(0, BLOCK)
        at = (s.to(tl.int64) * tl.num_programs(2) + tl.program_id(2)) * HEADS + head
        logs = tl.load(part_lse + at, mask=s < worked, other=float("-inf"))
        part = tl.load(parts + at[:, None] * DIM + j[None, :], mask=(s < worked)[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(logs, axis=0))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp(logs - safe)
        fade = tl.exp(top - safe)
        acc = acc * fade + tl.sum(part * weights[:, None], axis=0)
        total = total * fade + tl.sum(weights, axis=0)
        top = new_top
    acc = acc / tl.where(total > 0.0, total, 1.0)
    if gate is not None:
        acc = acc * opening
    tl.store(out + (row * HEADS + head) * DIM + j, acc.to(out.dtype.element_ty))
    if lse is not None:  # noqa: SIM102  decided at compile time; the inner one on the device
        if tl.program_id(0) == 0:
            one = tl.arange(0, 1)
            tl.store(lse + row * HEADS + head + one, tl.where(total > 0.0, top + tl.log(total), float("-inf")))


def sigmoid_gate(o: Tensor, gate: Tensor) -> Tensor:
    rows, heads, dim = o.shape
    assert all((o.is_contiguous(), gate.stride(2) == 1)), "heads lie side by side"
    out = torch.empty((rows, heads * dim), dtype=o.dtype, device=o.device)
    block = 1024
    _gate_kernel[(rows, triton.cdiv(heads * dim, block))](
        o, gate, out, gate.stride(0), gate.stride(1), heads * dim, DIM=dim, BLOCK=block
    )
    return out


@triton.jit
def _gate_kernel(o, gate, out, gate_row, gate_head, n, DIM: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    value = tl.load(o + row * n + at, mask=inside, other=0.0).to(tl.float32)
    opening = tl.load(gate + row * gate_row + at // DIM * gate_head + at % DIM, mask=inside, other=0.0)
    tl.store(out + row * n + at, (value * tl.sigmoid(opening.to(tl.float32))).to(out.dtype.element_ty), mask=inside)

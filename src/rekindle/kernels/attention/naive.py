"""Attention over paged KV, by definition and as the CPU runs it.

kv of one layer is [pages, 2, PAGE, kv_heads, row]; rows.py says what a row is. A segment attends groups of GROUP pages,
in ascending position, and merges the groups by their log-sum-exp. Every group is first gathered into memory of its own,
so the bits of a result depend on tokens, position and length alone: not on the physical pages, not on the other
segments. A caller that attends pages in turns gets the same bits by running the same groups through
`attend_partial` and `merge_partials`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rekindle.kernels.attention.rows import from_rows, to_rows
from rekindle.kernels.ragged import Ragged
from rekindle.spec import PAGE

GROUP = 16  # pages attended at once
ROWS = 256  # query rows attended at once: bounds the scores to ROWS · heads · GROUP · PAGE values


def store_kv(kv: Tensor, k: Tensor, v: Tensor, ragged: Ragged) -> None:
    """Write k and v [rows, kv_heads, dim] at the positions of their rows."""
    places = ragged.row_places.long()
    pages = ragged.tables[ragged.row_segments.long(), places // PAGE].long()
    kv[pages, 0, places % PAGE] = to_rows(k, kv.dtype)
    kv[pages, 1, places % PAGE] = to_rows(v, kv.dtype)


def attend(q: Tensor, kv: Tensor, ragged: Ragged, scale: float) -> Tensor:
    """q [rows, heads, dim]; every row sees all of its table up to its own place."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for i, _, segment in ragged.walk():
        place = int(ragged.row_places[segment.start])
        for first in range(segment.start, segment.stop, ROWS):
            rows = slice(first, min(first + ROWS, segment.stop))
            out[rows] = _attend_rows(q[rows], kv, ragged.tables[i], place + first - segment.start, scale)
    return out


def bring_together(kv: Tensor, page_addresses: Tensor, ragged: Ragged) -> tuple[Tensor, Ragged]:
    """The attended pages from where they lie, and the batch with tables that name them."""
    gathered, tables = list[Tensor](), torch.zeros_like(ragged.tables)
    for i, _, segment in ragged.walk():
        for j in range(int(ragged.row_places[segment.stop - 1]) // PAGE + 1):
            address = int(page_addresses[ragged.tables[i, j]])
            tables[i, j] = len(gathered)
            page = torch.frombuffer(bytearray(ctypes.string_at(address, kv[0].nbytes)), dtype=kv.dtype)
            gathered.append(page.view(kv.shape[1:]))
    return torch.stack(gathered), replace(ragged, tables=tables)


def attend_far(
    q: Tensor, kv: Tensor, page_addresses: Tensor, ragged: Ragged, scale: float, gate: Tensor | None
) -> Tensor:
    """`attend`, gated, over pages that are first brought together from where they lie."""
    out = attend(q, *bring_together(kv, page_addresses, ragged), scale)
    return out.flatten(1) if gate is None else sigmoid_gate(out, gate)


def _attend_rows(q: Tensor, kv: Tensor, table: Tensor, place: int, scale: float) -> Tensor:
    """Consecutive rows of one segment, the first of them at `place` of the table."""
    rows = q.shape[0]
    row_places = torch.arange(place, place + rows, device=q.device)
    pages = -(-(place + rows) // PAGE)
    outs, lses = [], []
    for first in range(0, pages, GROUP):
        group = torch.arange(first, min(first + GROUP, pages), device=q.device)
        out, lse = attend_partial(q, kv, table[group], group * PAGE, row_places, scale)
        outs.append(out)
        lses.append(lse)
    return merge_partials(outs, lses).to(q.dtype)


def attend_partial(
    q: Tensor, kv: Tensor, pages: Tensor, page_positions: Tensor, row_positions: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Rows of one segment over a set of pages: (out float32 [rows, heads, dim], lse float32 [rows, heads]).

    Page i holds the positions [page_positions[i], + PAGE); both lists ascend. A row that sees none of them gets
    out 0 and lse -inf.
    """
    rows, heads, dim = q.shape
    kv_heads = kv.shape[3]
    key_positions = (page_positions[:, None] + torch.arange(PAGE, device=q.device)).flatten()
    written = int((key_positions <= row_positions.max()).sum())  # what lies behind was never written
    keys, values = _gather(kv, pages, 0)[:, :written], _gather(kv, pages, 1)[:, :written]
    # [kv_heads, rows · heads / kv_heads, dim]: the query heads of one kv head side by side
    grouped = q.float().view(rows, kv_heads, -1, dim).transpose(0, 1).reshape(kv_heads, -1, dim)
    scores = torch.bmm(grouped, keys.transpose(1, 2)).mul_(scale).view(kv_heads, rows, -1, written)
    hidden = key_positions[None, :written] > row_positions[:, None]
    scores.masked_fill_(hidden[None, :, None], -torch.inf)
    lse = scores.logsumexp(-1)  # [kv_heads, rows, heads / kv_heads]
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp_()
    out = torch.bmm(weights.view(kv_heads, -1, written), values).view(kv_heads, rows, -1, dim)
    return out.transpose(0, 1).reshape(rows, heads, dim), lse.transpose(0, 1).reshape(rows, heads)


def attend_whole(q: Tensor, kv: Tensor, pages: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    positions = torch.arange(len(pages), device=q.device) * PAGE
    behind = torch.full((len(q),), len(pages) * PAGE, device=q.device)
    return attend_partial(q, kv, pages, positions, behind, scale)


def _gather(kv: Tensor, pages: Tensor, which: int) -> Tensor:
    """Keys (0) or values (1) of the pages, float32 [kv_heads, positions, dim], in memory of their own."""
    gathered = from_rows(kv[:, which].index_select(0, pages))
    return gathered.flatten(0, 1).transpose(0, 1)


def merge_partials(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> Tensor:
    """The attention over the union of disjoint sets of positions, float32 [rows, heads, dim]."""
    if len(outs) == 1:
        return outs[0].float()
    stacked = torch.stack(tuple(lses)).float()  # [parts, rows, heads]
    highest = stacked.amax(0).nan_to_num(neginf=0.0)
    shares = (stacked - highest).exp()
    total = sum(out.float() * share[..., None] for out, share in zip(outs, shares, strict=True))
    assert isinstance(total, Tensor), "there is at least one part"
    return total / shares.sum(0).clamp_min(1e-30)[..., None]


def sigmoid_gate(o: Tensor, gate: Tensor) -> Tensor:
    """o · sigmoid(gate), both [rows, heads, dim] -> [rows, heads · dim]."""
    return (o.float() * gate.float().sigmoid()).to(o.dtype).flatten(1)

"""Attention over paged KV: store, attend, attend parts of it, merge the parts, gate the result."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rekindle.kernels.attention import cpu, naive
from rekindle.kernels.attention.naive import GROUP
from rekindle.kernels.attention.rows import is_packed
from rekindle.kernels.ragged import Ragged

FAR_ROWS = 16  # of a segment, up to which it reads pages over the link itself: with more it might read them many times


def store_kv(kv: Tensor, k: Tensor, v: Tensor, ragged: Ragged) -> None:
    """Write k, v [rows, kv_heads, dim] into kv [pages, 2, PAGE, kv_heads, row] at the positions of their rows."""
    if kv.is_cuda:
        from rekindle.kernels.attention import triton

        triton.store_kv(kv, k, v, ragged)
    else:
        naive.store_kv(kv, k, v, ragged)


def attend(q: Tensor, kv: Tensor, ragged: Ragged, scale: float) -> Tensor:
    """q [rows, heads, dim]: causal attention of every row over all stored positions up to its own."""
    if kv.is_cuda:
        from rekindle.kernels.attention import triton

        return triton.attend(q, kv, ragged, scale)
    return cpu.attend(q, kv, ragged, scale, None) if cpu.reads(q, kv) else naive.attend(q, kv, ragged, scale)


def attend_gated(q: Tensor, kv: Tensor, ragged: Ragged, scale: float, gate: Tensor) -> Tensor:
    """sigmoid_gate(attend(…), gate) -> [rows, heads · dim]; the gate costs no launch of its own, and no call."""
    if kv.is_cuda:
        from rekindle.kernels.attention import triton

        return triton.attend_gated(q, kv, ragged, scale, gate)
    if cpu.reads(q, kv):
        return cpu.attend(q, kv, ragged, scale, gate).flatten(1)
    return naive.sigmoid_gate(naive.attend(q, kv, ragged, scale), gate)


def attend_far(
    q: Tensor, kv: Tensor, page_addresses: Tensor, ragged: Ragged, scale: float, gate: Tensor | None
) -> Tensor:
    """attend_gated, or attend, over pages that lie anywhere -> [rows, heads · dim]; for segments of FAR_ROWS at most.

    Tables hold page ids; page n lies at page_addresses[n] (int64), in the pool or in pinned host memory. kv gives the
    type and shape of pages.
    """
    if kv.is_cuda:
        from rekindle.kernels.attention import far

        return far.attend_far(q, kv, page_addresses, ragged, scale, gate)
    kv, ragged = naive.bring_together(kv, page_addresses, ragged)
    return attend(q, kv, ragged, scale).flatten(1) if gate is None else attend_gated(q, kv, ragged, scale, gate)


def attend_partial(
    q: Tensor, kv: Tensor, pages: Tensor, page_positions: Tensor, row_positions: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Rows of one segment over the given pages only: (out float32 [rows, heads, dim], lse float32 [rows, heads]).

    page_positions[i] is the first position in pages[i]; both ascend. `attend` on a CPU is exactly merge_partials over
    groups of GROUP pages in ascending order.
    """
    if kv.is_cuda:
        from rekindle.kernels.attention import triton

        return triton.attend_partial(q, kv, pages, page_positions, row_positions, scale)
    if cpu.reads(q, kv) and len(pages) <= GROUP:
        return cpu.attend_partial(q, kv, pages, page_positions, row_positions, scale)
    return naive.attend_partial(q, kv, pages, page_positions, row_positions, scale)


def attend_whole(q: Tensor, kv: Tensor, pages: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """`attend_partial` over pages that lie before all rows: nothing in them is hidden."""
    if kv.is_cuda:
        from rekindle.kernels.attention import triton

        return triton.attend_whole(q, kv, pages, scale)
    return naive.attend_whole(q, kv, pages, scale)


def merge_partials(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> Tensor:
    """Attention over the union of the parts: outs [rows, heads, dim], lses [rows, heads] -> float32."""
    return cpu.merge_partials(outs, lses) if cpu.merges(outs) else naive.merge_partials(outs, lses)


def sigmoid_gate(o: Tensor, gate: Tensor) -> Tensor:
    """o · sigmoid(gate), both [rows, heads, dim] (gate in any row and head stride) -> [rows, heads · dim]."""
    if o.is_cuda:
        from rekindle.kernels.attention import triton

        return triton.sigmoid_gate(o, gate)
    if cpu.merges([o]):
        return cpu.sigmoid_gate(o, gate)
    return naive.sigmoid_gate(o, gate)


__all__ = [
    "FAR_ROWS",
    "GROUP",
    "attend",
    "attend_far",
    "attend_gated",
    "attend_partial",
    "attend_whole",
    "is_packed",
    "merge_partials",
    "sigmoid_gate",
    "store_kv",
]

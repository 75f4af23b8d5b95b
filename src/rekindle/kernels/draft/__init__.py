"""What only a drafter needs: attention of a block over a ring, convolutions along a block, a path through candidates.

A ring holds K and V of the last `places` positions of a slot, position p in place p % places. A block begins at `stop`,
right behind what the ring holds: positions [start, stop), of which older ones may have been written over.
"""

from __future__ import annotations

from torch import Tensor

from rekindle.kernels.draft import naive
from rekindle.kernels.draft.naive import ring_rows


def store_ring(ring: Tensor, k: Tensor, v: Tensor, slots: Tensor, firsts: Tensor, counts: Tensor) -> None:
    """The first `counts` of every slot's rows stand at the positions from `firsts` on, and go into its ring; of more
    than it holds the last ones. ring [slots, 2, places, kv_heads, dim]; k, v [len(slots) · rows, kv_heads, dim]."""
    if ring.is_cuda:
        from rekindle.kernels.draft import triton

        return triton.store_ring(ring, k, v, slots, firsts, counts)
    return naive.store_ring(ring, k, v, slots, firsts, counts)


def attend_ring(
    query: Tensor, k: Tensor, v: Tensor, ring: Tensor, slots: Tensor, starts: Tensor, stops: Tensor,
    window: int | None, causal: bool,
) -> Tensor:  # fmt: skip
    """Blocks of query [len(slots) · rows, heads, dim] over the ring of their slot and over their own k and v
    [len(slots) · rows, kv_heads, dim] -> like query. A row sees positions of the ring that are less than `window`
    before its own, and of its block all rows, or with `causal` those up to itself."""
    if query.is_cuda:
        from rekindle.kernels.draft import triton

        return triton.attend_ring(query, k, v, ring, slots, starts, stops, window, causal)
    return naive.attend_ring(query, k, v, ring, slots, starts, stops, window, causal)


def convolve(x: Tensor, base: Tensor, computed: Tensor, side: int, block: int) -> Tensor:
    """out[i, c] = Σ_t (base[side, t, c] + computed[i, side, t, c // group]) · x[i - t, c]; before the block of row i
    there is nothing. x [blocks · block, channels], base [2, taps, channels], computed [rows, 2 · taps · groups]."""
    if x.is_cuda:
        from rekindle.kernels.draft import triton

        return triton.convolve(x, base, computed, side, block)
    return naive.convolve(x, base, computed, side, block)


def walk(values: Tensor, first: Tensor, steps: Tensor) -> Tensor:
    """The best path through candidates, taken greedily: values [blocks, rows, candidates], first [blocks, candidates]
    what follows the known token, steps [blocks, rows - 1, candidates, candidates] from one row's to the next one's ->
    which candidate of every row, int64 [blocks, rows]."""
    if values.is_cuda:
        from rekindle.kernels.draft import triton

        return triton.walk(values, first, steps)
    return naive.walk(values, first, steps)


__all__ = ["attend_ring", "convolve", "ring_rows", "store_ring", "walk"]

"""Where prefill chunks begin and end: a function of position, never of history (law 2)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise


def chunk_end(position: int, stop: int, grid: int, cuts: Sequence[int]) -> int:
    """The end of the chunk that begins at `position`: the next grid line, cut or `stop`, whichever comes first.

    `cuts` are ascending. A restored run and a cold one with the same cuts meet the same edges, because the answer
    does not depend on how the run came to `position`.
    """
    assert position < stop, f"no chunk begins at {position}: the prompt ends at {stop}"
    end = min((position // grid + 1) * grid, stop)
    index = bisect_right(cuts, position)
    if index < len(cuts):
        end = min(end, cuts[index])
    return end


def chunks(start: int, stop: int, grid: int, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """All chunks of [start, stop)."""
    edges = [start]
    while edges[-1] < stop:
        edges.append(chunk_end(edges[-1], stop, grid, cuts))
    return list(pairwise(edges))

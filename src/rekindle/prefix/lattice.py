"""Where snapshots are taken between two boundaries that lie far apart.

Prompts part in the middle of a message too: another question behind the same document, a date in a system prompt, raw
completions under one prefix. What they share past the last snapshot is computed again. So a long run of prefill gets a
few points: even ones, so that a branch anywhere in it costs a small part of the run; and, since most branch near the
end, further ones that halve what is left to the end.

All lie on lines of the chunk grid, where a chunk ends anyway: taking them or not changes no bit (law 2). Points of one
conversation share their pages, so each costs the state of fixed size. They are the first to be evicted.
"""

from __future__ import annotations

MOST = 8  # even points of one run
LEAST = 256  # tokens from one even point to the next: to compute fewer costs less than to keep them
SHARE = 4  # the even points of one run may take 1/4 of the RAM tier


def most_points(budget: int, state: int) -> int:
    """Even points that one run may have; `state`: bytes of a snapshot beside its pages."""
    return min(MOST, budget // SHARE // max(1, state))


def lattice(start: int, stop: int, grid: int, most: int) -> list[int]:
    """Positions inside [start, stop), ascending; a snapshot lies, or will lie, at either end.

    grid 512, run [0, 18,000), 8 even points: 2,048, 4,096 … 16,384, then 16,896 and 17,408
    """
    if most < 1 or stop - start < max(2 * LEAST, grid):
        return []
    gap = -(-max(LEAST, -(-(stop - start) // (most + 1))) // grid) * grid
    points = set(range(start // gap * gap + gap, stop, gap))
    left = gap // 2
    while left >= max(grid, LEAST):
        points.add((stop - left) // grid * grid)
        left //= 2
    return sorted(point for point in points if start + LEAST // 2 <= point < stop)

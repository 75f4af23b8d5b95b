"""Rows of prefill chunks that share their batches with decode rows, on CPUs and across shards.

A batch takes about as long as its chunks' rows and a number of further rows, whatever chunks it has: that is what it
costs to read the weights, to run the rows of those who answer, and to go through links. How many rows this is worth is
learned where batches of different sizes follow one another; how fast the machine is now, the last batch says.

A row of an answer is in one batch at a time, so a batch's time from launch to result is the gap in that answer, on one
stage as on several.
"""

from __future__ import annotations

from rekindle.engine.pace import LEAST, MOST_STRETCHED, chunk_sizes

FIXED = 64.0  # rows that a batch is taken to cost beside its chunks, where nothing is known
MOST_FIXED = 4  # times the grid that is believed of it
FADE = 0.98  # of it with every chunk: too much of it keeps chunks long, and while they are alike nothing is learned
NEW = 0.5  # weight of what was measured last, beside what was known
SLOWER = 2.0  # times as long, at most, a prompt may take for the sake of those who answer


class SharedPace:
    def __init__(self, max_gap: float, grid: int) -> None:
        """max_gap: seconds between two tokens of an answer, while one prompt comes in."""
        self._max_gap = max_gap
        self._sizes = chunk_sizes(grid)
        self._fixed = FIXED
        self._last: tuple[int, float] | None = None  # the last batch: rows of its chunks, and seconds
        self._reached = 0  # rows of chunks of the last batch that had a whole size

    def note(self, rows: int, seconds: float) -> None:
        """A batch took so long, from its launch to its result. rows: of its chunks; 0: it had decode rows alone."""
        self._fixed *= FADE if rows else 1
        if self._last is not None:
            (less, short), (more, long) = sorted([self._last, (rows, seconds)])
            if more - less >= LEAST and short < long:  # else another program or a wait of the host made the difference
                found = max(0.0, (short * more - long * less) / (long - short))
                self._fixed += NEW * (min(found, MOST_FIXED * self._sizes[-1]) - self._fixed)
        self._last = rows, max(1e-6, seconds)
        self._reached = rows if rows in self._sizes else max(self._reached, rows)

    def rows(self, waiting: int = 1) -> int:
        """Of all chunks of the next batch together, while `waiting` prompts want one."""
        least = self._least()
        if self._last is None:
            return least
        rows, seconds = self._last
        fitting = self._max_gap * min(MOST_STRETCHED, waiting) * (self._fixed + rows) / seconds - self._fixed
        most = min(fitting, 2 * self._reached)  # no further than one size beyond what was measured
        return max((size for size in self._sizes if least <= size <= most), default=least)

    def _least(self) -> int:
        """The smallest size by which a prompt takes at most SLOWER times as long as by whole chunks."""
        whole = self._sizes[-1]
        slowest = SLOWER * (self._fixed + whole) / whole
        return next(size for size in self._sizes if (self._fixed + size) / size <= slowest)

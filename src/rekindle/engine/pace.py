"""How long a prefill chunk may be while other sequences answer: the gap between two of their tokens has a target."""

from __future__ import annotations

import logging

log = logging.getLogger("rekindle.engine")

FIRST, LEAST = 512, 64  # rows of a chunk while others answer: before anything is known, and at least
DOUBLED = 1.5  # what twice the rows may take, if that was never measured: weights are read once for all rows
HALVED = 0.75  # half the rows must not take more, or the prompt would wait twice as long for next to nothing


class Pace:
    """Rows of a chunk beside running answers: as many as the target for gaps allows, by the time the last ones took."""

    def __init__(self, max_gap: float, grid: int) -> None:
        """max_gap: seconds between two tokens of an answer."""
        self.max_gap = max_gap
        self.rows = min(FIRST, grid)
        self._least, self._most = min(LEAST, grid), grid
        self._step = 0.0  # seconds of the last decode step
        self._took: dict[int, float] = {}  # by rows: seconds of the last chunk with that many

    def note_step(self, seconds: float) -> None:
        self._step = seconds

    def note_chunk(self, rows: int, seconds: float) -> None:
        """Halve the rows if the gap was too long and fewer rows shorten it; double them if twice as many are likely to
        fit. Chunks that ended early at a boundary say nothing."""
        if rows != self.rows:
            return
        self._took[rows] = seconds
        if seconds > HALVED * self._took.get(2 * rows, seconds / HALVED):
            self.rows = self._least = 2 * rows
            log.info("chunks beside answers keep %d tokens: with half as many they take as long", self.rows)
        elif self._step + seconds > self.max_gap:
            self.rows = max(rows // 2, self._least)
        elif 2 * rows <= self._most and self._step + self._took.get(2 * rows, DOUBLED * seconds) <= self.max_gap:
            self.rows = 2 * rows

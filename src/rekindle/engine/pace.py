"""How long a prefill chunk may be while other sequences answer: the gap between two of their tokens has a target."""

from __future__ import annotations

import logging
import math

log = logging.getLogger("rekindle.engine")

FIRST, LEAST = 512, 64  # rows of a chunk while others answer: before anything is known, and at least
DOUBLED = 1.5  # what twice the rows take, if that was never measured: weights are read once for all rows
HALVED = 0.75  # half the rows must not take more, or the prompt would wait twice as long for next to nothing
LASTING = 256  # chunks that a measurement outlives: it may have been of a moment when the machine had other work


class Pace:
    """Rows of a chunk beside running answers: as many as the target for gaps allows, by the time the last ones took,
    whether anybody was answering then or not."""

    def __init__(self, max_gap: float, grid: int) -> None:
        """max_gap: seconds between two tokens of an answer, while one prompt comes in."""
        self.max_gap = max_gap
        self._sizes = [grid]
        while self._sizes[0] % 2 == 0 and self._sizes[0] // 2 >= LEAST:
            self._sizes.insert(0, self._sizes[0] // 2)
        self._first = max((size for size in self._sizes if size <= FIRST), default=self._sizes[0])
        self._step = 0.0  # seconds of the last decode step
        self._took: dict[int, float] = {}  # by rows: seconds of the last chunk with that many
        self._chunks = 0  # that were measured,
        self._when: dict[int, int] = {}  # and how many there were when the last of that size was
        self._least = self._sizes[0]  # that was said in the log

    def note_step(self, seconds: float) -> None:
        self._step = seconds

    def note_chunk(self, rows: int, seconds: float) -> None:
        """Chunks of other sizes, which ended early at a boundary, say nothing."""
        self._chunks += 1
        if rows in self._sizes:
            self._took[rows], self._when[rows] = seconds, self._chunks
        for size in [size for size, when in self._when.items() if self._chunks - when >= LASTING]:
            del self._took[size], self._when[size]

    def rows(self, waiting: int = 1, answering: int = 1) -> int:
        """Of the next chunk, while `waiting` prompts want one and so many sequences answer. Every further prompt
        stretches the target by its share: of many that come at once most would wait for the sake of a few."""
        if not self._took:
            return self._first
        room = self.max_gap * (1 + (waiting - 1) / max(1, answering)) - self._step
        least = max(self._least_useful(), min(self._took) // 2)  # a size is not skipped on the way down
        fitting = [size for size in self._sizes if size >= least and self._expected(size) <= room]
        return max(fitting, default=least)

    def _least_useful(self) -> int:
        """The smallest size down to which every halving makes chunks shorter."""
        useful = self._sizes[-1]
        for size in reversed(self._sizes[:-1]):
            if self._expected(size) > HALVED * self._expected(2 * size):
                break
            useful = size
        if useful > self._least:
            log.info("chunks beside answers keep %d tokens: with half as many they take as long", useful)
        self._least = max(self._least, useful)
        return useful

    def _expected(self, size: int) -> float:
        """Seconds; of a size that was not measured, by the next smaller that was, else by the next larger. Never more
        than smaller chunks take for as many rows: then it was measured while the machine did something else."""
        bounds = [took * size / rows for rows, took in self._took.items() if rows < size]
        if (took := self._took.get(size)) is not None:
            return min([took, *bounds])
        near = max((rows for rows in self._took if rows < size), default=min(self._took))
        return min([self._took[near] * DOUBLED ** math.log2(size / near), *bounds])

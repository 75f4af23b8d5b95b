"""What a prefill chunk may take while other sequences answer: the gap between two of their tokens has a target.

A chunk that can pause between its layers has its full length, and so many of its sections run between two steps as fit.
Others are made shorter, though each of them reads all weights.

A longer context or another program makes chunks of all sizes slower, so what is remembered of sizes is how they
compare: what twice the rows take. How fast the machine is now, the last chunk says.
"""

from __future__ import annotations

import logging
from math import log2

log = logging.getLogger("rekindle.engine")

FIRST, LEAST = 512, 64  # rows of a chunk while others answer: before anything is known, and at least
DOUBLED = 1.5  # times as long that twice the rows take, where nothing is known: weights are read once for all rows
MOST_DOUBLED = 2.2  # that is believed; the least is as long
HALVED = 0.75  # half the rows must not take more, or the prompt would wait twice as long for next to nothing
NEW = 0.5  # weight of what was measured last, beside what was known
GROWN = 1.2  # times as long as the last one, at most, a step is taken for that was over before the host looked
FADE = 0.99  # of what is known beside the usual, with every chunk: the machine may have had other work just then
MOST_STRETCHED = 4  # times the target, while many prompts wait


def chunk_sizes(grid: int) -> list[int]:
    """The grid and its halves, the smallest first."""
    sizes = [grid]
    while sizes[0] % 2 == 0 and sizes[0] // 2 >= LEAST:
        sizes.insert(0, sizes[0] // 2)
    return sizes


class Pace:
    """Rows of a chunk beside running answers: as many as the target for gaps allows, by the time the last ones took,
    whether anybody was answering then or not."""

    def __init__(self, max_gap: float, grid: int, shorter_gap: float | None = None) -> None:
        """max_gap: seconds between two tokens of an answer, while one prompt comes in; shorter_gap: where chunks are
        made shorter for it, if that is another."""
        self.max_gap = max_gap
        self._shorter_gap = max_gap if shorter_gap is None else shorter_gap
        self._sizes = chunk_sizes(grid)
        self._first = max((size for size in self._sizes if size <= FIRST), default=self._sizes[0])
        self._doubled = dict.fromkeys(self._sizes[:-1], DOUBLED)  # by size: times as long that twice the rows take
        self._step = 0.0  # seconds of the last decode step
        self._last: tuple[int, float] | None = None  # the last chunk of such a size: rows and seconds
        self._latest: tuple[int, float] | None = None  # the last of any size
        self._range = 0, 0  # the smallest and the largest size that was measured
        self._told = self._sizes[0]  # the least size that was spoken of in the log

    def note_step(self, seconds: float, at_most: bool = False) -> None:
        """at_most: the step was over some time before the host looked. Once, with four captures to finish, that was 15
        ms later, and for a step of 17 ms seven sections of a chunk were let in instead of five."""
        known = self._step
        self._step = min(seconds, GROWN * known) if at_most and known else seconds

    def note_chunk(self, rows: int, seconds: float, share: float = 1.0, at_most: bool = False) -> None:
        """share: of its layers, that ran. at_most: as of a step. Chunks of other sizes, which ended early at a
        boundary, say nothing of how sizes compare."""
        if at_most and self._latest is not None:
            seconds = min(seconds, GROWN * share * self._by_latest(rows))
        self._latest = rows, seconds / share
        if rows not in self._sizes or share < 1:
            return
        self._doubled = {size: DOUBLED + FADE * (known - DOUBLED) for size, known in self._doubled.items()}
        if self._last is not None and self._last[0] != rows:
            (less, short), (more, long) = sorted([self._last, (rows, seconds)])
            between = [size for size in self._doubled if less <= size < more]
            found = min(MOST_DOUBLED, max(1.0, (long / short) ** (1 / len(between))))
            for size in between:
                self._doubled[size] += NEW * (found - self._doubled[size])
        least, most = self._range if self._last is not None else (rows, rows)
        self._last, self._range = (rows, seconds), (min(least, rows), max(most, rows))

    def rows(self, waiting: int = 1) -> int:
        """Of the next chunk, while `waiting` prompts want one."""
        if self._last is None:
            return self._first
        room = self._room(self._shorter_gap, waiting)
        # No further than one size beyond what was measured.
        least = max(self._least_useful(), min(self._first, self._range[0] // 2))
        most = max(least, 2 * self._range[1])
        fitting = [size for size in self._sizes if least <= size <= most and self._expected(size) <= room]
        return max(fitting, default=least)

    def sections(self, rows: int, sections: int, waiting: int = 1) -> int:
        """How many of a chunk's sections run between two steps."""
        if self._latest is None:
            return 1
        expected = max(1e-6, self._by_latest(rows))
        room = self._room(self.max_gap, waiting)
        return max(1, min(sections, int(sections * room / expected)))

    def _by_latest(self, rows: int) -> float:
        """Seconds that a whole chunk takes, by the latest of any size."""
        assert self._latest is not None, "one was measured"
        known, seconds = self._latest
        return float(seconds * DOUBLED ** log2(rows / known))

    def _room(self, gap: float, waiting: int) -> float:
        """Seconds between two steps that chunks may have. With every prompt that waits it is the target once more: of
        many that come at once most would else wait for the sake of a few answers. And at least as long as a step, or a
        prompt would take more than twice its time."""
        return max(self._step, gap * min(MOST_STRETCHED, waiting) - self._step)

    def _least_useful(self) -> int:
        """The smallest size down to which every halving makes chunks shorter."""
        useful = self._sizes[-1]
        for size in reversed(self._sizes[:-1]):
            if HALVED * self._doubled[size] < 1:
                break
            useful = size
        if useful > self._told:
            log.info("chunks beside answers keep %d tokens: with half as many they take as long", useful)
        self._told = max(self._told, useful)
        return useful

    def _expected(self, size: int) -> float:
        """Seconds, by the last chunk."""
        assert self._last is not None, "one was measured"
        rows, seconds = self._last
        for each, times in self._doubled.items():
            if rows <= each < size:
                seconds *= times
            elif size <= each < rows:
                seconds /= times
        return seconds

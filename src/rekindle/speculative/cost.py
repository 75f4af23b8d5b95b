"""What blocks cost, measured while an engine runs.

A plain step has a row for each sequence. Its time is known from the last ones, and a row's from what blocks took longer
than a plain step. A drafted token costs a row; a pass of the drafter is shared by the sequences that it drafts for. A
drafter that chains makes a pass for every token. The unit is the token that a plain step of the same sequences gives:
with many of them a plain step gives many tokens, so that drafting has to be better to pay. On a GPU, where steps
overlap, nothing is timed, and what rows and passes usually cost counts.
"""

from __future__ import annotations

from collections.abc import Sequence

from rekindle.speculative.width import ROW

NEW = 0.2  # weight of what is measured, beside what was known
PASS = 0.25  # of a drafter, in plain steps, until one was measured
CHAINED_PASS = 0.1  # of one that chains: a layer and the head
GPU_ROW = 0.065  # one more row to verify, in plain steps: 16 rows of the 27B take 1.98 (docs/bench.md)


class Costs:
    def __init__(self, chained: bool = False, measured: bool = True) -> None:
        """chained: the drafter makes a pass for every token, not for every block. measured: steps are timed; else what
        they usually cost on a GPU counts."""
        self._chained = chained
        self._measured = measured
        self._usual_row = ROW if measured else GPU_ROW
        self.sequences = 1  # that decode
        self._counted = 1  # sequences of the plain steps that were measured last …
        self._plain: float | None = None  # … and seconds of such a step
        self._row: float | None = None  # seconds
        self._pass: float | None = None  # seconds of the drafter's pass, for one sequence; of a chain, for one token

    def note_step(self, sequences: int, rows: int, seconds: float) -> None:
        """A step without prefill came back."""
        if not self._measured:
            return
        if rows == sequences:
            known = self._plain_of(sequences)
            self._plain, self._counted = _between(None if self._plain is None else known, seconds), sequences
        elif self._plain is not None:
            each = (seconds - self._plain_of(sequences)) / (rows - sequences)
            self._row = max(0.0, _between(self._row, each))

    def note_pass(self, drafted: Sequence[int], seconds: float) -> None:
        """The drafter drafted so many tokens for each of the sequences."""
        if not self._measured:
            return
        passes = sum(max(1, count) for count in drafted) if self._chained else len(drafted)
        self._pass = _between(self._pass, seconds / passes)

    def extra(self, width: int, with_pass: bool) -> float:
        """Cost of a block beyond that of a plain row, in tokens."""
        plain = self._plain_of(self.sequences)
        usual = (CHAINED_PASS if self._chained else PASS) * plain
        drafting = (usual if self._pass is None or self._plain is None else self._pass) if with_pass else 0.0
        passes = max(1, width) if self._chained else 1
        return self.sequences * (self._row_seconds() * width + drafting * passes) / plain

    def _row_seconds(self) -> float:
        """Until it was measured, what it usually is beside a plain step."""
        if self._row is not None:
            return self._row
        row = self._usual_row
        return row * (1.0 if self._plain is None else self._plain) / (1 - row + row * self._counted)

    def _plain_of(self, sequences: int) -> float:
        """Seconds of a plain step with so many."""
        known = 1.0 if self._plain is None else self._plain
        return max(known / 8, known + self._row_seconds() * (sequences - self._counted))


def _between(known: float | None, seconds: float) -> float:
    return seconds if known is None else known + NEW * (seconds - known)

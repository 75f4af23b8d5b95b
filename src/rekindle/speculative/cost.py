"""What blocks cost, measured while an engine runs.

A plain step has a row for each sequence. Its time is known from the last ones, and a row's from what blocks took longer
than a plain step. A drafted token costs a row; a pass of the drafter is shared by the sequences that it drafts for. A
drafter that chains makes a pass for every token. The unit is the token that a plain step of the same sequences gives:
with many of them a plain step gives many tokens, so that drafting has to be better to pay.
"""

from __future__ import annotations

from collections.abc import Sequence

from rekindle.speculative.width import ROW

NEW = 0.2  # weight of what is measured, beside what was known
PASS = 0.25  # of a drafter, in plain steps, until one was measured
CHAINED_PASS = 0.1  # of one that chains: a layer and the head
# On a GPU, in plain steps, until a block was measured: the first row more, whose products take another kernel, and each
# row. 2, 8 and 16 rows of the 27B take 1.6, 1.7 and 2.0 (docs/bench.md).
GPU_FIRST, GPU_ROW = 0.6, 0.025


class Costs:
    _usual_row = ROW

    def __init__(self, chained: bool = False) -> None:
        """chained: the drafter makes a pass for every token, not for every block."""
        self._chained = chained
        self.sequences = 1  # that decode
        self._counted = 1  # sequences of the plain steps that were measured last …
        self._plain: float | None = None  # … and seconds of such a step
        self._row: float | None = None  # seconds
        self._pass: float | None = None  # seconds of the drafter's pass, for one sequence; of a chain, for one token

    def note_step(self, sequences: int, rows: int, seconds: float) -> None:
        """A step without prefill came back."""
        if rows == sequences:
            known = self._plain_of(sequences)
            self._plain, self._counted = _between(None if self._plain is None else known, seconds), sequences
        elif self._plain is not None:
            self._note_block(sequences, rows - sequences, seconds - self._plain_of(sequences))

    def _note_block(self, sequences: int, drafted: int, seconds: float) -> None:
        """So many tokens of so many sequences took `seconds` longer than a plain step."""
        self._row = max(0.0, _between(self._row, seconds / drafted))

    def note_pass(self, drafted: Sequence[int], seconds: float) -> None:
        """The drafter drafted so many tokens for each of the sequences."""
        passes = sum(max(1, count) for count in drafted) if self._chained else len(drafted)
        self._pass = _between(self._pass, seconds / passes)

    def extra(self, width: int, with_pass: bool) -> float:
        """Cost of a block beyond that of a plain row, in tokens."""
        plain = self._plain_of(self.sequences)
        usual = (CHAINED_PASS if self._chained else PASS) * plain
        drafting = (usual if self._pass is None or self._plain is None else self._pass) if with_pass else 0.0
        passes = max(1, width) if self._chained else 1
        return self.sequences * (self._block_seconds(width) + drafting * passes) / plain

    def _block_seconds(self, width: int) -> float:
        """By which a step takes longer."""
        return self._row_seconds() * width

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


class GpuCosts(Costs):
    """Where a block costs much because it is one, and little for every row. What blocks took longer than usual is added
    to whatever the next one usually costs."""

    _usual_row = GPU_ROW

    def __init__(self, chained: bool = False) -> None:
        super().__init__(chained)
        self._longer = 0.0  # plain steps

    def _usual(self, sequences: int, drafted: int) -> float:
        return (GPU_FIRST if sequences == 1 else 0.0) + GPU_ROW * drafted

    def _note_block(self, sequences: int, drafted: int, seconds: float) -> None:
        self._longer = _between(self._longer, seconds / self._plain_of(sequences) - self._usual(sequences, drafted))

    def _block_seconds(self, width: int) -> float:
        return self._plain_of(self.sequences) * max(0.0, self._usual(self.sequences, width) + self._longer)


def _between(known: float | None, seconds: float) -> float:
    return seconds if known is None else known + NEW * (seconds - known)

"""What blocks cost, measured while an engine runs.

A plain step has a row for each sequence. Its time is known from the last ones, and on a CPU a row's from what blocks
took longer than a plain step. A drafted token costs a row; a pass of the drafter is shared by the sequences that it
drafts for. A drafter that chains makes a pass for every token. The unit is the token that a plain step of the same
sequences gives: with many of them a plain step gives many tokens, so that drafting has to be better to pay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rekindle.speculative.width import ROW

NEW = 0.2  # weight of what is measured, beside what was known
PASS = 0.25  # of a drafter, in plain steps, until one was measured
CHAINED_PASS = 0.1  # of one that chains: a layer and the head
# On a GPU, in plain steps, until a block was measured: the first row more, whose products take another kernel, and each
# row. In between: 2 and 8 rows of the 27B take 1.2 and 1.4 plain steps, of the 35B-A3B 1.6 and 2.5 (docs/LOG.md).
GPU_FIRST, GPU_ROW = 0.6, 0.025
GPU_ROW_BESIDE = 0.05  # each row beside those of other sequences: from 8 rows to 32 a step of both models grows so
# A machine may stall, and a step be recorded or a kernel compiled amid a request. So that no such block is the last
# one, it counts no more than this, in plain steps, and what is above the usual fades with every plain step.
FIRST_PLAIN = 3  # plain steps before the first block, else it would be compared with nothing …
BLOCKS = 128  # … and blocks, after which a plain step is measured again: contexts grow
MOST_LONGER = 4.0  # of a block on a GPU, or of a pass
MOST_ROW = 1.5  # of a row on a CPU
FADE = 0.9995
FADE_BESIDE = 0.997  # with every block, of what is known of other numbers of rows: one that stalled is tried again
SEVERAL = 0  # in place of rows, where several sequences share a step


class Costs:
    _usual_row = ROW

    def __init__(self, chained: bool = False) -> None:
        """chained: the drafter makes a pass for every token, not for every block."""
        self.chained = chained
        self.sequences = 1  # that decode
        self._counted = 1  # sequences of the plain steps that were measured last …
        self._plain: float | None = None  # … and seconds of such a step
        self._row: float | None = None  # seconds
        self._pass: float | None = None  # seconds of the drafter's pass, for one sequence; of a chain, for one token
        self._missing = FIRST_PLAIN  # plain steps, before blocks may be drafted
        self._blocks = 0  # since the last plain step

    @property
    def knows_plain(self) -> bool:
        """Whether blocks can be compared with plain steps. Where not, the next step has to be one."""
        return not self._missing and self._blocks < BLOCKS

    @property
    def will_know_plain(self) -> bool:
        """The same after one more block."""
        return not self._missing and self._blocks + 1 < BLOCKS

    def note_step(self, sequences: int, rows: int, seconds: float) -> None:
        """A step without prefill came back."""
        if rows == sequences:
            self._note_plain(sequences, seconds)
        elif self._plain is not None:
            self._blocks += 1
            self._note_block(sequences, rows - sequences, seconds - self._plain_of(sequences))

    def _note_plain(self, sequences: int, seconds: float) -> None:
        """The first ones may be slow: the fastest of them counts."""
        known = self._plain_of(sequences)
        if self._plain is None:
            self._plain = seconds
        else:
            self._plain = min(known, seconds) if self._missing else _between(known, seconds)
        self._counted, self._missing, self._blocks = sequences, max(0, self._missing - 1), 0
        self._fade()

    def _note_block(self, sequences: int, drafted: int, seconds: float) -> None:
        """So many tokens of so many sequences took `seconds` longer than a plain step."""
        row = min(seconds / drafted, MOST_ROW * self._plain_of(1))
        self._row = max(0.0, _between(self._row_seconds(), row))

    def _fade(self) -> None:
        """A plain step came back."""
        plain = self._plain_of(1)
        if self._row is not None:
            self._row = _faded(self._row, self._usual_row * plain)
        if self._pass is not None:
            self._pass = _faded(self._pass, self._usual_pass() * plain)

    def note_pass(self, drafted: Sequence[int], seconds: float) -> None:
        """The drafter drafted so many tokens for each of the sequences."""
        passes = sum(max(1, count) for count in drafted) if self.chained else len(drafted)
        most = MOST_LONGER * self._plain_of(1) if self._plain is not None else seconds
        self._pass = _between(self._pass, min(seconds / passes, most))

    def extra(self, width: int, with_pass: bool) -> float:
        """Cost of a block beyond that of a plain row, in tokens."""
        plain = self._plain_of(self.sequences)
        usual = self._usual_pass() * plain
        drafting = (usual if self._pass is None or self._plain is None else self._pass) if with_pass else 0.0
        passes = max(1, width) if self.chained else 1
        return self.sequences * (self._block_seconds(width) + drafting * passes) / plain

    def _usual_pass(self) -> float:
        """In plain steps."""
        return CHAINED_PASS if self.chained else PASS

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
    """Where a block costs much because it is one, and little for every row, which is assumed. What steps of so many
    rows took longer than usual is known for each number of rows, since other kernels are taken from some numbers on;
    for one that was not seen the nearest stands in. Blocks of several sequences are counted apart, all of them
    alike."""

    _usual_row = GPU_ROW

    def __init__(self, chained: bool = False, rounded: Callable[[int], int] = lambda rows: rows) -> None:
        """rounded: rows of the recorded step that takes so many, since padding costs as much."""
        super().__init__(chained)
        self._rounded = rounded
        self._longer: dict[int, float] = {}  # plain steps, by rows of a step of one sequence; SEVERAL: of any other

    def _fade(self) -> None:
        super()._fade()
        self._longer = {rows: _faded(longer, 0.0) for rows, longer in self._longer.items()}

    def _usual(self, sequences: int, drafted: int) -> float:
        """In plain steps."""
        return GPU_FIRST + GPU_ROW * (self._rounded(1 + drafted) - 1) if sequences == 1 else GPU_ROW_BESIDE * drafted

    def _rows(self, sequences: int, drafted: int) -> int:
        return self._rounded(1 + drafted) if sequences == 1 else SEVERAL

    def _note_block(self, sequences: int, drafted: int, seconds: float) -> None:
        longer = min(seconds / self._plain_of(sequences) - self._usual(sequences, drafted), MOST_LONGER)
        rows = self._rows(sequences, drafted)
        noted = _between(self._longer.get(rows, self._nearest(rows)), longer)
        self._longer = {other: _faded(known, 0.0, FADE_BESIDE) for other, known in self._longer.items()} | {rows: noted}

    def _nearest(self, rows: int) -> float:
        """What the steps took longer whose rows are nearest to these; nothing where none were seen."""
        if rows == SEVERAL:
            return self._longer.get(SEVERAL, 0.0)
        seen = [known for known in self._longer if known != SEVERAL]
        return self._longer[min(seen, key=lambda known: abs(known - rows))] if seen else 0.0

    def _block_seconds(self, width: int) -> float:
        if not width:
            return 0.0
        longer = self._nearest(self._rows(self.sequences, width))
        return self._plain_of(self.sequences) * max(0.0, self._usual(self.sequences, width) + longer)


def _between(known: float | None, seconds: float) -> float:
    return seconds if known is None else known + NEW * (seconds - known)


def _faded(known: float, usual: float, fade: float = FADE) -> float:
    return max(min(known, usual), usual + fade * (known - usual))

"""What runs next: the decode rows of everyone who has a token, and as many prefill chunks as fit one chunk's worth.

A chunk is never cut to fit a batch: its edges are a function of position (law 2). So a batch holds at most one chunk
more than the budget asks for, and a long prefill never stalls the streams of others for longer than one chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from rekindle.batch import DRAWN, Batch, Segment, Wanted
from rekindle.engine.sequence import Phase, Sequence


class Scheduler:
    def __init__(self, grid: int, depth: int, run_ahead: int) -> None:
        self.grid = grid
        self.depth = depth  # batches that keep every stage busy
        self.run_ahead = run_ahead  # steps handed over before their token is known
        self._prefilling: deque[Sequence] = deque()  # turns are taken in order, one chunk each

    @property
    def in_flight(self) -> int:
        """Batches that may be on their way at once."""
        return self.depth + self.run_ahead

    def add(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.PREFILL:
            self._prefilling.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)

    @property
    def prefilling(self) -> Iterable[Sequence]:
        return tuple(self._prefilling)

    def next_batch(
        self, decoding: list[Sequence], fits: Callable[[Sequence, int], bool]
    ) -> tuple[Batch, list[Sequence]] | None:
        """The next batch and whose segments it holds. `fits(sequence, end)` reserves pages or says no."""
        segments: list[Segment] = []
        owners: list[Sequence] = []
        for sequence in self._decode_turn(decoding):
            if fits(sequence, sequence.position + 1):
                segments.append(_decode_row(sequence))
                owners.append(sequence)
        budget = self.grid
        for sequence in self._chunk_turns(decoding):
            end = sequence.next_chunk_end(self.grid)
            if not fits(sequence, end):
                break
            segments.append(_chunk(sequence, end))
            owners.append(sequence)
            self._prefilling.rotate(-1)
            budget -= end - sequence.position
            if budget <= 0:
                break
        return (Batch(tuple(segments)), owners) if segments else None

    def _decode_turn(self, decoding: list[Sequence]) -> list[Sequence]:
        """With several stages, a share of the rows, so that the other stages get rows of the other sequences."""
        decoding = [s for s in decoding if not s.background] or decoding
        share = -(-len(decoding) // self.depth)
        return [s for s in decoding if s.in_flight <= (self.run_ahead if s.may_run_ahead else 0)][:share]

    def _chunk_turns(self, decoding: list[Sequence]) -> list[Sequence]:
        """Who may run a chunk now, in turn; background work only where nobody else has anything to run."""
        ready = [s for s in self._prefilling if s.prefill_left and s.in_flight < self.in_flight and not s.cancelled]
        foreground = [s for s in ready if not s.background]
        others_run = foreground or any(not s.background for s in decoding)
        return foreground if others_run else ready


def _decode_row(sequence: Sequence) -> Segment:
    known = sequence.position < len(sequence.tokens)
    return Segment(
        sequence.slot, sequence.position, (sequence.tokens[sequence.position] if known else DRAWN,), Wanted.LAST
    )


def _chunk(sequence: Sequence, end: int) -> Segment:
    top = sequence.request.prompt_logprobs
    if top is not None:
        wanted = Wanted.SCORED
    else:
        # Every captured boundary keeps its logits, so that a prompt which ends there runs no forward at all.
        wanted = Wanted.LAST if end in sequence.kinds or end == sequence.prefill_end else Wanted.NONE
    return Segment(sequence.slot, sequence.position, tuple(sequence.tokens[sequence.position : end]), wanted, top or 0)

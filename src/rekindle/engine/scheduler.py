"""What runs next: the decode rows of all sequences that have a token, and about one grid chunk's worth of prefill.

While nobody answers a chunk is never cut to fit a batch: its edges are a function of position (law 2), and a batch
holds at most one chunk more than the budget asks for. While others answer, the gap between two of their tokens has a
target (`shared_pace.py`), and chunks are shorter where they would take longer; an edge that comes of it lies off the
grid, and the manifest records it like every other cut.

On GPUs of this process chunks and decode rows take turns: either is a recorded step then, which costs the host next to
nothing, and a chunk alone in its batch has the bits of a cold run. Short chunks of several prompts share a step, since
it reads the weights once for all of them. There (`pace.py`) a chunk that can pauses between its layers for others'
steps, and keeps its length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from rekindle.batch import PENDING, Batch, Segment, Wanted
from rekindle.engine.ahead import Ahead
from rekindle.engine.drafting import Proposals, Proposer
from rekindle.engine.pace import Pace
from rekindle.engine.sequence import Sequence
from rekindle.engine.shared_pace import SharedPace
from rekindle.speculative.width import MOST
from rekindle.stages.layout import FEW_SHARERS, LEAST_SHARED, LONGEST_CHUNK, MANY_FILL, SHARED, SHARERS

BLOCK_ROWS = 64  # of all blocks of a batch on a GPU: up to so many, reading weights takes most of a step
Fits = Callable[[Sequence, int], bool]  # reserves pages up to that position for the sequence, or says there are none
Segments = list[tuple[Segment, Sequence]]  # with their owners


class Step(NamedTuple):
    """One batch to be launched."""

    batch: Batch
    owners: list[Sequence]  # of the batch's segments, in order
    ahead: Ahead | None = None  # what blocks hold, where the host does not know it yet
    pauses: bool = False  # a chunk, between whose layers others' steps are to run


class Scheduler:
    def __init__(
        self,
        grid: int,
        depth: int,
        async_steps: int,
        pace: Pace | SharedPace | None = None,
        block_rows: int | None = None,
        proposer: Proposer | None = None,
        reach: int = 0,
        can_pause: Callable[[int], bool] = lambda rows: False,
    ) -> None:
        """pace: by a `Pace` chunks and decode rows take turns, by a `SharedPace` they share batches; without one they
        share them too, and chunks have their full length beside answers. can_pause: whether a chunk of so many rows can
        pause between its layers now."""
        self.grid = grid
        self.depth = depth  # batches that keep every stage busy
        self.async_steps = async_steps  # steps launched before the token of the last one is known
        self._turns = pace if isinstance(pace, Pace) else None
        self._shared = pace if isinstance(pace, SharedPace) else None
        self.block_rows = block_rows  # of all blocks of a batch together, where they are bounded
        self.proposer = proposer or Proposer()
        self._reach = reach  # positions of which a drafter reads features; 0: there is none
        self._can_pause = can_pause
        self._chunk_was_last = False
        self._prefilling: deque[Sequence] = deque()  # turns are taken in order, one chunk each; short ones may go along

    @property
    def in_flight(self) -> int:
        """Batches that may be on their way at once."""
        return self.depth + self.async_steps

    def add(self, sequence: Sequence) -> None:
        if sequence.prefilling:
            self._prefilling.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)

    @property
    def prefilling(self) -> Iterable[Sequence]:
        return tuple(self._prefilling)

    @property
    def takes_no_more(self) -> bool:
        """Whether no prompt that is still to come could share the next chunk with those that wait for theirs. False
        where chunks and decode rows share batches."""
        waiting = self._waiting
        if self._turns is None or not waiting:
            return False
        first = waiting[0]
        return first.next_chunk_end(self.grid) - first.position > SHARED or self.is_crowded

    @property
    def is_crowded(self) -> bool:
        """Whether as many prompts wait for a chunk as could share one."""
        return self._turns is not None and len(self._waiting) >= max(SHARERS)

    @property
    def _waiting(self) -> list[Sequence]:
        """For their next chunk, those of clients."""
        return [s for s in self._prefilling if not (s.in_flight or s.cancelled or s.background)]

    def next_batch(self, decoding: list[Sequence], fits: Fits) -> Step | None:
        """The next step; None if no segment is ready or fits. Blocks are drafted for a batch without chunks: its rows
        are kept for a rewind, and those of a chunk are too many."""
        rows, chunks = self._decode_turn(decoding), self._chunk_turns(decoding)
        drafts = self._may_draft(decoding)
        if self._turns is None:
            return self._share(rows, chunks, fits, drafts, self._longest_beside(decoding, len(chunks)))
        chunk_first = chunks and not (rows and self._chunk_was_last)
        step = self._next_chunks(chunks, decoding, self._turns, fits) if chunk_first else None
        self._chunk_was_last = step is not None
        return step or _step(*self._rows_that_fit(rows, fits, drafts))

    def between_sections(self, decoding: list[Sequence], fits: Fits) -> Step | None:
        """The next step while a chunk pauses; None where it is the chunk's turn."""
        step = None
        if self._chunk_was_last:
            step = _step(*self._rows_that_fit(self._decode_turn(decoding), fits, self._may_draft(decoding)))
        self._chunk_was_last = step is None
        return step

    def sections(self, batch: Batch, sections: int, decoding: list[Sequence]) -> int:
        """How many sections of such a chunk run before the next step of those who answer."""
        if self._turns is None or all(s.background for s in decoding):
            return sections
        others = sum(s.in_flight == 0 for s in self._chunk_turns(decoding))
        return self._turns.sections(batch.rows, sections, len(batch.segments) + others)

    def _longest_beside(self, decoding: list[Sequence], waiting: int) -> int | None:
        """Rows that chunks of one batch have together at most, for the sake of those who answer."""
        if self._shared is None or not waiting or all(s.background for s in decoding):
            return None
        return self._shared.rows(waiting)

    def _share(
        self, rows: list[Sequence], chunks: list[Sequence], fits: Fits, drafts: bool, most: int | None
    ) -> Step | None:
        """Decode rows and chunks in one batch, chunks until they hold `most` tokens, or else a grid's worth."""
        segments, ahead = self._rows_that_fit(rows, fits, drafts and not chunks)
        budget = self.grid if most is None else most
        for sequence in chunks:
            end = sequence.next_chunk_end(self.grid, most)
            too_many = most is not None and budget < end - sequence.position
            if too_many or not fits(sequence, end):
                break
            segments.append((self._chunk(sequence, end), sequence))
            self._to_the_end_of_the_line(sequence)
            budget -= end - sequence.position
            if budget <= 0:
                break
        return _step(segments, ahead)

    def _next_chunks(self, chunks: list[Sequence], decoding: list[Sequence], pace: Pace, fits: Fits) -> Step | None:
        """The next chunk, which pauses while others answer or is shorter; a short one takes those of other prompts
        along."""
        beside_answers, first = any(not s.background for s in decoding), chunks[0]
        pauses = beside_answers and self._can_pause(first.next_chunk_end(self.grid) - first.position)
        longest = pace.rows(len(chunks)) if beside_answers and not pauses else self.grid
        segments: Segments = []
        for sequence, end in self._sharers(chunks, longest):
            if not fits(sequence, end):
                break
            segments.append((self._chunk(sequence, end), sequence))
        if sum(len(segment) for segment, _ in segments) < MANY_FILL or longest < LONGEST_CHUNK:
            segments = segments[:FEW_SHARERS]
        for _, sequence in segments:
            self._to_the_end_of_the_line(sequence)
        step = _step(segments)
        return step if step is None else step._replace(pauses=pauses)

    def _to_the_end_of_the_line(self, sequence: Sequence) -> None:
        self._prefilling.remove(sequence)
        self._prefilling.append(sequence)

    def _sharers(self, chunks: list[Sequence], longest: int) -> list[tuple[Sequence, int]]:
        """The first sequence with its chunk's end, and others whose chunks go along in one step: not where padding to
        the smallest shared step would take longer than chunks one by one."""
        taken, left = list[tuple[Sequence, int]](), longest
        for sequence in chunks:
            end = sequence.next_chunk_end(self.grid, longest)
            rows = end - sequence.position
            alone = rows > SHARED or sequence.repeats_bits or longest < LEAST_SHARED
            if alone and not taken:
                return [(sequence, end)]
            if not alone and rows <= left:
                taken.append((sequence, end))
                left -= rows
            if len(taken) == max(SHARERS):
                break
        return taken if 2 * (longest - left) >= LEAST_SHARED else taken[:1]

    def _decode_turn(self, decoding: list[Sequence]) -> list[Sequence]:
        """With several stages, a share of the rows, so that the other stages get rows of the other sequences."""
        decoding = [s for s in decoding if not s.background] or decoding
        share = -(-len(decoding) // self.depth)
        ahead = self.async_steps
        if ahead and self._may_draft(decoding) and any(s.waits_to_draft for s in decoding):
            if any(s.in_flight for s in decoding):
                return []  # one step for all of them, when the tokens of the last one are known
            ahead = 0
        return [s for s in decoding if s.in_flight <= (ahead if s.allows_async_step else 0)][:share]

    def _may_draft(self, decoding: list[Sequence]) -> bool:
        return self._longest_draft(len(decoding)) > 0

    def _longest_draft(self, sequences: int) -> int:
        """Tokens that each of so many sequences may draft."""
        return MOST if self.block_rows is None or sequences < 2 else min(MOST, self.block_rows // sequences - 1)

    def _rows_that_fit(self, sequences: list[Sequence], fits: Fits, drafts: bool) -> tuple[Segments, Ahead | None]:
        """The next rows of the sequences: one each, or a block where tokens are drafted and pages are free."""
        self.proposer.note_sequences(len(sequences))
        proposed = self.proposer.propose(sequences) if drafts else Proposals([()] * len(sequences))
        longest = self._longest_draft(len(sequences))
        pairs = zip(sequences, proposed.tokens, strict=True)
        found = [(self._next_rows(sequence, drafted[:longest], fits), sequence) for sequence, drafted in pairs]
        return [(segment, sequence) for segment, sequence in found if segment is not None], proposed.ahead

    def _next_rows(self, sequence: Sequence, drafted: tuple[int, ...], fits: Fits) -> Segment | None:
        token, position, reads = _next_token(sequence), sequence.position, self._reach > 0
        if drafted and fits(sequence, position + 1 + len(drafted)):
            tokens = (token, *drafted)
            return Segment(sequence.slot, position, tokens, Wanted.ALL, features=len(tokens) * reads)
        if drafted:
            sequence.draft.note_unused(len(sequence.tokens))
        if not fits(sequence, position + 1):
            return None
        return Segment(sequence.slot, position, (token,), Wanted.LAST, features=int(reads))

    def _chunk(self, sequence: Sequence, end: int) -> Segment:
        tokens, top = tuple(sequence.tokens[sequence.position : end]), sequence.request.prompt_logprobs
        if top is not None:
            wanted = Wanted.SCORED
        else:
            # Every captured boundary keeps its logits, so that a prompt which ends there runs no forward at all.
            wanted = Wanted.LAST if end in sequence.boundaries.kinds or end == sequence.prefill_end else Wanted.NONE
        features = sequence.feature_rows(end, self._reach)
        return Segment(sequence.slot, sequence.position, tokens, wanted, top or 0, features)

    def _chunk_turns(self, decoding: list[Sequence]) -> list[Sequence]:
        """Sequences that may run a chunk now, in turn; background work only if no other sequence has work to run."""
        ready = [s for s in self._prefilling if s.prefill_left and s.in_flight < self.in_flight and not s.cancelled]
        foreground = [s for s in ready if not s.background]
        others_run = foreground or any(not s.background for s in decoding)
        return foreground if others_run else ready


def _step(segments: Segments, ahead: Ahead | None = None) -> Step | None:
    if not segments:
        return None
    blocks = any(segment.wanted is Wanted.ALL for segment, _ in segments)
    return Step(Batch(tuple(segment for segment, _ in segments), blocks), [owner for _, owner in segments], ahead)


def _next_token(sequence: Sequence) -> int:
    return sequence.tokens[sequence.position] if sequence.position < len(sequence.tokens) else PENDING

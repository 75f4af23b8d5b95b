"""A batch on its way through the pipeline, and the tokens that the sampler draws from its logits."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rekindle.batch import PENDING, Batch, Segment, Wanted
from rekindle.engine.ahead import Ahead, PassBehind
from rekindle.engine.sampler import Draw, draw
from rekindle.engine.sequence import Sequence as LiveSequence
from rekindle.engine.to_host import DrawnTokens
from rekindle.engine.token_counts import TokenCounts
from rekindle.engine.types import Sampling
from rekindle.grammar.guide import Mask
from rekindle.stages import StageOutput
from rekindle.stages.paused import PausedForward
from rekindle.stages.types import Unseen

log = logging.getLogger("rekindle.engine")

NO_ROWS = torch.empty(0)


class Result(NamedTuple):
    """What a flight brings one of its owners from the last stage."""

    segment: Segment
    owner: LiveSequence
    rows: torch.Tensor  # of logits [segment.logit_rows, vocab]
    scores: torch.Tensor  # [segment.scored_rows, …]


@dataclass(frozen=True, slots=True, eq=False)
class DrawnRow:
    """A row of logits to draw from: what the sampler reads of its sequence, as if drafts before it were accepted."""

    owner: LiveSequence
    position: int  # of the token that is drawn
    drafted: tuple[int, ...] = ()  # tokens of the block before it
    in_block: bool = False

    @property
    def sampling(self) -> Sampling:
        return self.owner.sampling

    @property
    def prompt_length(self) -> int:
        return self.owner.prompt_length

    @property
    def tokens(self) -> Sequence[int]:
        return self.owner.tokens

    @property
    def token_counts(self) -> TokenCounts:
        return self.owner.token_counts

    @property
    def forced(self) -> int | None:
        return self.owner.forced_at(self.position)

    @property
    def mask(self) -> Mask | None:
        guide = self.owner.guide
        return guide.mask_after(len(self.drafted)) if guide is not None else None

    @property
    def waits(self) -> bool:
        """Whether its grammar has not seen all tokens before it: the step before brings the last of them."""
        owner = self.owner
        going = owner.guide is not None and not (owner.answered or owner.cancelled)
        return going and len(owner.tokens) + len(self.drafted) < self.position


class Outcome(NamedTuple):
    """The tokens that a step adds to the answer of one of its owners: those drafts that the target drew too, and the
    first token of its own."""

    owner: LiveSequence
    segment: Segment
    rows: torch.Tensor  # of logits, in which the tokens were drawn [accepted or more, vocab]
    accepted: tuple[int, ...]
    failure: Exception | None  # why the last of them could not be drawn


class Flights(deque["Flight | ChunkSection"]):
    """Steps on their way, oldest first, and the chunk that pauses, if there is one: its last section joins them."""

    begun: BegunChunk | None = None

    def clear(self) -> None:
        super().clear()
        self.begun = None


@dataclass(frozen=True, slots=True)
class BegunChunk:
    """A chunk whose layers run in sections; its owners stand behind it already."""

    batch: Batch
    owners: tuple[LiveSequence, ...]
    forward: Future[PausedForward]

    @property
    def left(self) -> int:
        """Sections that are still to be run."""
        return 0 if self.forward.exception() is not None else self.forward.result().left


class _Enqueued:
    """Work that the device has been given."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self._passed: torch.cuda.Event | None = None

    def mark(self, device: torch.device) -> None:
        """All kernels of it have been enqueued on the device by now."""
        if device.type == "cuda":
            self._passed = torch.cuda.Event()
            self._passed.record(torch.cuda.current_stream(device))

    @property
    def is_over(self) -> bool | None:
        """Whether the device has run them. None where it cannot be asked: on a CPU, and before all is enqueued."""
        return None if self._passed is None else self._passed.query()

    def wait(self) -> bool:
        """Until the device has run them: else the host could enqueue all of a prompt, and a request that comes next
        would wait for the last chunk of it. True: they were over before anybody waited, nobody knows since when."""
        if self._passed is None:
            return False
        was_over = self._passed.query()
        self._passed.synchronize()
        return was_over


class ChunkSection(_Enqueued):
    """Some layers of a chunk, and not its last ones: nothing comes of them yet."""

    failed = waits = False

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.batch = batch
        self.share = 0.0  # of the chunk's layers

    def enqueue_draw(self, device: torch.device) -> None:
        """Nothing is drawn."""


class Flight(_Enqueued):
    """One batch, whose segments belong to `owners`. A token is drawn for each owner whose prompt the batch completes,
    and for each that decodes; after every row of a block."""

    def __init__(
        self,
        batch: Batch,
        owners: tuple[LiveSequence, ...],
        output: Future[StageOutput],
        launched: float | None = None,
        ahead: Ahead | None = None,
        draw_all: Draw = draw,
        share: float = 1.0,
    ) -> None:
        """launched: when the batch was handed over; a pipeline of this thread has run it by now. ahead: what its blocks
        hold, where they were handed over before the host knew it. draw_all: draws all rows at once. share: of its
        layers, where others ran before."""
        super().__init__()
        self._draw_all = draw_all
        self.share = share
        self.batch = batch
        self.owners = owners
        self.output = output
        self.ahead = ahead
        self.behind: PassBehind | None = None  # drafts what follows its block
        self.behind_chunk = False  # the rest of a chunk ran before it, unasked for: its time says nothing
        by_segment = [_drawn_rows(segment, owner) for segment, owner in zip(batch.segments, owners, strict=True)]
        self.drawing = [row for rows in by_segment for row in rows]
        self._counts = [len(rows) for rows in by_segment]  # of rows drawn, by segment
        self.drawn: DrawnTokens | None = None
        self.failures: dict[int, Exception] = {}  # by row of `drawing`: why this row could not be drawn
        self.launched = self.began if launched is None else launched

    def enqueue_draw(self, device: torch.device) -> None:
        """Let the device draw after the forward, while the host does other things. Rows with a grammar wait for the
        tokens of the step before, and the others of their batch with them: the forward runs meanwhile."""
        ready = self.output.done() and self.output.exception() is None
        if ready and self._passed is None and not self.waits:
            self.draw()
            self.mark(device)

    @property
    def waits(self) -> bool:
        """Whether a row's grammar has not seen all tokens before it."""
        return any(row.waits for row in self.drawing)

    @property
    def failed(self) -> bool:
        return self.output.done() and self.output.exception() is not None

    def draw(self) -> None:
        """Draw from the logits, once."""
        if self.drawn is None and self.drawing:
            logits = self.output.result().logits
            assert logits is not None, "a flight that draws brings logits"
            whole = len(self.drawing) == logits.shape[0]
            self.drawn = DrawnTokens(self._draw(logits if whole else torch.cat(self._rows_drawn())))

    def _rows_drawn(self) -> list[torch.Tensor]:
        pairs = zip(self.results(), self._counts, strict=True)
        return [result.rows[len(result.rows) - count :] for result, count in pairs if count]

    def _draw(self, rows: torch.Tensor) -> torch.Tensor:
        """All rows at once; where that fails, row by row, so that only the rows at fault go without a token."""
        try:
            return self._draw_all(rows, self.drawing)
        except Exception as error:
            log.warning("tokens of %d rows are drawn one by one: %s", len(self.drawing), error)
            return torch.cat([self._draw_row(number, rows) for number in range(len(self.drawing))])

    def _draw_row(self, number: int, rows: torch.Tensor) -> torch.Tensor:
        row = self.drawing[number]
        try:
            return draw(rows[number : number + 1], [row])
        except Exception as error:
            self.failures[number] = error
            return torch.full((1,), -1, dtype=torch.int64, device=rows.device)

    def outcomes(self) -> Iterator[Outcome]:
        """After `draw`: waits for the tokens, once."""
        tokens = [] if self.drawn is None else self.drawn.on_host()
        first = 0
        for (segment, owner, rows, _), count in zip(self.results(), self._counts, strict=True):
            if count:
                drawn = tokens[first : first + count]
                accepted = _accepted(drawn, self._drafted(segment) if count > 1 else ())
                failure = self.failures.get(first + len(accepted) - 1)
                yield Outcome(owner, segment, rows[len(rows) - count :], accepted, failure)
            first += count

    @property
    def unseen(self) -> Unseen | None:
        """Its block, where it is the only one that was drafted, was handed over before the host knew it, and the tokens
        are being drawn: if nothing but the tokens themselves can end the answer in it."""
        if self.ahead is None or self.drawn is None or self.failures:
            return None
        if len(self.owners) > 1 or len(self.ahead.counts) > 1:  # of those asked for, pages may have been short for one
            return None
        (segment,), (owner,) = self.batch.segments, self.owners
        request = owner.request
        room = owner.max_tokens - owner.answer_length - len(segment)
        if segment.tokens[-1] != PENDING or request.stop_when is not None or room < 2:
            return None
        return Unseen(segment.slot, segment.position, len(segment) - 1, self.drawn.tokens, request.ends)

    def _drafted(self, segment: Segment) -> Sequence[int]:
        """The tokens of a block."""
        if self.ahead is None or segment.tokens[-1] != PENDING:
            return segment.tokens[1:]
        return self.ahead.known(segment.slot)

    def results(self) -> Iterator[Result]:
        """Every segment with its owner, its rows of logits and its scores."""
        output = self.output.result()
        logits, scores = (NO_ROWS if rows is None else rows for rows in (output.logits, output.scores))
        row = scored = 0
        for segment, owner in zip(self.batch.segments, self.owners, strict=True):
            next_row, next_scored = row + segment.logit_rows, scored + segment.scored_rows
            yield Result(segment, owner, logits[row:next_row], scores[scored:next_scored])
            row, scored = next_row, next_scored


def _drawn_rows(segment: Segment, owner: LiveSequence) -> list[DrawnRow]:
    completes = owner.prefilling and segment.end == owner.prefill_end
    if owner.max_tokens == 0 or not (completes or owner.decoding):
        return []
    if segment.wanted is not Wanted.ALL:
        return [DrawnRow(owner, segment.end)]
    first = segment.position + 1
    return [DrawnRow(owner, first + row, segment.tokens[1 : 1 + row], in_block=True) for row in range(len(segment))]


def _accepted(drawn: Sequence[int], drafted: Sequence[int]) -> tuple[int, ...]:
    """While the target draws what was drafted, and the first token that is the target's own."""
    agreed = next((i for i, (ours, theirs) in enumerate(zip(drawn, drafted, strict=False)) if ours != theirs), None)
    return tuple(drawn if agreed is None else drawn[: agreed + 1])

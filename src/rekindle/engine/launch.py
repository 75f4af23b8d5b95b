"""Batches into the pipeline: what the scheduler chooses and the free pages can take.

If pages are short kept slots are given up; if that is not enough, and nothing in flight will free any, the youngest
sequence is preempted. A chunk beside answers runs in sections, in turns with their steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from rekindle.batch import PENDING, Batch
from rekindle.engine.ahead import Ahead
from rekindle.engine.endings import Endings
from rekindle.engine.flight import BegunChunk, ChunkSection, Flight, Flights
from rekindle.engine.publisher import Publisher
from rekindle.engine.roster import Roster
from rekindle.engine.sampler import Draw, draw
from rekindle.engine.scheduler import Scheduler, Step
from rekindle.engine.sequence import Sequence
from rekindle.engine.types import FinishReason
from rekindle.snapshots.types import Snapshot
from rekindle.spec import PAGE
from rekindle.stages import PageCount, Pipeline, StageOutput
from rekindle.stages.paused import PausedForward
from rekindle.stages.pipeline import called
from rekindle.stages.types import PendingTokens

log = logging.getLogger("rekindle.engine")


class FreePages:
    """Pages that no sequence has and no batch in flight will take."""

    def __init__(self, count: Callable[[], PageCount], reserved: int, make_room: Callable[[], bool]) -> None:
        """make_room: gives up a kept slot, if there is one."""
        self._count = count
        self._pages = count()
        self._reserved = reserved
        self._make_room = make_room
        self.short = False  # a segment did not fit

    def fit(self, sequence: Sequence, end: int) -> bool:
        """Reserve the pages of its positions up to `end`, if they are free. Kept slots make room on the device."""
        needed = sequence.pages_needed(end)
        reserved = self._reserved + needed
        while needed and reserved > self._pages.at_once and self._make_room():
            self._pages = self._count()
        if needed and reserved > self._pages.free:
            self.short = True
            return False
        self._reserved = reserved
        return True


class Launcher:
    def __init__(
        self,
        pipeline: Pipeline,
        scheduler: Scheduler,
        flights: Flights,
        roster: Roster,
        publisher: Publisher,
        endings: Endings,
        grid: int,
    ) -> None:
        self._pipeline = pipeline
        self._scheduler = scheduler
        self._flights = flights
        self._roster = roster
        self._publisher = publisher
        self._endings = endings
        self._grid = grid
        self.draw: Draw = draw

    def launch_next(self) -> bool:
        """Launch the next step, or sections of a chunk that pauses; False if enough is in flight, nothing is to be run,
        or nothing fits until results are back."""
        while self._may_launch():
            pages = self._free_pages()
            decoding = [s for s in self._roster.running if s.decoding and not s.cancelled]
            if (begun := self._flights.begun) is not None:
                step = self._scheduler.between_sections(decoding, pages.fit)
                if step is None:
                    self._run_sections(begun, decoding)
                    return True
            else:
                step = self._scheduler.next_batch(decoding, pages.fit)
            if step is not None:
                self.launch(step)
                return True
            if not pages.short or self._flights:
                return False
            self.preempt_youngest()
        return False

    def launch(self, step: Step) -> None:
        """Hand the step to the pipeline, and ask for captures where its chunks reach a boundary."""
        if step.pauses:
            self._begin(step)
            return
        (batch, owners, ahead, _), launched = step, time.monotonic()
        output = self._pipeline.forward(batch, self._pending_of(step))
        began = launched if ahead is None else ahead.began
        flight = Flight(batch, tuple(owners), output, began, ahead, self.draw)
        begun = self._flights.begun
        flight.behind_chunk = begun is not None and not begun.left
        self._draw(flight)
        self._stand_behind(step)
        self._add(flight)

    def _draw(self, flight: Flight) -> None:
        flight.enqueue_draw(self._pipeline.logits_device)
        self._go_on(flight)

    def _stand_behind(self, step: Step) -> None:
        """From now on its owners' state ends where the step does."""
        for segment, sequence in zip(step.batch.segments, step.owners, strict=True):
            sequence.advance(segment.end, alone=len(step.owners) == 1, grid=self._grid)
            sequence.draft.learn(sequence.tokens)

    def _add(self, flight: Flight) -> None:
        """All of it is enqueued: the state can be captured."""
        for sequence in flight.owners if not flight.failed else ():
            if sequence.prefilling:
                self._capture_at_boundary(sequence)
        self._flights.append(flight)

    # Chunks that pause

    def _begin(self, step: Step) -> None:
        pending = self._pending_of(step)
        forward = called(lambda: self._pipeline.begin(step.batch, pending))
        self._stand_behind(step)
        begun = BegunChunk(step.batch, tuple(step.owners), forward)
        self._flights.begun = begun
        decoding = [s for s in self._roster.running if s.decoding and not s.cancelled]
        self._run_sections(begun, decoding)

    def _run_sections(self, begun: BegunChunk, decoding: list[Sequence]) -> None:
        """As many as may run before the next step of those who answer."""
        section = ChunkSection(begun.batch)
        ran = called(lambda: self._run_some(begun.forward.result(), section, decoding))
        if ran.exception() is None and not ran.result():
            section.mark(self._pipeline.logits_device)
            self._flights.append(section)
            return

        def output() -> StageOutput:
            ran.result()  # raises what went wrong
            return begun.forward.result().result()

        self._flights.begun = None
        flight = Flight(begun.batch, begun.owners, called(output), section.began, None, self.draw, section.share)
        self._draw(flight)
        self._add(flight)

    def _run_some(self, forward: PausedForward, section: ChunkSection, decoding: list[Sequence]) -> bool:
        """Whether these were the last."""
        sections = min(forward.left, self._scheduler.sections(section.batch, forward.sections, decoding))
        section.share = 1.0 if forward.sections == 1 else sections / forward.sections  # 0: the stage had to go on
        forward.go_on(sections)
        return not forward.left

    def end_pause(self) -> None:
        """The rest of a chunk that pauses, at once."""
        if (begun := self._flights.begun) is not None:
            self._run_sections(begun, [])

    def _go_on(self, flight: Flight) -> None:
        """Draft what follows its block, while the device is busy with that."""
        if all(owner.draft.will_go_on for owner in flight.owners) and (block := flight.unseen) is not None:
            flight.behind = self._scheduler.proposer.go_on(block)

    def preempt_youngest(self) -> None:
        """The youngest sequence leaves its slot with all its state, and returns when pages are free. Background work is
        ended instead, if there is some: no client waits for it."""
        if background := self._roster.background:
            self._endings.finish(background[-1], FinishReason.CANCELLED)
            return
        victim = max(self._roster.running, key=lambda s: s.account.submitted_at)
        snapshot = self._snapshot(victim)
        log.info("pages are short: request %s waits at %d tokens", victim.request.id, victim.position)
        self._pipeline.close(self._roster.preempt(victim, snapshot))

    def _may_launch(self) -> bool:
        """A flight that failed is collected before anything runs on top of the state it left."""
        failed = bool(self._flights) and self._flights[-1].failed
        return len(self._flights) < self._scheduler.in_flight and not failed

    def _free_pages(self) -> FreePages:
        return FreePages(self._pipeline.pages, sum(map(_pages_of, self._flights)), self._endings.make_room)

    def _capture_at_boundary(self, sequence: Sequence) -> None:
        kind = sequence.boundaries.kinds.get(sequence.position)
        if kind is None:
            return
        last = sequence.position == sequence.prefill_end and sequence.max_tokens > 0
        if last and not self._pipeline.has_room_for_capture():
            # It would wait for earlier ones, perhaps of this very step, and other prompts' chunks with it. Until the
            # chunk is back nothing of the sequence is launched, so that its state stays.
            sequence.late_capture = kind
        else:
            with self._endings.isolated(sequence):
                self._publisher.capture(sequence, sequence.position, kind)

    def _pending_of(self, step: Step) -> PendingTokens | None:
        """Rows whose token the host does not know yet take it, on the device, from what the last flight draws; those of
        blocks from what is drafted."""
        batch, owners, ahead, _ = step
        if ahead is not None:
            return pending_blocks(batch, ahead)
        rows = [row for row, segment in batch.row_starts() if segment.tokens == (PENDING,)]
        if not rows:
            return None
        last = self._flights[-1]
        assert isinstance(last, Flight) and last.drawn is not None, "the step before has not drawn"
        waiting = [owner for segment, owner in zip(batch.segments, owners, strict=True) if segment.tokens == (PENDING,)]
        drawn_for = [row.owner for row in last.drawing]
        return PendingTokens(last.drawn.tokens, tuple(rows), tuple(drawn_for.index(owner) for owner in waiting))

    def _snapshot(self, sequence: Sequence) -> Snapshot:
        parts = self._pipeline.capture(sequence.slot).result()
        return Snapshot(
            tokens=sequence.key[: sequence.position].copy(),
            parts=parts,
            logits=None,
            grid=self._grid,
            stretches=tuple(sequence.stretches),
        )


def pending_blocks(batch: Batch, ahead: Ahead) -> PendingTokens | None:
    """Every block's rows behind its first."""
    blocks = [(row, segment) for row, segment in batch.row_starts() if segment.tokens[-1] == PENDING]
    firsts = [(row + 1, ahead.first(segment.slot), len(segment) - 1) for row, segment in blocks]
    pairs = [(row + place, source + place) for row, source, count in firsts for place in range(count)]
    return PendingTokens(ahead.tokens, *map(tuple, zip(*pairs, strict=True))) if pairs else None


def _pages_of(flight: Flight | ChunkSection) -> int:
    """A chunk that pauses has had its pages since it began."""
    if isinstance(flight, ChunkSection):
        return 0
    return sum(-(-s.end // PAGE) - -(-s.position // PAGE) for s in flight.batch.segments)

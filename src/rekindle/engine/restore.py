"""A slot is filled with everything that is already known about the prompt.

A kept slot that holds it is taken over. A snapshot in RAM is restored at once. One on disk is read by a loader thread
while other sequences run: the sequence waits in line, a slot is left for it, and its snapshot is restored when it has
been read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import torch

from rekindle.engine.audit import Audit, Auditor
from rekindle.engine.endings import Endings
from rekindle.engine.flight import DrawnRow
from rekindle.engine.kept_slots import Kept
from rekindle.engine.loader import LoaderThreads, release_hit
from rekindle.engine.publisher import Publisher
from rekindle.engine.roster import Roster
from rekindle.engine.sampler import Draw, draw
from rekindle.engine.sequence import Sequence
from rekindle.engine.state import Loading, Preempted, Waiting
from rekindle.engine.to_host import DrawnTokens
from rekindle.engine.types import CacheReport, Divergence
from rekindle.errors import SnapshotMismatch, StageLost
from rekindle.prefix import HeldStates, Hit, Lookup, Miss, PrefixCache
from rekindle.prompt import Boundary, BoundaryKind, newest
from rekindle.snapshots.types import Snapshot
from rekindle.spec import PAGE
from rekindle.stages import Pipeline

log = logging.getLogger("rekindle.engine")


@dataclass(frozen=True, slots=True)
class Restored:
    """The slot is filled."""

    first: DrawnTokens | None = None  # of a prompt that was restored whole: its first token


class Postponed(Enum):
    """Why the sequence stays in line."""

    LOADING = "a loader thread reads its snapshot"
    PAGES_SHORT = "other sequences hold the pages that it needs"


Placement = Restored | Postponed


class Restorer:
    """Lives on the engine's thread; `on_loaded` is called on a loader's when a snapshot has been read."""

    def __init__(
        self,
        pipeline: Pipeline,
        prefixes: PrefixCache,
        roster: Roster,
        publisher: Publisher,
        auditor: Auditor,
        endings: Endings,
        on_loaded: Callable[[Sequence], None],
        grid: int,
        tokens: int | None = None,
    ) -> None:
        """tokens: ids below it may be drawn; None, all that have a logit."""
        self._pipeline = pipeline
        self._prefixes = prefixes
        self._roster = roster
        self._publisher = publisher
        self._auditor = auditor
        self._endings = endings
        self._on_loaded = on_loaded
        self._grid = grid
        self._tokens = tokens
        self.draw: Draw = draw
        self._loader = LoaderThreads(prefixes)

    def place(self, sequence: Sequence, alone: bool) -> Placement:
        """Fill a free slot with the longest known prefix of the sequence. alone: nothing else runs, so that no page
        will become free by waiting."""
        if isinstance(sequence.state, Preempted):
            return self._resume(sequence, sequence.state, alone)
        if sequence.audit is not None:
            return self._open_for_audit(sequence, sequence.audit)
        if sequence.scores_prompt:
            return self._open_for_scores(sequence)
        return self._restore_prefix(sequence, alone)

    def must_be_read(self, sequence: Sequence) -> bool:
        """Whether its snapshot lies on disk, and nobody has begun to read it."""
        waits = isinstance(sequence.state, Waiting) and sequence.state.found is None
        if not waits or sequence.background or sequence.audit is not None or sequence.scores_prompt:
            return False
        kept = self._roster.kept.known_length(sequence.key, sequence.namespace)
        return self._prefixes.must_be_read(sequence.key, sequence.namespace, beyond=kept)

    def take_loaded(self, sequence: Sequence) -> None:
        """Its snapshot has been read; raises what kept the loader from reading. A sequence that ended is let be."""
        if isinstance(sequence.state, Loading):
            self._roster.keep_found(sequence, sequence.state.reading.result())

    def stop(self) -> None:
        self._loader.stop()

    # Without the index

    def _resume(self, sequence: Sequence, state: Preempted, alone: bool) -> Placement:
        position = state.snapshot.position
        if not self._has_pages(sequence, position + 1) and not alone:
            return Postponed.PAGES_SHORT
        slot = self._take_slot(sequence)
        self._pipeline.restore(slot, position, state.snapshot.parts)
        self._note_context(sequence, slot, position)
        sequence.stand_at(position)
        return Restored()

    def _open_for_audit(self, sequence: Sequence, audit: Audit) -> Placement:
        self._pipeline.open(self._take_slot(sequence))
        sequence.boundaries.cuts = audit.cuts
        return Restored()

    def _open_for_scores(self, sequence: Sequence) -> Placement:
        """Every prompt token needs logits, and a snapshot has those of the last only."""
        found = self._prefixes.record_bypass(Miss.PROMPT_LOGPROBS)
        self._pipeline.open(self._take_slot(sequence))
        found.taken()
        sequence.account.cache = CacheReport(self._prefixes.by_tier(), sequence.prompt_length, miss=found.reason)
        return Restored()

    # By what the index knows

    def _restore_prefix(self, sequence: Sequence, alone: bool) -> Placement:
        assert isinstance(sequence.state, Waiting), f"request {sequence.request.id} is {sequence.state}"
        if (kept := self._kept_for(sequence)) is not None:
            return self._go_on(sequence, kept, alone)
        earlier = sequence.state.found
        found = earlier or self._look_up(sequence)
        if found is None:
            return Postponed.LOADING
        if not self._has_pages(sequence, found.reached + 1) and not alone:
            return Postponed.PAGES_SHORT
        if earlier is not None and self._is_outdated(found, sequence):
            return self._look_again(sequence, alone)
        restored = self._fill(sequence, found)
        if restored is None:
            self._roster.put_back(sequence)
            return self._look_again(sequence, alone)
        self._begin_account(sequence, found)
        release_hit(found)
        return restored

    def _kept_for(self, sequence: Sequence) -> Kept | None:
        """The kept slot that holds the longest known prefix, if one does."""
        kept = self._roster.kept.longest(sequence.key, sequence.namespace) if self._roster.kept else None
        return None if kept is None or self._knows_more(sequence, kept.position) else kept

    def _go_on(self, sequence: Sequence, kept: Kept, alone: bool) -> Placement:
        """The sequence takes the slot over: nothing is restored."""
        if kept.logits.exception() is not None:  # law 5: what gave no numbers is no state to go on from
            self._endings.give_up(kept)
            return self._restore_prefix(sequence, alone)
        self._forget_found(sequence)
        found = self._prefixes.lookup_held(sequence.key, kept.position, sequence.namespace)
        self._publisher.capture_kept(kept.slot)
        slot, logits = self._roster.take_over(sequence, kept), kept.logits.result()
        first = self._draw_first(sequence, logits) if kept.position == sequence.prefill_end else None
        self._note_audit(kept)
        self._note_context(sequence, slot, kept.position)
        sequence.stand_at(kept.position, kept.stretches)
        self._begin_account(sequence, found)
        return Restored(first)

    def _note_audit(self, kept: Kept) -> None:
        try:
            self._auditor.note(lambda: self._audit_of(kept))
        except StageLost:
            raise
        except Exception:  # of the audit alone: the request goes on
            log.exception("the state of a kept slot at %d tokens could not be copied for an audit", kept.position)

    def _audit_of(self, kept: Kept) -> Audit:
        parts = self._pipeline.capture(kept.slot).result()
        snapshot = Snapshot(kept.tokens, parts, kept.logits.result(), self._grid, kept.stretches)
        return Audit(self._prefixes.find(kept.tokens, kept.namespace), snapshot)

    def _look_up(self, sequence: Sequence) -> Lookup | None:
        """What the index knows; None while a loader thread reads it from disk."""
        self._publisher.publish_captured(sequence.key, sequence.namespace)
        found = self._prefixes.lookup_in_ram(sequence.key, sequence.namespace)
        if found is not None:
            self._roster.keep_found(sequence, found)
            return found
        self.read(sequence)
        return None

    def read(self, sequence: Sequence) -> None:
        """It gets no slot yet: its snapshot is read while others come into theirs."""
        reading = self._loader.load(sequence.key, sequence.namespace)
        self._roster.load(sequence, reading)
        reading.add_done_callback(lambda _: self._on_loaded(sequence))

    def _look_again(self, sequence: Sequence, alone: bool) -> Placement:
        self._forget_found(sequence)
        return self._restore_prefix(sequence, alone)

    def _forget_found(self, sequence: Sequence) -> None:
        assert isinstance(sequence.state, Waiting), f"request {sequence.request.id} is {sequence.state}"
        release_hit(sequence.state.found)
        self._roster.keep_found(sequence, None)

    def _is_outdated(self, found: Lookup, sequence: Sequence) -> bool:
        """Whether more is known now. Not asked of a tier that did not answer: it may not the next time either."""
        return found.miss is not Miss.UNAVAILABLE and self._knows_more(sequence, found.reached)

    def _knows_more(self, sequence: Sequence, reached: int) -> bool:
        """Whether a longer prefix is published, or was while the sequence waited with what had been found."""
        self._publisher.publish_captured(sequence.key, sequence.namespace, beyond=reached)
        return self._prefixes.known_length(sequence.key, sequence.namespace) > reached

    def _fill(self, sequence: Sequence, found: Lookup) -> Restored | None:
        """None if the stages refuse the snapshot."""
        slot = self._take_slot(sequence)
        if found.hit is not None:
            return self._restore_hit(sequence, slot, found.hit)
        self._pipeline.open(slot)
        return Restored()

    def _restore_hit(self, sequence: Sequence, slot: int, hit: Hit) -> Restored | None:
        """None if the stages refuse the snapshot: it is quarantined, and the next longest is tried."""
        first = None
        if hit.position == sequence.prefill_end and hit.snapshot.logits is not None:
            # Snapshots of earlier versions have logits of padding rows too, which stand for no token.
            first = self._draw_first(sequence, hit.snapshot.logits[: self._tokens])
        try:
            self._pipeline.restore(slot, hit.position, hit.snapshot.parts)
        except SnapshotMismatch as error:
            log.error("a snapshot of %d tokens does not fit the stages and is quarantined: %s", hit.position, error)
            self._prefixes.quarantine(hit.entry, str(error))
            return None
        self._auditor.note(lambda: Audit(hit.entry, hit.snapshot))
        self._note_context(sequence, slot, hit.position)
        sequence.stand_at(hit.position, hit.snapshot.stretches)
        return Restored(first)

    def _note_context(self, sequence: Sequence, slot: int, position: int) -> None:
        """Whether the snapshot held what the drafter reads."""
        if (drafter := self._pipeline.drafter) is not None:
            sequence.draft.note_context(position, drafter.context(slot), drafter.reach)

    def _draw_first(self, sequence: Sequence, logits: torch.Tensor) -> DrawnTokens | None:
        """The first token of a prompt that is known whole, drawn on the device as in a cold run, before
        the copies of the restore are enqueued, so that the token does not wait for them."""
        device = self._pipeline.logits_device
        if device.type == "cuda":
            logits = logits.pin_memory().to(device, non_blocking=True)
        sequence.logits = logits
        if sequence.max_tokens == 0:
            return None
        return DrawnTokens(self.draw(logits[None], [DrawnRow(sequence, sequence.prefill_end)]))

    def _begin_account(self, sequence: Sequence, found: Lookup) -> None:
        found.taken()
        shared = self._publisher.shared_length(sequence.key, sequence.namespace)
        for boundary in _boundaries(sequence, max(found.divergence, shared)):
            sequence.add_boundary(boundary)
        for start, stop in pairwise((sequence.position, *sequence.boundaries.cuts)):
            for point in self._prefixes.lattice(start, stop, self._grid):
                sequence.add_boundary(Boundary(point, BoundaryKind.LATTICE))
        if not sequence.account.admitted:
            sequence.account.cache = self._report(sequence, found)

    def _report(self, sequence: Sequence, found: Lookup) -> CacheReport:
        restored, tier = sequence.position, found.hit.tier if found.hit is not None else None
        return CacheReport(
            restored_from=self._prefixes.by_tier(restored, HeldStates.name if found.held else tier),
            computed=sequence.prompt_length - restored,
            miss=found.reason,
            divergence=Divergence(found.divergence, found.ours, found.seen) if found.miss is not None else None,
        )

    def _has_pages(self, sequence: Sequence, positions: int) -> bool:
        """Whether so many positions of the sequence fit now, not counting what others will still need. Kept slots are
        given up until they do, and as long as they keep places on the device from it."""
        while True:
            pages, needed = self._pipeline.pages(), -(-positions // PAGE)
            here = pages.at_once - (pages.slot if self._roster.free_slots else 0)  # a kept slot lends nothing
            if needed > here:
                needed -= self._roster.kept.shared_pages(sequence.key[:positions], sequence.namespace)
            if needed <= here or not self._endings.make_room(sequence):
                return needed <= pages.free

    def _take_slot(self, sequence: Sequence) -> int:
        """A free one, or the kept one that is given up first."""
        if not self._roster.free_slots:
            self._endings.make_room(sequence)
        return self._roster.take_slot(sequence)


def _boundaries(sequence: Sequence, divergence: int) -> list[Boundary]:
    """The prompt's own, and the place where it diverges from what was seen before."""
    boundaries = newest(sequence.request.prompt.boundaries)
    if divergence >= PAGE:
        boundaries.append(Boundary(divergence, BoundaryKind.BRANCH))
    boundaries.append(Boundary(sequence.prefill_end, BoundaryKind.END))
    return boundaries

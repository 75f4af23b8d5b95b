"""Into a slot, with everything that is already known about the prompt.

What lies in RAM is restored at once. What lies on disk is read by a thread of its own while the others go on: the
sequence waits in line, with a slot kept free for it, and is restored when its snapshot has been read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Sequential
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from rekindle.engine.audit import Auditor
from rekindle.engine.publisher import Publisher
from rekindle.engine.sequence import Sequence
from rekindle.engine.types import CacheReport, Divergence
from rekindle.errors import SnapshotMismatch
from rekindle.prefix import Hit, Lookup, Miss, PrefixCache, Tier
from rekindle.prompt import Boundary, BoundaryKind
from rekindle.spec import PAGE
from rekindle.stages import Pipeline

log = logging.getLogger("rekindle.engine")


class Admission:
    """Lives on the engine's thread; `loaded` is called on the loader's when a lookup that had to read is done."""

    def __init__(
        self,
        pipeline: Pipeline,
        prefixes: PrefixCache,
        publisher: Publisher,
        auditor: Auditor,
        loaded: Callable[[Sequence], None],
    ) -> None:
        self._pipeline = pipeline
        self._prefixes = prefixes
        self._publisher = publisher
        self._auditor = auditor
        self._loaded = loaded
        # One thread, since the store reads with several: who comes second for the same snapshot finds it in RAM.
        self._loader = ThreadPoolExecutor(1, "rekindle-loader")

    def place(self, sequence: Sequence, slot: int, alone: bool) -> bool:
        """Put the sequence in the slot with its longest known prefix restored; False while pages are short or the
        prefix is being read. Whoever runs alone need not ask for pages."""
        if sequence.parked is not None:
            if not (alone or self._has_pages(sequence.parked.position + 1)):
                return False
            self._pipeline.restore(slot, sequence.parked.position, sequence.parked.parts)
            sequence.position = sequence.settled = sequence.parked.position
            sequence.parked = None
            return True
        if sequence.audit is not None:
            self._pipeline.open(slot)
            sequence.cuts = sequence.audit.cuts
            return True
        if sequence.request.prompt_logprobs is not None:
            found = self._prefixes.lookup_of_nothing(Miss.PROMPT_LOGPROBS)
            self._pipeline.open(slot)
            found.taken()
            sequence.cache = CacheReport(computed=sequence.prompt_length, miss=found.reason)
            return True
        return self._restore_prefix(sequence, slot, alone)

    def _restore_prefix(self, sequence: Sequence, slot: int, alone: bool) -> bool:
        waited = sequence.found is not None
        found = sequence.found = sequence.found or self._look_up(sequence)
        if found is None or not (alone or self._has_pages(found.reached + 1)):
            return False
        if waited and self._knows_more(sequence, found):
            _let_go(sequence)
            return self._restore_prefix(sequence, slot, alone)
        if found.hit is None:
            self._pipeline.open(slot)
        elif not self._restore_hit(sequence, slot, found.hit):
            _let_go(sequence)
            return self._restore_prefix(sequence, slot, alone)
        found.taken()
        _let_go(sequence)
        for boundary in _boundaries(sequence, found.departure):
            sequence.add_boundary(boundary)
        if not sequence.admitted_at:
            sequence.cache = _report(sequence, found)
        return True

    def _look_up(self, sequence: Sequence) -> Lookup | None:
        """What the index knows; None while that is read from disk."""
        self._publisher.publish_captured(sequence.tokens)
        found = self._prefixes.lookup_in_ram(sequence.tokens)
        if found is None:
            sequence.loading = self._loader.submit(self._prefixes.lookup, list(sequence.tokens))
            sequence.loading.add_done_callback(lambda _: self._loaded(sequence))
        return found

    def _knows_more(self, sequence: Sequence, found: Lookup) -> bool:
        """Whether a longer prefix was published while the sequence waited with what had been found."""
        self._publisher.publish_captured(sequence.tokens)
        return self._prefixes.known_length(sequence.tokens) > found.reached

    def _restore_hit(self, sequence: Sequence, slot: int, hit: Hit) -> bool:
        """False where the stages refuse the snapshot: it is set aside and the next longest is tried."""
        try:
            self._pipeline.restore(slot, hit.position, hit.snapshot.parts)
        except SnapshotMismatch as error:
            log.error("a snapshot of %d tokens does not fit the stages and is set aside: %s", hit.position, error)
            self._prefixes.set_aside(hit.entry, str(error))
            return False
        self._auditor.note(hit)
        sequence.position = sequence.settled = hit.position
        sequence.stretches = list(hit.snapshot.stretches)
        if hit.position == sequence.prefill_end and hit.snapshot.logits is not None:
            # Drawn where a cold run would draw it, by the same code.
            sequence.logits = hit.snapshot.logits.to(self._pipeline.logits_device)
        return True

    def _has_pages(self, positions: int) -> bool:
        """Whether a sequence of that many positions fits now, not counting what others will still need."""
        return -(-positions // PAGE) <= self._pipeline.pages().free

    def take_loaded(self, sequence: Sequence) -> None:
        """What was read for it is here; raises what kept the loader from reading."""
        loading, sequence.loading = sequence.loading, None
        if loading is not None:
            sequence.found = loading.result()

    def forget(self, sequence: Sequence) -> None:
        """It has ended: what was found for it is no longer kept, nor what will be."""
        _let_go(sequence)
        loading, sequence.loading = sequence.loading, None
        if loading is not None and not loading.cancel():
            loading.add_done_callback(lambda done: _release(done.result() if done.exception() is None else None))

    def stop(self) -> None:
        """Wait for what is being read. Every sequence has ended before."""
        self._loader.shutdown()

    def twin_is_ahead(self, sequence: Sequence, prefilling: Iterable[Sequence]) -> bool:
        """Another prompt with the same beginning is being run right now: wait for its boundary and restore from it."""
        if sequence.parked is not None or sequence.request.prompt_logprobs is not None or sequence.audit is not None:
            return False
        for other in prefilling:
            if other.audit is not None:
                continue  # its edges are given and it publishes nothing
            shared = common_length(sequence.tokens, other.tokens[: other.prefill_end])
            if shared < PAGE:
                continue
            other.add_boundary(Boundary(shared, BoundaryKind.BRANCH))
            boundary = max((cut for cut in other.cuts if cut <= shared), default=0)
            under_way = boundary > other.settled or self._publisher.awaits(other, boundary)
            if under_way and boundary > self._prefixes.known_length(sequence.tokens[:shared]):
                other.promoted = True  # somebody waits for it now
                return True
        return False


def _let_go(sequence: Sequence) -> None:
    """What was found for it is restored, or not wanted any more."""
    found, sequence.found = sequence.found, None
    _release(found)


def _release(found: Lookup | None) -> None:
    if found is not None and found.hit is not None:
        found.hit.release()


def _report(sequence: Sequence, found: Lookup) -> CacheReport:
    restored, hit = sequence.position, found.hit
    return CacheReport(
        restored_ram=restored if hit and hit.tier is Tier.RAM else 0,
        restored_disk=restored if hit and hit.tier is Tier.DISK else 0,
        computed=sequence.prompt_length - restored,
        miss=found.reason,
        divergence=Divergence(found.departure, found.ours, found.seen) if found.miss is not None else None,
    )


def _boundaries(sequence: Sequence, departure: int) -> list[Boundary]:
    """The prompt's own, and the place where it departs from what the index has seen."""
    boundaries = list(sequence.request.prompt.boundaries)
    if departure >= PAGE:
        boundaries.append(Boundary(departure, BoundaryKind.BRANCH))
    boundaries.append(Boundary(sequence.prefill_end, BoundaryKind.END))
    return boundaries


def common_length(a: Sequential[int] | np.ndarray, b: Sequential[int] | np.ndarray) -> int:
    """Tokens that both begin with."""
    n = min(len(a), len(b))
    differs = np.nonzero(np.asarray(a[:n]) != np.asarray(b[:n]))[0]
    return int(differs[0]) if len(differs) else n

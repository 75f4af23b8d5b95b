"""Which sequences in line had better wait for a snapshot that another sequence is about to publish."""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.engine.publisher import Publisher
from rekindle.engine.roster import Roster
from rekindle.engine.sequence import Sequence
from rekindle.engine.state import Preempted
from rekindle.prefix import PrefixCache
from rekindle.prompt import Boundary, BoundaryKind, common_length
from rekindle.spec import PAGE


class Twins:
    """Prompts that share a beginning: the second waits for the snapshot that the first will publish."""

    def __init__(self, prefixes: PrefixCache, publisher: Publisher, roster: Roster) -> None:
        self._prefixes = prefixes
        self._publisher = publisher
        self._roster = roster

    def is_ahead_of(self, sequence: Sequence) -> bool:
        """Whether a sequence that prefills now will publish more of this prompt than the index knows.

        It is then promoted out of the background, and every one that shares a page gets a boundary where the two part.
        """
        if isinstance(sequence.state, Preempted) or sequence.scores_prompt or sequence.audit is not None:
            return False
        return any(self._leads(other, sequence) for other in self._candidates(sequence))

    def _candidates(self, sequence: Sequence) -> Iterable[Sequence]:
        """An audit publishes nothing; another name space publishes nothing that this sequence may restore."""
        for other in self._roster.prefilling:
            if other.audit is None and other.namespace == sequence.namespace:
                yield other

    def _leads(self, other: Sequence, sequence: Sequence) -> bool:
        """Adds a boundary to `other` at the end of what the prompts share, and promotes it if `sequence` will wait."""
        shared = common_length(sequence.key, other.key[: other.prefill_end])
        if shared < PAGE:
            return False
        other.add_boundary(Boundary(shared, BoundaryKind.BRANCH))
        boundary = max((cut for cut in other.boundaries.cuts if cut <= shared), default=0)
        under_way = boundary > other.collected or self._publisher.awaits(other, boundary)
        kept = self._roster.kept.known_length(sequence.key, sequence.namespace)
        known = max(kept, self._prefixes.known_length(sequence.key[:shared], sequence.namespace))
        if under_way and boundary > known:
            other.promote()
            return True
        return False

"""Making snapshots findable: what is worth capturing, under which conversation, and what replaces what."""

from __future__ import annotations

import uuid

import numpy as np

from rekindle.config import show_bytes
from rekindle.prefix.catalogue import Catalogue
from rekindle.prefix.index import Walk
from rekindle.prefix.moves import Moves
from rekindle.prefix.tier import Inherited, Tier
from rekindle.prefix.types import Entry
from rekindle.prompt import BoundaryKind
from rekindle.snapshots.types import Snapshot
from rekindle.spec import SnapshotBytes


class Publishing:
    def __init__(self, catalogue: Catalogue, moves: Moves, sizes: SnapshotBytes | None) -> None:
        """sizes: what a snapshot takes before it is captured; None, any length is tried."""
        self.published = 0
        self.already_published = 0
        self._catalogue = catalogue
        self._lock = catalogue.lock
        self._moves = moves
        self._sizes = sizes

    def take_in(self, tier: Tier) -> None:
        """Publish what an earlier process left in a tier."""
        for found in tier.open(self._moves.room_of(tier)):
            with self._lock:
                known = self._catalogue.index.find(found.tokens, found.namespace)
                entry = known or _inherited_entry(found)
                if entry.has_logits != found.has_logits:
                    tier.remove(found.id)  # a faster tier has another snapshot of these tokens
                    continue
                self._catalogue.use(entry)
                self._catalogue.hang(entry, tier, found.tokens, found.id)

    def refusal(self, position: int) -> str | None:
        budgets = {tier.name: tier.budget for tier in self._catalogue.tiers if tier.writable and tier.budget}
        if not budgets:
            return "no tier keeps snapshots"
        needed = self._sizes.at(position) if self._sizes is not None else 0
        if needed <= max(budgets.values()):
            return None
        there = " and ".join(f"{name} has {show_bytes(budget)}" for name, budget in budgets.items())
        return f"a snapshot of {position:,} tokens takes {show_bytes(needed)}, {there}"

    def wants(self, key: np.ndarray, kind: BoundaryKind, namespace: str) -> bool:
        if self.refusal(len(key)) is not None:
            return False  # it would be evicted before a lookup could find it
        with self._lock:
            known = self._catalogue.index.find(key, namespace)
            if known is None or not known.has_logits:
                return True
            self._meet_again(known, kind)
            return False

    def publish(self, snapshot: Snapshot, kind: BoundaryKind, conversation: str | None) -> Entry:
        assert snapshot.position > 0, "a snapshot of no tokens is not worth publishing"
        for part in snapshot.parts:
            at = part.position
            assert at in (snapshot.position, None), f"layer {part.layer} at {at}, the key at {snapshot.position}"
        with self._lock:
            walk = self._catalogue.index.walk(snapshot.tokens, snapshot.namespace)
            known = walk.candidates[0] if walk.candidates else None
            if known is not None and known.position == snapshot.position:
                if not _holds_more(snapshot, known):
                    self._meet_again(known, kind)
                    self._moves.promote(known, snapshot)
                    return known
                # Before the new one is offered, which a tier may store under the same id.
                self._moves.remove(self._catalogue.drop_everywhere(known, "replaced"))
            return self._publish_new(snapshot, kind, conversation or _conversation_of(walk))

    def _publish_new(self, snapshot: Snapshot, kind: BoundaryKind, conversation: str) -> Entry:
        entry = Entry(
            position=snapshot.position,
            kind=kind,
            conversation=conversation,
            own_bytes=snapshot.own_bytes,
            has_logits=snapshot.logits is not None,
            namespace=snapshot.namespace,
        )
        self.published += 1
        self._catalogue.use(entry)
        self._moves.add_everywhere(entry, snapshot)
        self._catalogue.conversations.published(entry)
        self._moves.make_room_in_memory()
        return entry

    def _meet_again(self, known: Entry, kind: BoundaryKind) -> None:
        """A boundary that is published already: it keeps the kind that is kept longest."""
        self.already_published += 1
        if kind is BoundaryKind.SYSTEM or known.kind is BoundaryKind.LATTICE:
            self._catalogue.conversations.forget(known)
            known.kind = kind
        self._catalogue.use(known)
        self._catalogue.conversations.published(known)


def _inherited_entry(found: Inherited) -> Entry:
    return Entry(
        position=len(found.tokens),
        kind=found.kind,
        conversation=found.conversation or uuid.uuid4().hex,
        own_bytes=found.own_bytes,
        has_logits=found.has_logits,
        namespace=found.namespace,
        inherited=True,
    )


def _holds_more(snapshot: Snapshot, known: Entry) -> bool:
    more = snapshot.logits is not None and not known.has_logits
    return more and not known.pins and not known.adding


def _conversation_of(walk: Walk) -> str:
    """That of the longest published prefix, unless it is a system prompt, which many conversations share."""
    for entry in walk.candidates:
        if entry.kind is not BoundaryKind.SYSTEM:
            return entry.conversation
    return uuid.uuid4().hex

"""Snapshots on their way into tiers, between them and out of them.

published     offered to every tier; a point of the lattice to those in memory only
refused       stays in memory, and goes to the tier when that asks for what is left
found slow    promoted: offered to every tier that is faster
over budget   evicted: a copy in memory that no other tier has is offered to the slower ones first, and is found
              where it was until one of them has it; a point of the lattice just goes
at shutdown   what lies in memory is offered to every persistent tier that lacks it
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np

from rekindle.prefix.catalogue import Catalogue
from rekindle.prefix.tier import Offer, Room, Tier
from rekindle.prefix.types import Entry
from rekindle.prompt import BoundaryKind
from rekindle.snapshots.types import Snapshot


class Moves:
    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._lock = catalogue.lock
        self._instant = tuple(tier for tier in catalogue.tiers if tier.instant)
        # By tier: what it had no place for, the oldest first. It may have left memory, or come to the tier, since.
        self._refused: dict[str, dict[Entry, None]] = {tier.name: {} for tier in catalogue.tiers}

    def room_of(self, tier: Tier) -> Room:
        in_memory = sum(each.budget for each in self._instant)
        return Room(
            own=partial(self._make_room, tier),
            memory=self.make_room_in_memory,
            in_memory=in_memory,
            left=partial(self._next_left, tier),
        )

    @property
    def left(self) -> int:
        """Snapshots that a tier refused and has yet to ask for."""
        with self._lock:
            tiers = self._catalogue.tiers
            return sum(self._is_wanted(entry, tier) for tier in tiers for entry in self._refused[tier.name])

    def _is_wanted(self, entry: Entry, tier: Tier) -> bool:
        return not entry.gone and self._lacks(tier, entry)

    # In

    def add_everywhere(self, entry: Entry, snapshot: Snapshot) -> None:
        is_point = entry.kind is BoundaryKind.LATTICE  # many, and rarely needed: they would fill a slow tier's queue
        self._offer_to(self._instant if is_point else self._catalogue.tiers, entry, snapshot)

    def promote(self, entry: Entry, snapshot: Snapshot) -> None:
        """Into every tier faster than the fastest that holds it, as far as their budgets go."""
        with self._lock:
            if entry.gone:
                return
            tiers = self._catalogue.tiers
            fastest, _ = self._catalogue.held(entry)[0]
            if self._offer_to(tiers[: tiers.index(fastest)], entry, snapshot):
                self.make_room_in_memory()

    def save(self, entry: Entry, tier: Tier) -> None:
        """At shutdown: into a persistent tier, if it lies in memory and the tier lacks it."""
        with self._lock:
            found = self._catalogue.at_hand(entry)
            if found is None or not self._lacks(tier, entry):
                return
            entry.adding.add(tier.name)
        # May wait for a place in the tier's queue: without the lock, which `_added` needs.
        self._hand_over(entry, found[0], tier, wait=True)

    def _offer_to(self, tiers: Iterable[Tier], entry: Entry, snapshot: Snapshot) -> bool:
        """To every tier that lacks it; whether one of them took it."""
        lacking = [tier for tier in tiers if self._lacks(tier, entry)]
        entry.adding.update(tier.name for tier in lacking)
        taken = [self._hand_over(entry, snapshot, tier) for tier in lacking]
        return any(taken)

    @staticmethod
    def _lacks(tier: Tier, entry: Entry) -> bool:
        """Whether the tier neither holds it nor is adding it, and could."""
        return tier.writable and tier.name not in entry.copies and tier.name not in entry.adding

    def _hand_over(self, entry: Entry, snapshot: Snapshot, tier: Tier, wait: bool = False) -> bool:
        taken = tier.add(self._offer(entry, snapshot, tier), wait)
        if not taken:
            with self._lock:
                entry.adding.discard(tier.name)
                if not entry.gone:
                    self._refused[tier.name][entry] = None
        return taken

    def _offer(self, entry: Entry, snapshot: Snapshot, tier: Tier) -> Offer:
        done = partial(self._added, entry, tier, snapshot.tokens)
        return Offer(snapshot, entry.kind, entry.conversation, done)

    def _next_left(self, tier: Tier) -> Offer | None:
        """Called by a tier that has a place again."""
        with self._lock:
            refused = self._refused[tier.name]
            while refused:
                entry = next(iter(refused))
                del refused[entry]
                found = self._catalogue.at_hand(entry) if self._is_wanted(entry, tier) else None
                if found is not None:
                    entry.adding.add(tier.name)
                    return self._offer(entry, found[0], tier)
        return None

    def _added(self, entry: Entry, tier: Tier, tokens: np.ndarray, id: str | None) -> None:
        """From any thread: the tier holds the entry, or could not store it."""
        with self._lock:
            entry.adding.discard(tier.name)
            unwanted = entry.gone
            if id is not None and not unwanted:
                self._catalogue.hang(entry, tier, tokens, id)
            if id is None and not unwanted and tier.counts().state == "troubled":
                self._refused[tier.name][entry] = None  # the tier asks again when its pause is over
            self._finish_leaving(entry)
        if id is not None and unwanted:
            tier.remove(id)

    # Out

    def make_room_in_memory(self, coming: int = 0) -> None:
        """In the instant tiers, for what they hold and `coming` bytes more."""
        with self._lock:
            for tier in self._instant:
                self._make_room(tier, tier.bytes + coming - tier.budget)
                tier.trim()

    def keep_budget(self, tier: Tier) -> None:
        """At the start: an earlier process may have had a larger one."""
        self._make_room(tier, tier.bytes - tier.budget)

    def _make_room(self, tier: Tier, wanted: int) -> None:
        """Evict `wanted` bytes from a tier, or all that is not pinned."""
        goal = tier.bytes - wanted
        while tier.bytes > goal:
            with self._lock:
                victim = self._catalogue.retention[tier.name].victim()
                if victim is None:
                    return
                id = self._evict(victim, tier)
            tier.remove(id)

    def _evict(self, entry: Entry, tier: Tier) -> str:
        """Out of a tier, which still stores it under the id returned."""
        copy = entry.copies[tier.name]
        if tier.instant and len(entry.copies) == 1 and entry.kind is not BoundaryKind.LATTICE:
            snapshot = tier.load(copy.id)
            slower = [other for other in self._catalogue.tiers if not other.instant]
            if entry.adding or self._offer_to(slower, entry, snapshot):
                # Its bytes are now those of the slower tier's queue, which has a bound of its own.
                copy.leaving = snapshot
                self._finish_leaving(entry)  # where a tier was done at once
                return copy.id
        self._drop(entry, tier)
        return copy.id

    def _finish_leaving(self, entry: Entry) -> None:
        """A copy that waits for a slower tier goes when one has it, or none is going to."""
        for tier, _ in self._catalogue.held(entry):
            if entry.copies[tier.name].leaving is not None and (len(entry.copies) > 1 or not entry.adding):
                self._drop(entry, tier)

    def _drop(self, entry: Entry, tier: Tier) -> None:
        others = (other.name for other, _ in self._catalogue.held(entry) if other is not tier)
        fastest = next(others, None)
        self._catalogue.drop(entry, tier, "lost" if fastest is None else f"to_{fastest}")
        if entry.gone:
            for refused in self._refused.values():
                refused.pop(entry, None)

    def remove(self, held: Iterable[tuple[Tier, str]]) -> None:
        for tier, id in held:
            tier.remove(id)

"""Which entry lies in which tier, how recently it was used and whether it is pinned: bookkeeping, under one lock."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np

from rekindle.errors import BadRequest
from rekindle.prefix import retention
from rekindle.prefix.index import PrefixIndex
from rekindle.prefix.retention import Conversations, Retention
from rekindle.prefix.tier import Tier
from rekindle.prefix.types import Entry
from rekindle.prompt import ids_of
from rekindle.snapshots.types import Snapshot


class Catalogue:
    """Shared by lookups, publishing and moves between tiers. Callers hold `lock` around every method but `acquire`."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.tiers = tuple(tiers)  # the fastest first
        self.names = tuple(tier.name for tier in tiers)
        assert len(set(self.names)) == len(self.names), f"two tiers of one name among {self.names}"
        # Held for bookkeeping only, never while a tier that is not instant loads.
        self.lock = threading.RLock()
        self.index = PrefixIndex(self.names)
        self.retention = {tier.name: Retention(tier.name, tier.budget) for tier in tiers}
        self.conversations = Conversations(self.place)
        self.evictions: Counter[str] = Counter()  # by "tier:what became of it"
        self._operations = 0

    def hang(self, entry: Entry, tier: Tier, tokens: np.ndarray, id: str) -> None:
        """The tier holds the entry under `id` from now on."""
        changed = self.index.publish(tokens, entry, tier.name, id)
        self._rank(tier, entry, changed)

    def drop(self, entry: Entry, tier: Tier, outcome: str) -> None:
        """The entry is no longer found in the tier; removing what the tier stores is the caller's."""
        self.evictions[f"{tier.name}:{outcome}"] += 1
        self.retention[tier.name].forget(entry)
        self._rank(tier, self.index.evict(entry, tier.name))
        if not entry.copies:
            entry.gone = True
            self.conversations.forget(entry)

    def drop_everywhere(self, entry: Entry, outcome: str) -> list[tuple[Tier, str]]:
        """Found in no tier any more; returns the tiers that still store it, with their ids."""
        entry.gone = True  # also where a tier is still adding it
        held = self.held(entry)
        for tier, _ in held:
            self.drop(entry, tier, outcome)
        return held

    def held(self, entry: Entry) -> list[tuple[Tier, str]]:
        """The tiers that hold an entry, the fastest first, with their ids."""
        return [(tier, entry.copies[tier.name].id) for tier in self.tiers if tier.name in entry.copies]

    def at_hand(self, entry: Entry) -> tuple[Snapshot, Tier] | None:
        """The snapshot, if it is in this process's memory, and the tier in which it is found."""
        for tier, id in self.held(entry):
            leaving = entry.copies[tier.name].leaving
            if leaving is not None:
                return leaving, tier
            if tier.instant:
                return tier.load(id), tier
        return None

    def acquire(self, entry: Entry) -> None:
        """Pinned: no victim until it is released as often."""
        with self.lock:
            entry.pins += 1
            self.place(entry)

    def use(self, entry: Entry) -> None:
        self._operations += 1
        entry.used = self._operations
        self.place(entry)

    def keep(self, entry: Entry, seconds: float) -> None:
        """Evicted after all others for so long from now, or as long as it was kept before."""
        entry.kept_until = max(entry.kept_until, retention.now() + seconds)
        self.place(entry)

    def place(self, entry: Entry) -> None:
        """Its rank in every tier, after something that the rank depends on has changed."""
        for each in self.retention.values():
            each.place(entry)

    def _rank(self, tier: Tier, *entries: Entry | None) -> None:
        for entry in entries:
            if entry is not None:
                self.retention[tier.name].place(entry)


def key_of(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    """Token ids as the index and the stores hold them: int32, not below 0. No other number is made to fit."""
    wide = tokens if isinstance(tokens, np.ndarray) else ids_of(tokens)
    if len(wide) and not (wide.min() >= 0 and wide.max() < 1 << 31):
        wrong = next(int(token) for token in wide if not 0 <= token < 1 << 31)
        raise BadRequest(f"{wrong} is no token id, which have 31 bits")
    return wide.astype(np.int32, copy=False)

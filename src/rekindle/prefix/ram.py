"""The RAM tier: snapshots of this process, by reference."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence

from rekindle.prefix.tier import Inherited, Offer, Room, TierCounts
from rekindle.snapshots.memory import MemoryStore
from rekindle.snapshots.slabs import Slabs
from rekindle.snapshots.types import Snapshot


class RamTier:
    name, where = "ram", "RAM"
    instant, persistent, writable = True, False, True

    def __init__(self, budget: int, slabs: Sequence[Slabs] = ()) -> None:
        """slabs: host memory that captures and loads are cut from; what the snapshots leave of the budget may lie idle
        there, shared out evenly."""
        self._store = MemoryStore(budget)
        self._held: dict[str, Snapshot] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._slabs = tuple(dict.fromkeys(slabs))
        for each in self._slabs:
            each.spare = self._spare
            each.review()

    @property
    def budget(self) -> int:
        return self._store.budget

    @property
    def bytes(self) -> int:
        return self._store.bytes

    def _spare(self) -> int:
        """Bytes that may lie idle in each of the slabs."""
        return (self.budget - self.bytes) // len(self._slabs)

    def open(self, room: Room) -> Iterable[Inherited]:
        return ()

    def add(self, offer: Offer, wait: bool = False) -> bool:
        with self._lock:
            id = str(next(self._numbers))
            self._held[id] = offer.snapshot
            self._store.add(offer.snapshot)
        offer.done(id)
        return True

    def load(self, id: str) -> Snapshot:
        return self._held[id]

    def remove(self, id: str) -> None:
        with self._lock:
            snapshot = self._held.pop(id, None)
            if snapshot is not None:
                self._store.remove(snapshot)

    def quarantine(self, id: str, reason: str) -> None:
        self.remove(id)

    def trim(self) -> None:
        for each in self._slabs:
            each.review()

    def counts(self) -> TierCounts:
        return TierCounts()

    def flush(self) -> None: ...

    def close(self) -> None: ...

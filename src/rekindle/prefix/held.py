"""The first tier: states that engines keep in their slots, where they were computed.

An engine holds them, finds them and gives them up (`engine/kept_slots.py`); nothing is loaded or saved here. What is
counted is of all engines that share the cache.
"""

from __future__ import annotations

import threading

from rekindle.spec import SnapshotBytes


class HeldStates:
    """Every method may be called from any thread."""

    name = "device"

    def __init__(self, sizes: SnapshotBytes | None = None, budget: int = 0) -> None:
        """sizes: what states take, where it is known. budget: bytes of what is kept. Pages that were captured have
        copies in RAM for as long as a slot holds them, also when the RAM tier has evicted their snapshots."""
        self.budget = budget
        self.count = self.bytes = 0
        self.given_up = 0
        self._sizes = sizes
        self._lock = threading.Lock()

    @property
    def over_budget(self) -> bool:
        return self.bytes > self.budget

    def add(self, position: int) -> None:
        with self._lock:
            self._count(position, 1)

    def take(self, position: int) -> None:
        """A sequence goes on from it."""
        with self._lock:
            self._count(position, -1)

    def give_up(self, position: int) -> None:
        with self._lock:
            self._count(position, -1)
            self.given_up += 1

    def _count(self, position: int, more: int) -> None:
        self.count += more
        self.bytes += more * (self._sizes.at(position) if self._sizes is not None else 0)

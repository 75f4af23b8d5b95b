"""Slots in which no sequence lives: the pool has their memory for pages, until a sequence comes.

To lend a slot moves no byte, since nobody's state is in it. Before a sequence comes, pages that lie there move to free
places or leave the device; what the pool promises counts none of these places, so that they always can. Slots and pages
are found by number, so recorded steps go on.
"""

from __future__ import annotations

from collections.abc import Sequence

from rekindle.errors import CopyFailed, PoolFull
from rekindle.pool import PagePool


class IdleSlots:
    def __init__(self, pool: PagePool, places: Sequence[Sequence[int]]) -> None:
        """places: of pages, in the memory of each slot. All are lent at first, those that are opened first as the last:
        their places are taken last."""
        self._pool = pool
        self._places = tuple(map(tuple, places))
        self._lent = set[int]()
        for slot in reversed(range(len(self._places))):
            self.lend(slot)

    def __contains__(self, slot: int) -> bool:
        return slot in self._lent

    @property
    def most(self) -> int:
        """Places that the pool loses when a sequence comes."""
        return max(map(len, self._places), default=0)

    def places_of(self, slot: int) -> int:
        """That the pool has of the slot now."""
        return len(self._places[slot]) if slot in self._lent else 0

    def holds_pages(self, slot: int) -> bool:
        """Whether pages lie in its memory, which would have to move before a sequence comes."""
        return slot in self._lent and not self._pool.are_free(self._places[slot])

    def lend(self, slot: int) -> None:
        if slot not in self._lent:
            self._pool.borrow(self._places[slot])
            self._lent.add(slot)

    def take_back(self, slot: int) -> None:
        """PoolFull where pages in it cannot leave the device: the sequence has to wait until others have ended."""
        if slot not in self._lent:
            return
        try:
            self._pool.give_back(self._places[slot])
        except CopyFailed as error:
            raise PoolFull(f"the state of another sequence finds no room on the device: {error}") from error
        self._lent.remove(slot)

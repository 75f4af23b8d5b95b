"""One budget for experts and KV: before a forward, memory goes where the next byte saves the most time.

To lend a unit moves no byte: the experts in it are in host memory too. When it comes back, pages that lie in it move
or leave, and experts come for it, on the stream of the layers, a unit or so per step. Steps that are recorded find
pages by number and experts by table, both on the device, so they go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from rekindle.pool import PagePool, PageTable
from rekindle.stages.trader import Trader

LIVE = 64  # turns of the pool: a sequence that has not run for longer needs no room for its pages
LOOKED = 256  # forwards between two looks at the counted routing
ROWS_PER_UNIT = 256  # of a forward that takes a unit back for every so many of its rows, and one at least


class LentUnit(Protocol):
    """Memory that changes hands as a whole."""

    @property
    def places(self) -> Sequence[int]:
        """Of pages, in it."""
        ...

    def link_bytes(self, rows: int) -> float:
        """What a step of so many rows reads over the link if the unit is lent, and not otherwise."""
        ...

    def lend(self) -> None: ...
    def take_back(self) -> None: ...


class Trade:
    def __init__(self, pool: PagePool, units: Sequence[LentUnit]) -> None:
        self._pool, self._units = pool, units
        self._own = pool.places
        self._trader = Trader(pool.places, [len(unit.places) for unit in units])
        self._page_bytes = sum(layer[0].nbytes for layer in pool.kv)
        self._costs: dict[int, list[float]] = {}  # by rows of a step
        self._forwards = 0
        self.lent = 0  # units
        self.moves = Counter({"lent": 0, "given back": 0})  # places so far

    def before(self, tables: Sequence[PageTable], more: int, rows: int) -> None:
        """Before a forward of `rows` rows of these sequences, which gives them `more` pages."""
        pages = self._pool.live_pages(LIVE, tables) + more - self._places_of_others
        most_back = max(1, rows // ROWS_PER_UNIT)
        want = self._trader.decide(pages, self._page_bytes, self._costs_now(len(tables)), most_back)
        while self.lent < want:
            self._units[self.lent].lend()
            self._pool.borrow(self._units[self.lent].places)
            self.moves["lent"] += len(self._units[self.lent].places)
            self.lent += 1
        while self.lent > want:
            unit = self._units[self.lent - 1]
            self._pool.give_back(unit.places)
            unit.take_back()
            self.lent -= 1
            self.moves["given back"] += len(unit.places)

    @property
    def _places_of_others(self) -> int:
        """That the pool has of slots in which no sequence lives: pages in them need no unit."""
        return self._pool.places - self._own - (self.moves["lent"] - self.moves["given back"])

    def _costs_now(self, sequences: int) -> Sequence[float]:
        """In decode, where a step has a row of every sequence: a chunk reads pages and experts alike."""
        self._forwards += 1
        if self._forwards % LOOKED == 0:
            self._costs.clear()
        if sequences not in self._costs:
            self._costs[sequences] = [unit.link_bytes(sequences) for unit in self._units]
        return self._costs[sequences]

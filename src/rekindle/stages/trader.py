"""Where a stage's memory saves the most time: numbers in, a number of lent units out. No torch.

A unit is the memory of a few expert slots. As pages it saves what the live contexts would read over the link at every
step; as experts, what the routing would ask for and not find. Both come over one link, so bytes are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

MARGIN = 0.25  # of the other's worth, by which a unit must be worth more before it changes hands
AHEAD = 8  # pages that a conversation is likely to grow by soon, so that a unit is not lent for its first page alone
PATIENCE = 32  # decisions in a row that find a unit of less use, before it goes back


class Trader:
    """Units are lent in their order and come back in the reverse order: what is lent is one number."""

    def __init__(self, places: int, units: Sequence[int]) -> None:
        """places: of the pool without any unit; units: places that each one adds."""
        self._units = tuple(units)
        self._places = tuple(accumulate(units, initial=places))  # with the first n units
        self._unneeded = 0  # decisions in a row that found the last unit of less use
        self.lent = 0

    def decide(self, pages: int, page_bytes: int, costs: Sequence[float], most_back: int = 1) -> int:
        """How many units should be lent from now on, for steps that read `pages` pages.

        costs: bytes that a step reads over the link if a unit is lent and would not otherwise, unit by unit; those that
        come first cost least. At most `most_back` units go back at a time: experts have to come for them.
        """
        lent = self._wanted(pages, page_bytes, costs)
        if lent > self.lent:
            self.lent, self._unneeded = lent, 0
            return lent
        kept = self._needed(pages, page_bytes, costs)
        self._unneeded = self._unneeded + 1 if kept < self.lent else 0
        if self._unneeded > PATIENCE:
            self.lent = max(kept, self.lent - most_back)
        return self.lent

    def _wanted(self, pages: int, page_bytes: int, costs: Sequence[float]) -> int:
        lent = self.lent
        while lent < len(self._units) and self._places[lent] < pages:
            if self._saved(lent, pages) * page_bytes <= costs[lent] * (1 + MARGIN):
                break
            lent += 1
        return lent

    def _needed(self, pages: int, page_bytes: int, costs: Sequence[float]) -> int:
        lent = self.lent
        while lent:
            last = lent - 1
            short = self._places[last] < pages  # without it
            if short and self._saved(last, pages) * page_bytes * (1 + MARGIN) >= costs[last]:
                break
            lent = last
        return lent

    def _saved(self, unit: int, pages: int) -> int:
        """Pages of a step that soon lie in the unit, once the units before it are full."""
        return min(self._units[unit], max(0, pages + AHEAD - self._places[unit]))

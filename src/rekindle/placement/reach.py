"""How far devices whose split is chosen for them get in the one list, all of them together.

For one device, or a split that was asked for, `buy` walks the list stage by stage. With a split that changes with the
memory that would be a gamble: other layers on a device, other experts, another pool. So here the list is one for all
devices and knows the split as little as the budgets. A split reaches a place in it if each device holds its layers'
part of everything up to there, and the best split is the one that reaches furthest. More memory never takes a split's
reach away, so it never makes an expert cold or the pool smaller, whatever split it brings. Where the list ends speed
decides, and what is left on the devices is for more pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from rekindle.placement.buy import Share, Shelf
from rekindle.spec import Span


@dataclass(frozen=True, slots=True)
class Reach:
    """A place in the list."""

    pages: int  # on every device
    whole: bool  # every expert of the model
    counts: tuple[int, ...]  # experts up to here in the layers before each one, and in all
    costs: tuple[int, ...]  # bytes of them

    def cost(self, span: Span) -> int:
        """Bytes of the span's experts up to here."""
        return self.costs[span.stop] - self.costs[span.start]

    def share_of(self, span: Span) -> Share:
        return Share(self.counts[span.stop] - self.counts[span.start], self.pages, self.whole)


class CommonList:
    """What all devices together may buy: a shelf for the whole model."""

    def __init__(self, shelf: Shelf, layers: int) -> None:
        self._shelf, self._layers = shelf, layers

    def furthest(self, holds: Callable[[Reach], bool]) -> Reach | None:
        """The furthest place that can be held; None if not even the start can."""
        experts = len(self._shelf.order)
        whole = self.at(experts)
        if holds(whole):
            return self.at(experts, self._most_pages(whole.pages, lambda pages: holds(self.at(experts, pages))))
        if not experts or not holds(self.at(0)):
            return None
        return self.at(largest(0, experts - 1, lambda place: holds(self.at(place))))

    def at(self, place: int, pages: int | None = None) -> Reach:
        """Behind so many experts, with the pages that stand before them if no other number is named."""
        shelf = self._shelf
        counts = Counter(shelf.order[:place])
        costs = {layer: count * shelf.layers[layer].expert for layer, count in counts.items()}
        if pages is None:
            floor = sum(shelf.layers[layer].expert for layer in shelf.order[: min(place, shelf.floor)])
            pages = shelf.pages_behind(sum(costs.values()) - floor)
        return Reach(pages, place == len(shelf.order), self._sums(counts), self._sums(costs))

    def _sums(self, values: Mapping[int, int]) -> tuple[int, ...]:
        return tuple(accumulate((values.get(layer, 0) for layer in range(self._layers)), initial=0))

    def _most_pages(self, low: int, holds: Callable[[int], bool]) -> int:
        shelf = self._shelf
        if holds(shelf.full):
            return shelf.full
        most = largest(low, max(low, shelf.most), holds)
        return max(low, 1 << most.bit_length() - 1) if shelf.powers_of_two else most


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number in [low, high] that fits; low is known to, and whatever is smaller than one that does."""
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low

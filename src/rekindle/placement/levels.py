"""How much devices whose split is chosen for them hold, all of them together.

For one device, or a split that was asked for, `allocate` walks the list of candidates stage by stage. With a split that
changes with the memory that would be a gamble: other layers on a device, other experts, another pool. So here one list
serves all devices, and depends on the split as little as on the budgets. A level is a place in it. A split holds a
level if each device has room for its layers' part of everything up to there, and the best split is the one that holds
the highest level. More memory never takes a level away, so it never makes an expert cold or the pool smaller, whatever
split it brings. Where the list ends speed decides, and what is left on the devices is for more pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

from rekindle.placement.allocate import Candidates, Share
from rekindle.spec import Span


@dataclass(frozen=True, slots=True)
class Level:
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


class Levels:
    """Of the candidates of the whole model."""

    def __init__(self, candidates: Candidates, layers: int) -> None:
        self._candidates, self._layers = candidates, layers

    def highest(self, holds: Callable[[Level], bool]) -> Level | None:
        """The highest level that can be held; None if not even the lowest can."""
        experts = len(self._candidates.order)
        whole = self.at(experts)
        if holds(whole):
            return self.at(experts, self._most_pages(whole.pages, lambda pages: holds(self.at(experts, pages))))
        if not experts or not holds(self.at(0)):
            return None
        return self.at(largest(0, experts - 1, lambda place: holds(self.at(place))))

    def at(self, place: int, pages: int | None = None) -> Level:
        """After `place` experts, with the pages that stand before the next one if no other number is named."""
        candidates = self._candidates
        counts = Counter(candidates.order[:place])
        costs = {layer: count * candidates.layers[layer].expert for layer, count in counts.items()}
        if pages is None:
            floor = sum(candidates.layers[layer].expert for layer in candidates.order[: min(place, candidates.floor)])
            pages = candidates.pages_after(sum(costs.values()) - floor)
        return Level(pages, place == len(candidates.order), self._sums(counts), self._sums(costs))

    def _sums(self, values: Mapping[int, int]) -> tuple[int, ...]:
        return tuple(accumulate((values.get(layer, 0) for layer in range(self._layers)), initial=0))

    def _most_pages(self, low: int, holds: Callable[[int], bool]) -> int:
        candidates = self._candidates
        if not candidates.bounded and holds(candidates.full):
            return candidates.full
        most = largest(low, max(low, candidates.most), holds)
        return max(low, 1 << most.bit_length() - 1) if candidates.powers_of_two else most


def largest(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """The largest number in [low, high] that fits. low is known to fit, as does every number below one that fits."""
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low

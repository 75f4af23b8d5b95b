"""The one decision: which experts and pages the rest of a budget buys.

Everything that could be bought stands in one list, in an order that does not know the budget. A stage buys from its
start until the money is out. So more memory buys a longer piece of the same list: never fewer experts, never a smaller
pool. The context limit only decides how many pages stand at the end of the list, behind the last expert. Devices whose
split is chosen for them walk it together (reach.py).

    least pages │ floor of experts │ experts, and a page for each page's worth of them, up to the target │ experts
                                                                          │ pages up to every sequence at its limit
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from rekindle.errors import BadConfig
from rekindle.placement.types import LayerSizes, Wishes
from rekindle.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Shelf:
    """What one stage may buy."""

    order: tuple[int, ...]  # layers; the n-th mention of a layer is its n-th expert by rank
    floor: int  # so many of the order come before any page is weighed against them
    layers: dict[int, LayerSizes]
    page_bytes: int
    least: int  # pages that must be bought
    target: int  # pages that are worth as much as experts
    most: int  # pages beyond the target that help even if not every sequence fits
    full: int  # pages of every sequence at its limit
    ceiling: int | None = None  # pages that RAM has room for, where RAM is what the stage lives in
    powers_of_two: bool = False  # short of that, no other pool: a start with a little less memory has the same one

    @property
    def expert_bytes(self) -> int:
        return sum(layer.expert * layer.experts for layer in self.layers.values())

    def pages_behind(self, spent: int) -> int:
        """That stand in the list behind so many bytes of experts beyond the floor."""
        worth = spent // self.page_bytes if self.page_bytes else self.target
        return min(self.target, self.least + worth)


@dataclass(frozen=True, slots=True)
class Share:
    """A stage's part of what all devices buy together."""

    experts: int  # of the shelf's order
    pages: int
    whole: bool  # every expert of the model, in this stage and in the others


@dataclass(frozen=True, slots=True)
class Bought:
    resident: dict[int, int]  # experts on the device per layer, hot ones and ring slots
    pages: int

    def leaves_cold(self, shelf: Shelf) -> bool:
        return any(count < shelf.layers[layer].experts for layer, count in self.resident.items())


def buy(shelf: Shelf, room: int) -> Bought | None:
    """As much of the list as there is room for; None if not even the least pages can be had."""
    order, page = shelf.order, shelf.page_bytes
    costs = {layer: sizes.expert for layer, sizes in shelf.layers.items()}
    sums = list(accumulate(map(costs.__getitem__, order), initial=0))  # bytes of the first experts

    def pages_before(place: int) -> int:
        """That stand before the expert at a place."""
        return shelf.pages_behind(sums[place] - sums[min(place, shelf.floor)])

    if room < shelf.least * page:
        return None
    places = range(len(order))
    count = bisect_right(places, room, key=lambda place: sums[place + 1] + pages_before(place) * page)
    counts = Counter(order[:count])
    resident = {layer: counts[layer] for layer in shelf.layers}
    left = room - sums[count]
    if count < len(order):
        return Bought(resident, min(pages_before(count), left // page) if page else pages_before(count))
    pages = pages_before(count - 1) if count else shelf.least
    return Bought(resident, pages + _last_pages(shelf, left - pages * page, pages))


def buy_share(shelf: Shelf, share: Share, room: int) -> Bought:
    """That and no more, for as long as others have cold experts; else the rest of the room is for pages."""
    counts = Counter(shelf.order[: share.experts])
    resident = {layer: counts[layer] for layer in shelf.layers}
    if not share.whole:
        return Bought(resident, share.pages if shelf.page_bytes else shelf.full)
    left = room - shelf.expert_bytes - share.pages * shelf.page_bytes
    return Bought(resident, share.pages + _last_pages(shelf, left, share.pages))


def spare_slots(shelf: Shelf, share: Share, room: int) -> Counter[int]:
    """Ring slots per layer that so much room has place for: an expert behind the share may be there, but is not hot."""
    spare = Counter[int]()
    for layer in shelf.order[share.experts :] if share.experts >= shelf.floor else ():
        if (size := shelf.layers[layer].expert) <= room:
            spare[layer] += 1
            room -= size
    return spare


def _last_pages(shelf: Shelf, room: int, pages: int) -> int:
    """Every expert is on the device; the rest is for pages."""
    ceiling = shelf.full if shelf.ceiling is None else shelf.ceiling
    if shelf.full <= ceiling and room >= (shelf.full - pages) * shelf.page_bytes:
        return shelf.full - pages  # always so in a stage without attention
    most = max(pages, min(pages + room // shelf.page_bytes, shelf.most, ceiling))
    return (max(pages, 1 << most.bit_length() - 1) if shelf.powers_of_two else most) - pages


def buying_order(spec: ModelSpec, layers: dict[int, LayerSizes], wishes: Wishes) -> tuple[int, ...]:
    """First the experts one token uses, in every layer; then by use per byte, or evenly where nothing was counted."""
    ranks = [(rank, i) for i, layer in layers.items() for rank in range(layer.experts)]
    floor = sorted((rank, i) for rank, i in ranks if rank < spec.ffn.used)
    rest = [(rank, i) for rank, i in ranks if rank >= spec.ffn.used]
    if wishes.counts is None:
        rest.sort()
    else:
        by_rank = {i: sorted(wishes.counts[i], reverse=True) for i in layers}
        rest.sort(key=lambda place: (-by_rank[place[1]][place[0]] / layers[place[1]].expert, *place))
    return tuple(i for _, i in floor + rest)


def ranked_experts(layer: int, experts: int, wishes: Wishes) -> Sequence[int]:
    """Expert ids of a layer, most used first."""
    if wishes.counts is None:
        return range(experts)
    counts = wishes.counts[layer]
    return sorted(range(experts), key=lambda expert: (-counts[expert], expert))


def hot_of(resident: int, experts: int, used: int, ring_share: float) -> int:
    """How many of the resident places hold a fixed expert; the others are the ring.

    The ring never has more slots than the experts that found no place, and never eats into the floor. Each of the
    three terms grows with `resident`, so one place more never makes an expert cold.
    """
    ring = int(ring_share * experts)
    return max(min(resident, used), resident - ring, 2 * resident - experts)


def check_counts(spec: ModelSpec, wishes: Wishes) -> None:
    if wishes.counts is None:
        return
    if len(wishes.counts) != spec.layers:
        raise BadConfig(f"routing counts have {len(wishes.counts)} layers, the model has {spec.layers}")
    for i, row in enumerate(wishes.counts):
        if len(row) != spec.ffn.experts:
            raise BadConfig(f"routing counts of layer {i} name {len(row)} experts, the model has {spec.ffn.experts}")
        if not all(0 <= count < float("inf") for count in row):
            raise BadConfig(f"routing counts of layer {i} must be finite numbers of at least 0")

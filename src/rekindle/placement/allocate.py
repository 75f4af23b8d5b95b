"""The one decision: which experts and pages the rest of a budget holds.

All candidates stand in one list, in an order that does not depend on the budget. A stage takes from its start until
the budget is spent. So more memory takes a longer piece of the same list: never fewer experts, never a smaller pool.
The context limit only decides how many pages stand at the end of the list, after the last expert. Devices whose split
is chosen for them walk it together (levels.py).

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
class Candidates:
    """What one stage may hold beside its fixed items: experts and pages."""

    order: tuple[int, ...]  # layers; the n-th mention of a layer is its n-th expert by rank
    floor: int  # experts of the order that come before any page is weighed against them
    layers: dict[int, LayerSizes]
    page_bytes: int
    least: int  # pages that must be there
    target: int  # pages; up to here a byte of pages is worth as much as a byte of experts
    most: int  # pages to take once every expert is on the device, where `full` do not fit
    full: int  # pages of every sequence at its limit
    bounded: bool = False  # the user asked for `most` pages, and gets no more though `full` might fit
    ceiling: int | None = None  # pages that RAM has room for; None for a stage whose pages are not in RAM
    powers_of_two: bool = (
        False  # a pool smaller than `full` has 2^n pages, so that a little less free memory gives the same
    )

    @property
    def expert_bytes(self) -> int:
        return sum(layer.expert * layer.experts for layer in self.layers.values())

    def pages_after(self, spent: int) -> int:
        """Pages that stand in the list before the next expert, after `spent` bytes of experts beyond the floor."""
        worth = spent // self.page_bytes if self.page_bytes else self.target
        return min(self.target, self.least + worth)


@dataclass(frozen=True, slots=True)
class Share:
    """A stage's part of what all devices hold together."""

    experts: int  # of the candidates' order
    pages: int
    whole: bool  # every expert of the model, in this stage and in the others


@dataclass(frozen=True, slots=True)
class Allocation:
    """What a stage holds of its candidates."""

    resident: dict[int, int]  # experts on the device per layer, hot ones and slots of the expert cache
    pages: int

    def leaves_cold(self, candidates: Candidates) -> bool:
        return any(count < candidates.layers[layer].experts for layer, count in self.resident.items())


def allocate(candidates: Candidates, room: int) -> Allocation | None:
    """As much of the list as there is room for; None if not even the least pages fit."""
    order, page = candidates.order, candidates.page_bytes
    costs = {layer: sizes.expert for layer, sizes in candidates.layers.items()}
    sums = list(accumulate(map(costs.__getitem__, order), initial=0))  # bytes of the first experts

    def pages_before(place: int) -> int:
        """Pages that stand before the expert at a place."""
        return candidates.pages_after(sums[place] - sums[min(place, candidates.floor)])

    if room < candidates.least * page:
        return None
    places = range(len(order))
    count = bisect_right(places, room, key=lambda place: sums[place + 1] + pages_before(place) * page)
    counts = Counter(order[:count])
    resident = {layer: counts[layer] for layer in candidates.layers}
    left = room - sums[count]
    if count < len(order):
        return Allocation(resident, min(pages_before(count), left // page) if page else pages_before(count))
    pages = pages_before(count - 1) if count else candidates.least
    return Allocation(resident, pages + _last_pages(candidates, left - pages * page, pages))


def allocate_share(candidates: Candidates, share: Share, room: int) -> Allocation:
    """The share and no more while any expert of the model is cold; else the rest of the room is for pages."""
    counts = Counter(candidates.order[: share.experts])
    resident = {layer: counts[layer] for layer in candidates.layers}
    if not share.whole:
        return Allocation(resident, share.pages if candidates.page_bytes else candidates.full)
    left = room - candidates.expert_bytes - share.pages * candidates.page_bytes
    return Allocation(resident, share.pages + _last_pages(candidates, left, share.pages))


def spare_slots(candidates: Candidates, share: Share, room: int) -> Counter[int]:
    """Slots of the expert cache per layer that fit in `room` bytes, one for each expert after the share."""
    spare = Counter[int]()
    for layer in candidates.order[share.experts :] if share.experts >= candidates.floor else ():
        if (size := candidates.layers[layer].expert) <= room:
            spare[layer] += 1
            room -= size
    return spare


def _last_pages(candidates: Candidates, room: int, pages: int) -> int:
    """Every expert is on the device; the rest is for pages."""
    if not candidates.page_bytes:  # no layer is paged
        return candidates.full - pages
    ceiling = candidates.full if candidates.ceiling is None else candidates.ceiling
    fits = candidates.full <= ceiling and room >= (candidates.full - pages) * candidates.page_bytes
    if fits and not candidates.bounded:
        return candidates.full - pages
    most = max(pages, min(pages + room // candidates.page_bytes, candidates.most, ceiling))
    return (max(pages, 1 << most.bit_length() - 1) if candidates.powers_of_two else most) - pages


def expert_order(spec: ModelSpec, layers: dict[int, LayerSizes], wishes: Wishes) -> tuple[int, ...]:
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


def hot_of(resident: int, experts: int, used: int, expert_cache_share: float) -> int:
    """How many of the resident places hold a fixed expert; the others are slots of the expert cache.

    The cache never has more slots than there are cold experts, and takes no slot from the `used` experts of one token.
    Each of the three terms grows with `resident`, so one place more never makes an expert cold.
    """
    cache = int(expert_cache_share * experts)
    return max(min(resident, used), resident - cache, 2 * resident - experts)


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

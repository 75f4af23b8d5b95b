"""Expert slots whose memory can be lent, in units that hold whole places of KV pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from rekindle.experts.expert_set import ExpertSet
from rekindle.kernels.device_memory import DeviceMemory, slots_per_unit

MOST_SLOTS = 32  # of one unit: their experts come back at once, and a step waits for them


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """Some slots of one layer, side by side."""

    experts: ExpertSet
    slots: range  # counted from the first one that can be lent
    places: tuple[int, ...]  # of pages, in their memory

    def lend(self) -> None:
        self.experts.lend(self.slots)

    def take_back(self) -> None:
        self.experts.take_back(self.slots)

    def link_bytes(self, rows: int) -> float:
        """What a step of so many rows is expected to read over the link if the slots are lent, and not otherwise: that
        the experts of their ranks are asked for, by the routing as it was counted."""
        first = self.experts.residency.slots - len(self.experts.residency.pinned)
        ranked = np.sort(self.experts.chances)[::-1][first + self.slots.start : first + self.slots.stop]
        return float((1 - (1 - ranked) ** rows).sum()) * self.experts.missing_bytes


def units_of(layers: Sequence[ExpertSet], memory: DeviceMemory) -> list[Unit]:
    """In the order in which they are lent: the coldest slots of every layer first, layer by layer."""
    by_layer = [_units_of(experts, memory) for experts in layers]
    return [unit for depth in zip_longest(*by_layer) for unit in depth if unit is not None]


def _units_of(experts: ExpertSet, memory: DeviceMemory) -> list[Unit]:
    """The last slots first. Slots that are left over, or hold no place, are never lent."""
    lendable, planes = len(experts.residency.pinned), experts.weights.slot_planes()
    if not lendable:
        return []
    sizes, first = [plane[0].nbytes for plane in planes], experts.residency.slots - lendable
    each = slots_per_unit(sizes, lendable, memory.pages.place_bytes, MOST_SLOTS)
    units = list[Unit]()
    for stop in range(lendable, each - 1, -each):
        slots = range(stop - each, stop)
        parts = (memory.places_in(plane[first + slots.start : first + slots.stop]) for plane in planes)
        places = tuple(place for part in parts for place in part)
        if places:
            units.append(Unit(experts, slots, places))
    return units

"""One run of a device's memory that pages of KV, the state of sequences and expert slots are cut from, so that parts of
it can change hands.

Pages come first, then the state of every sequence slot, then expert slots. Seen as pages from the run's beginning, the
memory of a lent slot of either kind is a few more of them, which every kernel finds by number. Expert slots that may be
lent begin on the edge of a page; sequence slots are so large that it does not matter where they begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from torch import Tensor

EDGE = 256  # bytes, at which every tensor begins


@dataclass(frozen=True, slots=True)
class PagePlaces:
    """How pages lie in the run: a place is one page of every layer, side by side."""

    page_bytes: int  # of one layer
    layers: int
    count: int  # places that belong to the pool for good, the scratch page among them

    @property
    def place_bytes(self) -> int:
        return self.page_bytes * self.layers


@dataclass(frozen=True, slots=True)
class StateSlots:
    """How state of a fixed size lies in the run: that of all layers of one slot side by side."""

    slot_bytes: int  # of all layers, every tensor on an EDGE
    count: int  # the slot of padded rows among them, which is the last


class DeviceMemory:
    def __init__(
        self, pages: PagePlaces, slot_bytes: int, device: torch.device, states: StateSlots | None = None
    ) -> None:
        """slot_bytes: for expert slots, behind the pages and what `states` take."""
        self.pages, self.device, self.states = pages, device, states
        self._states = pages.count * pages.place_bytes  # where they begin
        taken = self._states + (states.count * states.slot_bytes if states is not None else 0)
        nbytes = -(-(taken + slot_bytes) // pages.page_bytes) * pages.page_bytes
        self.run = zeros((nbytes,), torch.uint8, device)
        self._first, self._end = taken, nbytes  # of what is not taken yet

    def view_pages(self, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """The whole run as pages of this shape, once per layer: page n of layer i is page n + i of the run."""
        assert prod(shape) * dtype.itemsize == self.pages.page_bytes, f"a page {tuple(shape)} of {dtype} was planned so"
        run = self.run.view(dtype).view(-1, *shape)
        return [run[layer:] for layer in range(self.pages.layers)]

    def view_states(self, offset: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """[slots, …], `offset` bytes behind the beginning of every slot; zeros at first."""
        assert self.states is not None, "there is no state in the run"
        assert offset + prod(shape) * dtype.itemsize <= self.states.slot_bytes, "a slot has fewer bytes"
        strides = torch.empty(shape, device="meta").stride()
        apart, at = self.states.slot_bytes // dtype.itemsize, (self._states + offset) // dtype.itemsize
        return self.run.view(dtype).as_strided((self.states.count, *shape), (apart, *strides), at)

    def places_in_slot(self, slot: int) -> list[int]:
        """The numbers of the places that fit into the memory of a sequence slot."""
        assert self.states is not None, "there is no state in the run"
        first = self._states + slot * self.states.slot_bytes
        return self._places_between(first, first + self.states.slot_bytes)

    def take_slots(self, slots: int, lendable: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros [slots, …], of which the last `lendable` may be lent; what of them is too small for a place comes from
        the end. Memory of its own once the run is used up."""
        size = prod(shape) * dtype.itemsize
        start = (self._end - slots * size) // EDGE * EDGE
        if lendable * size >= self.pages.place_bytes:
            start = self._before_an_edge((slots - lendable) * size)
        stop = start + slots * size
        if start < self._first or stop > self._end:
            return zeros((slots, *shape), dtype, self.device)
        if lendable * size >= self.pages.place_bytes:
            self._first = stop
        else:
            self._end = start
        return self.run[start:stop].view(dtype).view(slots, *shape)

    def _before_an_edge(self, ahead: int) -> int:
        """Where `ahead` bytes begin after which the edge of a page comes, or where they can begin at all."""
        page = self.pages.page_bytes
        start = -(-(self._first + ahead) // page) * page - ahead
        return start if start % EDGE == 0 else -(-self._first // EDGE) * EDGE

    def places_in(self, slots: Tensor) -> list[int]:
        """The numbers of the places that fit into the memory of these slots [n, …], which lie side by side. None where
        they are not of the run."""
        first = slots.data_ptr() - self.run.data_ptr()
        if not (slots.numel() and 0 <= first < len(self.run)):
            return []
        return self._places_between(first, first + slots.nbytes)

    def _places_between(self, first: int, stop: int) -> list[int]:
        number, end = -(-first // self.pages.page_bytes), stop // self.pages.page_bytes
        return list(range(number, end - self.pages.layers + 1, self.pages.layers))


def on_edge(nbytes: int) -> int:
    """What a tensor takes of the run."""
    return -(-nbytes // EDGE) * EDGE


def slots_per_unit(planes: Sequence[int], lendable: int, place_bytes: int, most: int) -> int:
    """How many of a layer's lendable slots change hands together, whose planes have so many bytes each: up to `most`,
    so that all units together hold the most places, in the fewest slots; of equals the smallest."""

    def worth(slots: int) -> tuple[int, int, int]:
        units = lendable // slots
        return units * sum(slots * size // place_bytes for size in planes), -units * slots, -slots

    return max(range(1, min(most, lendable) + 1), key=worth)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """In host memory, zeros that the system hands out page by page as they are written: a pool for every sequence at
    the context limit costs what is used of it."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(*shape)

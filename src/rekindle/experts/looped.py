"""Experts that a loop on the host multiplies with, one after another: every type but packed planes on a GPU.

    DenseWeights   values, on a CPU without kernels in C and on a GPU for the types that no kernel reads quantised
    LaneWeights    lanes as the file stores them, on a CPU with kernels in C

Each pair's share is computed by itself and the shares of a row are added in the order of its places, so the sum does
not depend on where an expert's weights were. Host memory has every expert as stored; cold ones are expanded, or laid
out in lanes, when they are used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rekindle.experts.cpu_experts import LayerCpuExperts
from rekindle.experts.host import HostExecutor, rows_of, through
from rekindle.experts.residency import Residency
from rekindle.experts.stored import StoredExperts, StoredPart, Three
from rekindle.kernels.device_memory import DeviceMemory
from rekindle.kernels.matmul import Lanes, kept_dtype, lay_rows
from rekindle.kernels.matmul.cpu import multiply_all, swiglu
from rekindle.kernels.moe import ExpertStack, SharedExpert, sum_shares

Share = Callable[[Tensor, int], Tensor]  # rows [rows, hidden] of an expert -> float32 [rows, hidden], not yet weighted


class LoopedWeights(ABC):
    """What both kinds share; a subclass makes `stacks`, fills a slot and multiplies."""

    recordable = False  # the host decides which experts occur
    cpu_experts: LayerCpuExperts | None = None
    stacks: tuple[ExpertStack, ExpertStack, ExpertStack]

    def __init__(self, stored: StoredExperts, residency: Residency) -> None:
        self._stored, self._residency = stored, residency
        self.expert_bytes = stored.expert_bytes

    @abstractmethod
    def _fill(self, slot: int, expert: int) -> None: ...

    def _fill_staying(self) -> None:
        for expert, slot in self._residency.slot_of_staying().items():
            self._fill(slot, expert)

    def _take_slots(self, shared: DeviceMemory | None, shape: Sequence[int], like: Tensor) -> Tensor:
        """[slots, …] of the type and device of `like`, from memory that can change hands if there is any."""
        slots, lendable = self._residency.slots, len(self._residency.pinned)
        if shared is None or not lendable:
            return like.new_empty(slots, *shape)
        return shared.take_slots(slots, lendable, shape, like.dtype)

    def most_rows(self, at_once: int) -> int:
        """In turns an expert's rows would be multiplied in other groups than with all experts hot."""
        return at_once

    def run_row(self, h: Tensor, router: Tensor, used: int, tally: Tensor, shared: SharedExpert) -> None:
        return None

    def begin(self) -> None:
        """Cold experts are read where they lie, when they are used."""
        return None

    def take_in(self, load: Tensor) -> None:
        for i, expert in enumerate(load.tolist()):
            if expert >= 0:
                self._fill(len(self._residency.hot) + i, expert)

    def swap(self, slot: int, goes: int, comes: int) -> None:
        """Host memory has every expert, so the one that goes needs no copy."""
        self._fill(slot, comes)

    def _shares(self, h: Tensor, ids: Tensor, resident: Share, cold: Share) -> Tensor:
        """float32 [rows, used, hidden]. `resident` gets a slot, `cold` an expert. Resident experts go first: on a GPU
        they run while the cold ones are prepared."""
        shares = torch.empty(*ids.shape, h.shape[1], dtype=torch.float32, device=h.device)
        for expert, slot in _resident_first(ids, self._residency.table):
            row, place = rows_of(ids, expert)
            x = h.index_select(0, row)
            shares[row, place] = resident(x, slot) if slot >= 0 else cold(x, expert)
        return shares


class DenseWeights(LoopedWeights):
    def __init__(
        self, stored: StoredExperts, residency: Residency, device: torch.device, dtype: torch.dtype, keep: int = 0,
        shared: DeviceMemory | None = None,
    ) -> None:  # fmt: skip
        super().__init__(stored, residency)
        self._device, self._dtype = device, dtype
        gate, up, down = (self._empty_slots(part, shared) for part in stored.parts)
        self.stacks = (gate, up, down)
        self._fill_staying()
        # On the CPU both executors work in one type, so that the result does not depend on which of them ran.
        on_host = dtype if device.type == "cpu" else torch.float32
        self.host_executor = HostExecutor(lambda expert: stored.values(expert, torch.device("cpu"), on_host), keep)

    def _empty_slots(self, part: StoredPart, shared: DeviceMemory | None) -> ExpertStack:
        like = torch.empty(0, dtype=kept_dtype(part.type, self._device, self._dtype), device=self._device)
        shape = (self._residency.slots, *part.shape[1:])
        return ExpertStack(shape, dense=self._take_slots(shared, part.shape[1:], like))

    def slot_planes(self) -> list[Tensor]:
        return [stack.values for stack in self.stacks]

    def _fill(self, slot: int, expert: int) -> None:
        for stack, values in zip(self.stacks, self._stored.values(expert, self._device, self._dtype), strict=True):
            stack.values[slot].copy_(values)

    def stream(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        def share(x: Tensor, expert: int) -> Tensor:
            return through(x, *self._stored.values(expert, self._device, self._dtype))

        return self._sum(h, ids, weights, share)

    def host(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        def share(x: Tensor, expert: int) -> Tensor:
            return self.host_executor.share(x.cpu(), expert).to(h.device)

        return self._sum(h, ids, weights, share)

    def _sum(self, h: Tensor, ids: Tensor, weights: Tensor, cold: Share) -> Tensor:
        """float32 [rows, hidden]."""
        shares = self._shares(h, ids, lambda x, slot: through(x, *self._slot(slot)), cold)
        return (shares * weights[:, :, None]).sum(1)

    def _slot(self, slot: int) -> Three:
        gate, up, down = (stack.values[slot] for stack in self.stacks)
        return gate, up, down


class LaneWeights(LoopedWeights):
    def __init__(
        self, stored: StoredExperts, residency: Residency, dtype: torch.dtype, shared: DeviceMemory | None = None
    ) -> None:
        super().__init__(stored, residency)
        self._dtype = dtype
        gate, up, down = (self._empty_slots(part, shared) for part in range(3))
        self.stacks = (gate, up, down)
        self._fill_staying()

    def _empty_slots(self, part: int, shared: DeviceMemory | None) -> ExpertStack:
        """As many as there are, none of them filled; expert 0 says how long they are."""
        like, slots = self._lanes_of(0)[part], self._residency.slots
        shape = (slots, *self._stored.parts[part].shape[1:])
        return ExpertStack(shape, lanes=like.repeated(self._take_slots(shared, like.data.shape, like.data)))

    def slot_planes(self) -> list[Tensor]:
        slots = self._residency.slots
        return [stack.lanes.data.view(slots, -1) for stack in self.stacks if stack.lanes is not None]

    def _lanes_of(self, expert: int) -> tuple[Lanes, ...]:
        return tuple(
            lay_rows(part.rows(expert, expert + 1), part.type, part.shape[1:], self._dtype)
            for part in self._stored.parts
        )

    def _fill(self, slot: int, expert: int) -> None:
        for have, lanes in zip(self._slot(slot), self._lanes_of(expert), strict=True):
            have.data.copy_(lanes.data)

    def _slot(self, slot: int) -> tuple[Lanes, ...]:
        return tuple(stack.lanes.expert(slot) for stack in self.stacks if stack.lanes is not None)

    def stream(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The device is the host."""
        return self.host(h, ids, weights)

    def host(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """float32 [rows, hidden], summed as the kernel for experts that are all hot does it."""
        shares = self._shares(
            h.float(),
            ids,
            lambda x, slot: _multiply(x, self._slot(slot)),
            lambda x, expert: _multiply(x, self._lanes_of(expert)),
        )
        return sum_shares(shares, weights)


def _multiply(x: Tensor, lanes: Sequence[Lanes]) -> Tensor:
    gate, up, down = lanes
    return multiply_all(swiglu(x, gate, up), [down])[0]


def _resident_first(ids: Tensor, table: Tensor) -> Sequence[tuple[int, int]]:
    """(expert, slot) of every expert that occurs."""
    slots = table.tolist()
    return sorted(((expert, slots[expert]) for expert in ids.unique().tolist()), key=lambda found: found[1] < 0)

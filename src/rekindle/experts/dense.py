"""Experts as values: on a CPU, and on a GPU for the types that no kernel reads quantised.

Each pair's share is computed by itself and the shares of a row are added in the order of its places, so the sum does
not depend on where an expert's weights were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rekindle.experts.helper import LayerHelper
from rekindle.experts.host import HostExecutor, rows_of, through
from rekindle.experts.residency import Residency
from rekindle.experts.stored import StoredExperts, StoredPart, Three
from rekindle.kernels.matmul import kept_dtype
from rekindle.kernels.moe import ExpertStack, SharedExpert


class DenseWeights:
    """Slots with values on the device; the cold ones are read from the map and expanded when they are used."""

    recordable = False  # which experts occur is asked on the host
    helper: LayerHelper | None = None

    def __init__(
        self, stored: StoredExperts, residency: Residency, device: torch.device, dtype: torch.dtype, keep: int = 0
    ) -> None:
        self._stored = stored
        self._residency = residency
        self._device, self._dtype = device, dtype
        self.expert_bytes = stored.expert_bytes
        gate, up, down = (_empty_slots(part, residency.slots, device, dtype) for part in stored.parts)
        self.stacks = (gate, up, down)
        for slot, expert in enumerate(residency.hot):
            self._fill(slot, expert)
        # On the CPU both executors work in one type, so that it does not matter which of them ran.
        on_host = dtype if device.type == "cpu" else torch.float32
        self.host_executor = HostExecutor(lambda expert: stored.values(expert, torch.device("cpu"), on_host), keep)

    def _fill(self, slot: int, expert: int) -> None:
        for stack, values in zip(self.stacks, self._stored.values(expert, self._device, self._dtype), strict=True):
            stack.values[slot].copy_(values)

    def most_rows(self, at_once: int) -> int:
        """In turns an expert's rows would be multiplied in other groups than with all experts hot."""
        return at_once

    def run_row(self, h: Tensor, router: Tensor, used: int, tally: Tensor, shared: SharedExpert) -> None:
        return None

    def take_in(self, load: Tensor) -> None:
        for i, expert in enumerate(load.tolist()):
            if expert >= 0:
                self._fill(len(self._residency.hot) + i, expert)

    def swap(self, slot: int, goes: int, comes: int) -> None:
        """The map has every expert, so the one that goes needs no copy."""
        self._fill(slot, comes)

    def stream(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        def share(x: Tensor, expert: int) -> Tensor:
            return through(x, *self._stored.values(expert, self._device, self._dtype))

        return self._sum(h, ids, weights, share)

    def host(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        def share(x: Tensor, expert: int) -> Tensor:
            return self.host_executor.share(x.cpu(), expert).to(h.device)

        return self._sum(h, ids, weights, share)

    def _sum(self, h: Tensor, ids: Tensor, weights: Tensor, cold: Callable[[Tensor, int], Tensor]) -> Tensor:
        """float32 [rows, hidden]. Resident experts go first: on a GPU they run while the cold ones are prepared."""
        shares = torch.empty(*ids.shape, h.shape[1], dtype=torch.float32, device=h.device)
        for expert, slot in _resident_first(ids, self._residency.table):
            row, place = rows_of(ids, expert)
            x = h.index_select(0, row)
            shares[row, place] = through(x, *self._slot(slot)) if slot >= 0 else cold(x, expert)
        return (shares * weights[:, :, None]).sum(1)

    def _slot(self, slot: int) -> Three:
        gate, up, down = (stack.values[slot] for stack in self.stacks)
        return gate, up, down


def _empty_slots(part: StoredPart, slots: int, device: torch.device, dtype: torch.dtype) -> ExpertStack:
    shape = (slots, *part.shape[1:])
    return ExpertStack(shape, dense=torch.empty(shape, dtype=kept_dtype(part.type, device, dtype), device=device))


def _resident_first(ids: Tensor, table: Tensor) -> Sequence[tuple[int, int]]:
    """(expert, slot) of every expert that occurs."""
    slots = table.tolist()
    return sorted(((expert, slots[expert]) for expert in ids.unique().tolist()), key=lambda found: found[1] < 0)

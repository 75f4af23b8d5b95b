"""Where layers keep state of a fixed size: a place per slot, and one more for padded rows."""

from __future__ import annotations

import torch
from torch import Tensor

from rekindle.kernels.device_memory import DeviceMemory, StateSlots, on_edge
from rekindle.spec import ModelSpec, Span


class SlotMemory:
    """Every tensor for itself; or, where the memory of slots can be lent, slot by slot in the run that pages lie in."""

    def __init__(self, slots: int, device: torch.device, memory: DeviceMemory | None = None) -> None:
        self.slots, self.device = slots, device
        self._run = memory if memory is not None and memory.states is not None else None
        self._taken = 0  # bytes of every slot

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """[slots + 1, …]: a slot's values lie side by side, slots may lie apart."""
        if self._run is None:
            return torch.zeros(self.slots + 1, *shape, dtype=dtype, device=self.device)
        found = self._run.view_states(self._taken, shape, dtype)
        self._taken += on_edge(found[0].nbytes)
        return found


def state_slots(spec: ModelSpec, span: Span, slots: int) -> StateSlots:
    """What `SlotMemory` takes of a run for these layers."""
    sizes = (size for layer in span.layers for size in spec.mixers[layer].slot_bytes().values())
    return StateSlots(sum(map(on_edge, sizes)), slots + 1)

"""What a cold expert costs, computed on the CPU or brought to the device. Measured once at start; arithmetic after."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """Microseconds, except `pcie`. A pair is a row and one of its experts."""

    pcie: float  # bytes per µs from host memory to the device
    host_call: float  # the ids to the host, the result back
    host_expert: float  # the weights of one expert, expanded on the CPU
    host_pair: float  # and one row through them
    device_pair: float

    @classmethod
    def same_memory(cls) -> CostModel:
        """A device whose memory is the host's: nothing is transferred, and the CPU is the device."""
        return cls(pcie=math.inf, host_call=0, host_expert=0, host_pair=0, device_pair=0)

    def stream(self, experts: float, pairs: float, nbytes: int) -> float:
        """`experts` experts of `nbytes` over PCIe, for `pairs` pairs."""
        return experts * nbytes / self.pcie + pairs * self.device_pair

    def host(self, experts: float, pairs: float) -> float:
        return (self.host_call + experts * self.host_expert + pairs * self.host_pair) if pairs else 0.0

    def prefers_host(self, pairs: int, cold: int, experts: int, nbytes: int) -> bool:
        """For a forward of `pairs` pairs in a layer where `cold` of `experts` are not on the device."""
        touched, share = touched_experts(pairs, cold, experts), pairs * cold / experts
        return self.host(touched, share) < self.stream(touched, share, nbytes)


def touched_experts(pairs: int, cold: int, experts: int) -> float:
    """How many different cold experts `pairs` pairs need on average, if all are equally likely."""
    return cold * (1 - (1 - 1 / experts) ** pairs)

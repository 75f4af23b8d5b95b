"""Cards by name, with their makers' figures: for plans of machines that are not at hand."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.errors import BadConfig
from rekindle.placement.types import Rates

GIB = 1 << 30
GB = 1e9
PCIE = {(3, 16): 15.75, (4, 8): 15.75, (4, 16): 31.5, (5, 16): 63.0}  # GB/s of a generation and a number of lanes


@dataclass(frozen=True, slots=True)
class GpuCard:
    name: str
    kind: str  # cuda or hip
    memory: int  # GiB
    speed: float  # of its memory, GB/s
    pcie: tuple[int, int]  # generation and lanes

    @property
    def bytes(self) -> int:
        return self.memory * GIB

    @property
    def rates(self) -> Rates:
        return Rates(self.speed * GB, PCIE[self.pcie] * GB)


CARDS = (
    GpuCard("RTX 3060", "cuda", 12, 360, (4, 16)),
    GpuCard("RTX 3080", "cuda", 10, 760, (4, 16)),
    GpuCard("RTX 3090", "cuda", 24, 936, (4, 16)),
    GpuCard("RTX 3090 Ti", "cuda", 24, 1008, (4, 16)),
    GpuCard("RTX 4060 Ti 16GB", "cuda", 16, 288, (4, 8)),
    GpuCard("RTX 4070 Ti SUPER", "cuda", 16, 672, (4, 16)),
    GpuCard("RTX 4080", "cuda", 16, 717, (4, 16)),
    GpuCard("RTX 4090", "cuda", 24, 1008, (4, 16)),
    GpuCard("RTX 5070 Ti", "cuda", 16, 896, (5, 16)),
    GpuCard("RTX 5080", "cuda", 16, 960, (5, 16)),
    GpuCard("RTX 5090", "cuda", 32, 1792, (5, 16)),
    GpuCard("RTX A6000", "cuda", 48, 768, (4, 16)),
    GpuCard("RTX 6000 Ada", "cuda", 48, 960, (4, 16)),
    GpuCard("RTX PRO 6000", "cuda", 96, 1792, (5, 16)),
    GpuCard("L40S", "cuda", 48, 864, (4, 16)),
    GpuCard("A100 80GB", "cuda", 80, 1935, (4, 16)),
    GpuCard("H100", "cuda", 80, 3350, (5, 16)),
    GpuCard("H200", "cuda", 141, 4800, (5, 16)),
    GpuCard("RX 7900 XTX", "hip", 24, 960, (4, 16)),
)


def card_named(name: str) -> GpuCard:
    """Capitals and spaces do not matter, nor a maker's name before it."""
    wanted = _plain(name)
    for card in CARDS:
        if _plain(card.name) == wanted:
            return card
    raise BadConfig(f"--card: {name!r} is not known; known are {', '.join(card.name for card in CARDS)}")


def _plain(name: str) -> str:
    text = "".join(name.lower().split())
    for maker in ("nvidia", "geforce", "amd", "radeon"):
        text = text.removeprefix(maker)
    return text

"""Chosen experts whose weights are not on the device: what the launches must know of them. `bring` does it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

OUTPUTS = 16  # rows of gate and up that a program multiplies, and brings


@dataclass(frozen=True, slots=True)
class Parts:
    """Experts cut up so that every program of gate and up has the rows it multiplies, and as much of down."""

    pieces: Tensor  # int64 [parts, pieces of a part, 3]: address there, address here, bytes of one expert in this plane
    words: int  # 32-bit words of a piece


@dataclass(frozen=True, slots=True)
class Missing:
    """Of one row's experts."""

    sources: Tensor  # int32 [1, used]: the place in host memory to bring the expert from, -1 if it is here
    parts: Parts

    @property
    def arguments(self) -> tuple[Tensor | int, ...]:
        return self.sources, self.parts.pieces, self.parts.pieces.shape[1]

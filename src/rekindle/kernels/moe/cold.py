"""Chosen experts whose weights are not on the device: what the launches must know of them. `bring` does it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

OUTPUTS = 16  # rows of gate and up that a program multiplies, and brings
PATIENCE = 20_000_000  # looks at host memory, of about a microsecond each


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Experts cut up so that every program of gate and up has the rows it multiplies, and as much of down."""

    pieces: Tensor  # int64 [parts, pieces of a part, 3]: address there, address here, bytes of one expert in this plane
    words: int  # 32-bit words of a piece


@dataclass(frozen=True, slots=True)
class ColdAnswer:
    """What the host gives for the experts that it computes itself. Numbers are addresses in its memory, which mean the
    same on the device."""

    count: Tensor  # pairs that it was asked for, which may be none
    number: Tensor  # of the last request
    gone: Tensor  # 1 after it did not answer once: it is not waited for again
    here: Tensor  # float32 [hidden]: its answer, brought to the device
    done: int  # the last request that it has answered
    lost: int  # the device sets it to 1 when it stops waiting
    out: int  # float32 [hidden]

    @property
    def waiting(self) -> tuple[Tensor | int, ...]:
        """Arguments of the kernel that waits for it."""
        return self.number, self.gone, self.done, self.lost, self.out, PATIENCE


@dataclass(frozen=True, slots=True)
class Missing:
    """Of one row's experts."""

    sources: Tensor  # int32 [1, used]: the place in host memory to bring the expert from, -1 if it is not brought
    parts: CopyPlan
    answer: ColdAnswer | None = None  # None: the host computes none of them

    @property
    def arguments(self) -> tuple[Tensor | int, ...]:
        return self.sources, self.parts.pieces, self.parts.pieces.shape[1]

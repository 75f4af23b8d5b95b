"""Experts on a device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rekindle.kernels.matmul.types import Lanes, Matrix, Packed


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Weights [experts, out, in]: dense, or packed or in lanes with the rows of all experts concatenated."""

    shape: tuple[int, int, int]
    dense: Tensor | None = None
    packed: Packed | None = None
    lanes: Lanes | None = None

    def __post_init__(self) -> None:
        forms = (self.dense, self.packed, self.lanes)
        assert sum(form is not None for form in forms) == 1, "a stack is dense, packed or in lanes"

    @property
    def experts(self) -> int:
        return self.shape[0]

    @property
    def rows(self) -> int:
        """Outputs of one expert."""
        return self.shape[1]

    @property
    def columns(self) -> int:
        return self.shape[2]

    @property
    def nbytes(self) -> int:
        stored = self.packed or self.lanes
        return self.values.nbytes if stored is None else stored.nbytes

    @property
    def values(self) -> Tensor:
        assert self.dense is not None, f"a {self.shape} stack that is kept as it is stored has no dense values"
        return self.dense

    @property
    def planes(self) -> Packed:
        assert self.packed is not None, f"a dense {self.shape} stack has no planes"
        return self.packed


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """The expert that every row takes, times sigmoid(⟨scale, h⟩)."""

    gate: Matrix
    up: Matrix
    down: Matrix
    scale: Tensor  # [hidden]

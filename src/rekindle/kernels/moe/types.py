"""Experts on a device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rekindle.kernels.matmul.types import Matrix, Packed


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Weights [experts, out, in]: dense, or packed with the rows of all experts behind one another."""

    shape: tuple[int, int, int]
    dense: Tensor | None = None
    packed: Packed | None = None

    def __post_init__(self) -> None:
        assert (self.dense is None) != (self.packed is None), "a stack is either dense or packed"

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
        return self.packed.nbytes if self.packed is not None else self.values.nbytes

    @property
    def values(self) -> Tensor:
        assert self.dense is not None, f"a packed {self.shape} stack has no dense values"
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

"""The dense feed-forward half of a layer; the routed one is in `experts/`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from rekindle.kernels.matmul import Matrix, multiply_in_parts, swiglu
from rekindle.layers.base import Tensors


@dataclass(frozen=True, slots=True)
class DenseFfn:
    """SwiGLU."""

    gate: Matrix
    up: Matrix
    down: Matrix
    prefetch: Matrix | None = None  # what is read after `down`

    @classmethod
    def load(cls, tensors: Tensors) -> DenseFfn:
        return cls(*(tensors.matrix(f"ffn_{name}.weight") for name in ("gate", "up", "down")))

    def linked(self, behind: Matrix | None) -> DenseFfn:
        return replace(self, prefetch=behind)

    def forward(self, h: Tensor) -> Tensor:
        return multiply_in_parts(swiglu(h, self.gate, self.up, prefetch=self.down), self.down, prefetch=self.prefetch)

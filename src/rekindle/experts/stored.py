"""The experts of one layer as the file stores them, in host memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rekindle.kernels.matmul import expanded
from rekindle.weights import WeightFile

PARTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
Three = tuple[Tensor, Tensor, Tensor]  # gate, up, down of one expert


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Gate, up or down of all experts."""

    raw: np.ndarray  # uint8 [experts · out, bytes of a row]
    type: str
    shape: tuple[int, int, int]  # experts, out, in

    def rows(self, start: int, stop: int) -> np.ndarray:
        """The stored rows of experts [start, stop)."""
        return self.raw[start * self.shape[1] : stop * self.shape[1]]

    @property
    def expert_bytes(self) -> int:
        return self.raw.nbytes // self.shape[0]


@dataclass(frozen=True, slots=True)
class StoredExperts:
    parts: tuple[StoredPart, StoredPart, StoredPart]

    @property
    def count(self) -> int:
        return self.parts[0].shape[0]

    @property
    def expert_bytes(self) -> int:
        return sum(part.expert_bytes for part in self.parts)

    def values(self, expert: int, device: torch.device, dtype: torch.dtype) -> Three:
        """One expert's weights, expanded."""
        gate, up, down = (
            expanded(part.rows(expert, expert + 1), part.type, part.shape[2], device, dtype) for part in self.parts
        )
        return gate, up, down


def stored_experts(file: WeightFile, name: str) -> StoredExperts:
    """Of the layer whose tensors begin with `name`."""

    def part(label: str) -> StoredPart:
        info = file.tensors[f"{name}.{label}.weight"]
        experts, rows, columns = info.shape
        return StoredPart(file.raw(info.name), info.type, (experts, rows, columns))

    gate, up, down = map(part, PARTS)
    return StoredExperts((gate, up, down))

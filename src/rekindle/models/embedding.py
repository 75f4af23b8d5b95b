"""Token ids to rows of the residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from rekindle.weights import WeightFile


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows are read from the mapped file and expanded one by one: a table of a quarter million rows costs no memory."""

    raw: np.ndarray  # uint8 [vocab, bytes of a row], mapped
    type: str
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, file: WeightFile, device: torch.device, dtype: torch.dtype) -> Embedding:
        return cls(file.raw("token_embd.weight"), file.tensors["token_embd.weight"].type, device, dtype)

    def rows(self, tokens: Sequence[int]) -> torch.Tensor:
        values = dequantize(self.raw[np.asarray(tokens)], GGMLQuantizationType[self.type])
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(self.device, self.dtype)

"""Token ids to rows of the residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from rekindle.kernels.matmul import Matrix, gather_rows, make_matrix
from rekindle.weights import WeightFile

NAME = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class HostEmbedding:
    """Rows are read from the mapped file and expanded one by one: a table of a quarter million rows costs no memory."""

    raw: np.ndarray  # uint8 [vocab, bytes of a row], mapped
    type: str
    device: torch.device
    dtype: torch.dtype

    def rows(self, tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        ids = tokens.cpu().numpy() if isinstance(tokens, torch.Tensor) else np.asarray(tokens)
        values = dequantize(self.raw[ids], GGMLQuantizationType[self.type])
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).to(self.device, self.dtype)


@dataclass(frozen=True, slots=True)
class DeviceEmbedding:
    """The table lies on the device, so that tokens drawn there need not see the host before they are embedded."""

    table: Matrix
    device: torch.device
    dtype: torch.dtype

    def rows(self, tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        ids = tokens if isinstance(tokens, torch.Tensor) else torch.tensor(tokens)
        return gather_rows(self.table, ids.to(self.device, non_blocking=True)).to(self.dtype)


Embedding = HostEmbedding | DeviceEmbedding


def load_embedding(file: WeightFile, device: torch.device, dtype: torch.dtype) -> Embedding:
    info = file.tensors[NAME]
    if device.type == "cpu":
        return HostEmbedding(file.raw(NAME), info.type, device, dtype)
    rows, columns = info.shape
    return DeviceEmbedding(make_matrix(file.raw(NAME), info.type, (rows, columns), device, dtype), device, dtype)

"""Token ids to rows of the residual stream."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from rekindle.kernels.matmul import Matrix, cpu, gather_rows, make_matrix
from rekindle.weights import WeightFile

NAME = "token_embd.weight"


@dataclass(frozen=True, slots=True)
class HostEmbedding:
    """Rows are kept as the file stores them and expanded one by one: a quarter million of them in float32 is much."""

    raw: np.ndarray  # uint8 [vocab, bytes of a row]
    type: str
    columns: int
    device: torch.device
    dtype: torch.dtype

    def rows(self, tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        ids = tokens if isinstance(tokens, torch.Tensor) else torch.tensor(tokens)
        if self.type in cpu.TYPES and cpu.can_multiply():
            return cpu.stored_rows(self.raw, self.type, self.columns, ids.cpu()).to(self.device, self.dtype)
        values = dequantize(self.raw[ids.cpu().numpy()], GGMLQuantizationType[self.type])
        # A copy by torch: a step whose rows come from numpy must not be recorded, and recording sees torch only.
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).clone().to(self.device, self.dtype)


@dataclass(frozen=True, slots=True)
class DeviceEmbedding:
    """The table lies on the device, so that tokens drawn there need not see the host before they are embedded. On
    a CPU it is a matrix that products read too."""

    table: Matrix
    device: torch.device
    dtype: torch.dtype

    def rows(self, tokens: Sequence[int] | torch.Tensor) -> torch.Tensor:
        ids = tokens if isinstance(tokens, torch.Tensor) else torch.tensor(tokens)
        # A drafter on another device asks too.
        with torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext():
            ids = ids.to(self.device, non_blocking=self.device.type == "cuda")
            return gather_rows(self.table, ids).to(self.dtype)


Embedding = HostEmbedding | DeviceEmbedding


def load_embedding(file: WeightFile, device: torch.device, dtype: torch.dtype, head: Matrix | None = None) -> Embedding:
    """head: the output matrix, where it is on the device already. If it is the embedding too and its lanes can be read
    row by row, nothing else is loaded."""
    if file.spec.tied and head is not None and head.lanes is not None:
        return DeviceEmbedding(head, device, dtype)
    info = file.tensors[NAME]
    if device.type == "cpu":
        return HostEmbedding(file.raw(NAME), info.type, info.shape[1], device, dtype)
    rows, columns = info.shape
    return DeviceEmbedding(make_matrix(file.unread(NAME), info.type, (rows, columns), device, dtype), device, dtype)

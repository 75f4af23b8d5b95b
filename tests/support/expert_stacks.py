"""Stacks of quantised experts on the default device, and their values."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from torch import Tensor

from rekindle.kernels.matmul.packing import FORMATS, pack
from rekindle.kernels.matmul.types import Matrix
from rekindle.kernels.moe.types import ExpertStack


def _here(values: np.ndarray) -> Tensor:
    return torch.from_numpy(values).to(torch.get_default_device())


def random_rows(type: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Valid stored rows: any codes and integer scales, small float16 factors."""
    form = FORMATS[type]
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows * columns // form.weights, form.nbytes), dtype=np.uint8)
    for start in {"Q6_K": [208], "Q4_K": [0, 2], "Q5_K": [0, 2]}.get(type, [0]):
        raw[:, start : start + 2] = random.uniform(1e-4, 5e-4, len(raw)).astype(np.float16)[:, None].view(np.uint8)
    return raw.reshape(rows, -1)


def values_of(raw: np.ndarray, type: str, *shape: int) -> Tensor:
    return _here(gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type])).view(shape)


def stack(type: str, experts: int, rows: int, columns: int, seed: int) -> tuple[ExpertStack, Tensor]:
    raw = random_rows(type, experts * rows, columns, seed)
    packed = pack(_here(raw), type, columns)
    return ExpertStack((experts, rows, columns), packed=packed), values_of(raw, type, experts, rows, columns)


def matrix(type: str, rows: int, columns: int, seed: int) -> tuple[Matrix, Tensor]:
    raw = random_rows(type, rows, columns, seed)
    return Matrix((rows, columns), packed=pack(_here(raw), type, columns)), values_of(raw, type, rows, columns)

"""Matrices as files store them, and in lanes, for kernels of the CPU."""

from __future__ import annotations

from functools import cache

import gguf
import numpy as np
import torch
from torch import Tensor

from rekindle.kernels.matmul import make_matrix, naive
from rekindle.kernels.matmul.types import Matrix

HALVES = {"Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2)}  # where 16-bit floats lie


@cache
def stored(type: str, rows: int, columns: int, seed: int = 0) -> tuple[np.ndarray, Tensor]:
    """Random rows as a file has them, a few bytes apart and at an odd address; and their values."""
    random = np.random.default_rng(seed)
    if type in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[type]
        values = torch.from_numpy(random.standard_normal((rows, columns))).to(dtype)
        return values.view(torch.uint8).numpy(), values.float()
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    raw = random.integers(0, 256, (rows * columns // block, size), dtype=np.uint8)
    for at in HALVES.get(type, (0,)):
        numbers = random.uniform(0.005, 0.02, len(raw)).astype(np.float16)
        raw[:, at : at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    raw = raw.reshape(rows, -1)
    memory = np.zeros((rows, raw.shape[1] + 5), np.uint8)
    memory[:, 3 : 3 + raw.shape[1]] = raw
    return memory[:, 3 : 3 + raw.shape[1]], naive.stored_values(raw, type, columns)


def laid(type: str, rows: int, columns: int, seed: int = 0) -> tuple[Matrix, Tensor]:
    raw, values = stored(type, rows, columns, seed)
    return make_matrix(raw, type, (rows, columns), torch.device("cpu"), torch.float32), values

"""Quantised matrices and rows to multiply them with, on the default device."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from torch import Tensor

from rekindle.kernels.matmul.packing import FORMATS, pack
from rekindle.kernels.matmul.types import Packed


def random_rows(type: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Valid stored rows: any bits for codes and integer scales, small positive and negative float16 where floats go."""
    form = FORMATS[type]
    random = np.random.default_rng(seed)
    blocks = rows * columns // form.weights
    raw = random.integers(0, 256, (blocks, form.nbytes), dtype=np.uint8)
    at = {"Q6_K": [208], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q4_1": [0, 2], "Q5_1": [0, 2]}.get(type, [0])
    for start in at:
        size = random.uniform(0.002, 0.01, blocks) * random.choice([-1, 1], blocks)
        raw[:, start : start + 2] = size.astype(np.float16)[:, None].view(np.uint8)
    return raw.reshape(rows, -1)


def made(type: str, rows: int, columns: int, seed: int = 0) -> tuple[Packed, Tensor]:
    """A packed matrix and its values."""
    raw = random_rows(type, rows, columns, seed)
    values = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type])
    here = torch.get_default_device()
    return pack(torch.from_numpy(raw).to(here), type, columns), torch.from_numpy(values).to(here)


def error(out: Tensor, expected: Tensor) -> float:
    assert out.isfinite().all(), "an element was not written"
    return float((out.double() - expected.double()).norm() / expected.double().norm())


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """The same numbers on every device."""
    numbers = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(sum(shape) + seed), device="cpu")
    return numbers.to(torch.get_default_device(), dtype)

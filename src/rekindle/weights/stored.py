"""A tensor as it lies in a file, and the way from its bytes to numbers."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from rekindle.errors import BadModelFile
from rekindle.weights.types import TensorInfo


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a mapped file."""

    info: TensorInfo
    data: np.ndarray  # uint8 [rows, bytes of a row], a view of the map


def row_bytes(columns: int, type: str) -> int | None:
    """Bytes of one row, or None where the row is no whole number of quantisation blocks."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    return columns // block * size if columns % block == 0 else None


def decode(data: np.ndarray, info: TensorInfo) -> np.ndarray:
    """float32 values in the tensor's shape; always an array of its own, never a view of the map."""
    rows = np.ascontiguousarray(data)
    return np.array(dequantize(rows, GGMLQuantizationType[info.type]), dtype=np.float32).reshape(info.shape)


@functools.cache
def is_decodable(type: str) -> bool:
    """Whether the gguf package can turn this type into numbers; asked of one zero block."""
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    try:
        dequantize(np.zeros((1, size), np.uint8), GGMLQuantizationType[type])
    except NotImplementedError:
        return False
    return True


def store(name: str, shape: tuple[int, ...], type: str, flat: np.ndarray) -> Stored:
    """`flat` holds the tensor's bytes and nothing else."""
    rows = math.prod(shape[:-1])
    return Stored(TensorInfo(name, shape, type, flat.nbytes), flat.reshape(rows, -1))


def require_decodable(file: str, info: TensorInfo) -> None:
    if not is_decodable(info.type):
        raise BadModelFile(f"{file}: tensor {info.name} has type {info.type}, which cannot be decoded")

"""A tensor as it lies in a file, and the way from its bytes to numbers."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from rekindle.errors import BadModelFile
from rekindle.weights.source import SourceFile
from rekindle.weights.types import TensorInfo


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of an open file."""

    info: TensorInfo
    file: SourceFile
    start: int  # byte of the file

    def rows(self) -> np.ndarray:
        """uint8 [rows, bytes of a row], read now."""
        return self.bytes(0, self.info.nbytes).reshape(math.prod(self.info.shape[:-1]), -1)

    def bytes(self, start: int, stop: int) -> np.ndarray:
        return self.file.read(self.start + start, self.start + stop)


@dataclass(frozen=True, slots=True)
class UnreadRows:
    """The rows of a stored tensor, uint8 [rows, bytes of a row], before they are read: who wants them in memory of its
    own reads them straight there."""

    stored: Stored
    shape: tuple[int, int]

    @classmethod
    def of(cls, stored: Stored, shape: tuple[int, ...]) -> UnreadRows:
        """shape: of the tensor; its elements lie in the file in this order."""
        rows = math.prod(shape[:-1])
        return cls(stored, (rows, stored.info.nbytes // rows))

    def read(self) -> np.ndarray:
        return self.stored.rows().reshape(self.shape)

    def read_into(self, target: np.ndarray, start: int) -> None:
        """Fills the flat target with the bytes from `start` on, on the caller's thread."""
        self.stored.file.read_into(target, self.stored.start + start)


def row_bytes(columns: int, type: str) -> int | None:
    """Bytes of one row, or None where the row is no whole number of quantisation blocks."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    return columns // block * size if columns % block == 0 else None


def decode(data: np.ndarray, info: TensorInfo) -> np.ndarray:
    """float32 values in the tensor's shape, in an array of their own."""
    rows = np.ascontiguousarray(data)
    with np.errstate(all="ignore"):  # a damaged scale gives no number, which the logits will show
        return np.array(dequantize(rows, GGMLQuantizationType[info.type]), dtype=np.float32).reshape(info.shape)


@functools.cache
def is_decodable(type: str) -> bool:
    """Whether the gguf package can turn this type into numbers; asked of one zero block."""
    if type not in GGMLQuantizationType.__members__:
        return False
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[type]]
    try:
        dequantize(np.zeros((1, size), np.uint8), GGMLQuantizationType[type])
    except NotImplementedError:
        return False
    return True


def require_decodable(file: str, info: TensorInfo) -> None:
    if not is_decodable(info.type):
        raise BadModelFile(f"{file}: tensor {info.name} has type {info.type}, which cannot be decoded")

"""What a weight file answers, whatever its format. Tensor names are the GGUF names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rekindle.spec import ModelSpec
from rekindle.weights.source import SourceFiles

if TYPE_CHECKING:
    from rekindle.weights.stored import UnreadRows  # it needs TensorInfo


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor. Shapes are row-major: a matrix is [out, in], a stack of experts [experts, out, in]."""

    name: str
    shape: tuple[int, ...]
    type: str  # F32, F16, BF16, Q4_K, … as the gguf package names them
    nbytes: int


class WeightFile(Protocol):
    """A model on disk, held open; reading one tensor touches the bytes of no other."""

    @property
    def path(self) -> Path: ...
    @property
    def spec(self) -> ModelSpec: ...
    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...
    @property
    def files(self) -> SourceFiles: ...
    @property
    def metadata(self) -> Mapping[str, Any]: ...
    def raw(self, name: str) -> np.ndarray:
        """The stored bytes, uint8 [rows, bytes of a row] (all leading dimensions are rows); the caller's own."""
        ...

    def unread(self, name: str) -> np.ndarray | UnreadRows:
        """The same, not read yet where they lie in the file as they are."""
        ...

    def values(self, name: str) -> np.ndarray:
        """The tensor as float32 in its own shape."""
        ...

    def fingerprint(self) -> str:
        """Identity of the weights from their content, computed once; the same for a copy under another path."""
        ...

    def close(self) -> None: ...

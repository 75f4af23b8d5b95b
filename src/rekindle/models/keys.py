"""What a model file says about itself: GGUF metadata, read with types and checks, and what its tensor table shows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.errors import BadModelFile


@dataclass(frozen=True, slots=True)
class KeysSeen:
    """What the tensor table says that the metadata does not."""

    tensors: int
    vocab: int  # rows of the embedding
    tokens: int  # those that the tokenizer has a token for; it may know fewer
    tied: bool
    rope_factors: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class MetadataKeys:
    """Typed reading of `<architecture>.<key>`; a missing or senseless value is one clear error."""

    path: Path
    metadata: Mapping[str, Any]
    architecture: str

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number; a default may also be 0, and then 0 may be written too."""
        value = self._present(key, default)
        least = 0 if default == 0 else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.bad(f"{key} is {value!r}, not a whole number of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._present(key, default)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.bad(f"{key} is {value!r}, not a number above 0")
        return float(value)

    def require(self, holds: bool, sentence: str) -> None:
        if not holds:
            raise self.bad(sentence)

    def bad(self, sentence: str) -> BadModelFile:
        return BadModelFile(f"{self.path} ({self.architecture}): {sentence}")

    def _present(self, key: str, default: float | None) -> Any:
        value = self.get(key)
        if value is None and default is None:
            raise self.bad(f"{key} is missing from the metadata")
        return default if value is None else value

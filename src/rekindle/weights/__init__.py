"""Weight files: find, read, dequantise."""

from __future__ import annotations

from pathlib import Path

from rekindle.errors import BadModelFile
from rekindle.weights.gguf_file import GgufFile
from rekindle.weights.hf_folder import HfFolder
from rekindle.weights.types import TensorInfo, WeightFile

__all__ = ["TensorInfo", "WeightFile", "open_weights"]


def open_weights(path: str | Path) -> WeightFile:
    """A GGUF file (of a split one, its first part) or a Hugging Face folder, checked against its own spec."""
    path = Path(path)
    if path.is_dir():
        return HfFolder(path)
    if not path.exists():
        raise BadModelFile(f"{path} does not exist")
    return GgufFile(path)

"""Safetensors files: where each tensor lies.

safetensors' numpy interface has no bfloat16, and its torch interface would pull torch into this package. The format is
small: eight bytes of length, a JSON table, the bytes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from rekindle.errors import BadModelFile
from rekindle.weights.source import SourceFile
from rekindle.weights.stored import Stored, row_bytes
from rekindle.weights.types import TensorInfo

INDEX = "model.safetensors.index.json"
TYPES = ("F32", "F16", "BF16")  # named alike in both formats


def read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise BadModelFile(f"{path} cannot be opened: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadModelFile(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadModelFile(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value


def read_folder(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder's files, by its own name."""
    if not (folder / INDEX).exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise BadModelFile(f"{folder} has no .safetensors file and no {INDEX}")
        return _merge(files)
    places = read_json(folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise BadModelFile(f"{folder / INDEX} has no weight_map from tensor names to file names")
    for place in places.values():
        if Path(place).name != place:
            raise BadModelFile(f"{folder / INDEX} names the file {place!r}, which is not in the folder itself")
    tensors = _merge([folder / place for place in sorted(set(places.values()))])
    for name, place in places.items():
        if name not in tensors:
            raise BadModelFile(f"{folder / place} has no tensor {name}, which {INDEX} places there")
    return tensors


def _merge(files: list[Path]) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for file in files:
        found = _read_file(file)
        if twice := tensors.keys() & found.keys():
            raise BadModelFile(f"{file} has the tensor {min(twice)}, which another file of the folder has too")
        tensors |= found
    return tensors


def _read_file(path: Path) -> dict[str, Stored]:
    file = SourceFile(path)
    if file.size < 8:
        raise BadModelFile(f"{path} is truncated: it has {file.size} bytes")
    start = 8 + int.from_bytes(file.read(0, 8).tobytes(), "little")
    if start > file.size:
        raise BadModelFile(f"{path} is truncated: its table ends at byte {start}, the file at byte {file.size}")
    try:
        table = json.loads(file.read(8, start).tobytes())
        table.pop("__metadata__", None)
        return {name: _place(file, start, name, entry) for name, entry in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise BadModelFile(f"{path} has a table that is not a safetensors table: {error!r}") from error


def _place(file: SourceFile, start: int, name: str, entry: dict[str, Any]) -> Stored:
    type, shape, (begin, end) = str(entry["dtype"]), tuple(map(int, entry["shape"])), map(int, entry["data_offsets"])
    shape = shape or (1,)
    if min(shape) < 1 or not 0 <= begin <= end:
        raise BadModelFile(f"{file.path}: tensor {name} {type} {shape} lies at bytes {begin}..{end} of the data")
    if type in TYPES and end - begin != (expected := math.prod(shape[:-1]) * (row_bytes(shape[-1], type) or 0)):
        raise BadModelFile(
            f"{file.path}: tensor {name} {type} {shape} needs {expected} bytes, the table gives {begin}..{end}"
        )
    if start + end > file.size:
        raise BadModelFile(
            f"{file.path} is truncated: tensor {name} ends at byte {end} of the data, "
            f"the data at byte {file.size - start}"
        )
    return Stored(TensorInfo(name, shape, type, end - begin), file, start + begin)

"""The header of a GGUF file: key-value metadata and the table of tensors.

Written here, and not taken from the gguf package, for one reason: its reader makes several numpy objects per string,
so a vocabulary of 248,000 tokens with its merges takes many seconds; one tight loop over the map takes a fraction of
one. Everything about tensor types still comes from that package.

Every count in the file is compared with the bytes that are left before anything of that size is made, so a damaged
header gives a sentence and never a huge allocation.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGMLQuantizationType

from rekindle.errors import BadModelFile
from rekindle.weights.stored import Stored, row_bytes, store

MAGIC = b"GGUF"
VERSION = 3
READABLE_VERSIONS = (2, 3)  # version 1 counted in 32 bits and has not been written since 2023
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4

# value type → struct format of one value, little endian
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufPart:
    """One file: what it says, and its tensors as views of its map."""

    metadata: dict[str, Any]
    tensors: dict[str, Stored]


def read_part(path: Path) -> GgufPart:
    buffer = _map(path)
    cursor = _Cursor(path, buffer)
    if cursor.take(4, "magic") != MAGIC:
        raise BadModelFile(f"{path} is not a GGUF file: it begins with {buffer[:4]!r}, not with {MAGIC!r}")
    version = cursor.scalar("I", "version")
    if version not in READABLE_VERSIONS:
        raise BadModelFile(
            f"{path} is GGUF version {version}; versions {READABLE_VERSIONS}, little endian, can be read"
        )
    tensor_count = cursor.scalar("Q", "tensor count")
    value_count = cursor.scalar("Q", "metadata count")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.string("a metadata key")
        metadata[key] = cursor.value(cursor.scalar("I", key), key)
    cursor.need(24 * tensor_count, f"a table of {tensor_count} tensors")
    entries = [cursor.tensor_entry() for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise BadModelFile(f"{path}: general.alignment is {alignment!r}, not a positive number of bytes")
    start = -(-cursor.at // alignment) * alignment
    return GgufPart(metadata, _place(path, np.frombuffer(buffer, np.uint8), entries, start))


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 4:
                raise BadModelFile(f"{path} is not a GGUF file: it has {path.stat().st_size} bytes")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise BadModelFile(f"{path} cannot be opened: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    shape: tuple[int, ...]  # row-major
    type: str
    offset: int  # from the start of the data


def _place(path: Path, data: np.ndarray, entries: list[_Entry], start: int) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for entry in entries:
        if entry.name in tensors:
            raise BadModelFile(f"{path}: tensor {entry.name} is listed twice")
        width = row_bytes(entry.shape[-1], entry.type)
        if width is None:
            raise BadModelFile(
                f"{path}: tensor {entry.name} has {entry.shape[-1]} values in a row, not whole blocks of {entry.type}"
            )
        begin = start + entry.offset
        end = begin + math.prod(entry.shape[:-1]) * width
        if end > data.size:
            raise BadModelFile(
                f"{path} is truncated: tensor {entry.name} ends at byte {end}, the file at byte {data.size}"
            )
        tensors[entry.name] = store(entry.name, entry.shape, entry.type, data[begin:end])
    return tensors


class _Cursor:
    """Reads forward through the map; whatever lies beyond the end is one clear error."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.at = 0

    def need(self, count: int, what: str) -> None:
        if self.at + count > self.size:
            raise BadModelFile(
                f"{self.path} is truncated: {what} needs {count} bytes at byte {self.at}, the file has {self.size}"
            )

    def take(self, count: int, what: str) -> bytes:
        self.need(count, what)
        self.at += count
        return self.buffer[self.at - count : self.at]

    def scalar(self, format: str, what: str) -> Any:
        return struct.unpack("<" + format, self.take(struct.calcsize("<" + format), what))[0]

    def string(self, what: str) -> str:
        return self._text(self.take(self.scalar("Q", what), what), what)

    def value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self.string(key)
        if kind == ARRAY:
            return self._array(self.scalar("I", key), self.scalar("Q", key), key)
        return self.scalar(self._format(kind, key), key)

    def _array(self, kind: int, count: int, key: str) -> list[Any]:
        if kind == STRING:
            return self._strings(count, key)
        dtype = np.dtype("<" + self._format(kind, key))
        return np.frombuffer(self.take(count * dtype.itemsize, key), dtype).tolist()

    def _strings(self, count: int, key: str) -> list[str]:
        self.need(8 * count, key)
        buffer, size, at = self.buffer, self.size, self.at
        unpack = _LENGTH.unpack_from
        found: list[str] = []
        for _ in range(count):
            if at + 8 > size:
                raise BadModelFile(f"{self.path} is truncated: {key} ends after {len(found)} of {count} strings")
            stop = at + 8 + unpack(buffer, at)[0]
            if stop > size:
                raise BadModelFile(
                    f"{self.path} is truncated: string {len(found)} of {key} ends at {stop}, the file at byte {size}"
                )
            found.append(self._text(buffer[at + 8 : stop], key))
            at = stop
        self.at = at
        return found

    def tensor_entry(self) -> _Entry:
        name = self.string("a tensor name")
        dimensions = self.scalar("I", name)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise BadModelFile(f"{self.path}: tensor {name} has {dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
        sizes = [self.scalar("Q", name) for _ in range(dimensions)]
        if 0 in sizes:
            raise BadModelFile(f"{self.path}: tensor {name} has a dimension of size 0: {sizes}")
        number = self.scalar("I", name)
        try:
            type = GGMLQuantizationType(number).name
        except ValueError as error:
            raise BadModelFile(f"{self.path}: tensor {name} has the unknown type number {number}") from error
        return _Entry(name, tuple(reversed(sizes)), type, self.scalar("Q", name))

    def _format(self, kind: int, key: str) -> str:
        # arrays of arrays fall in here too: allowed on paper, written by nobody, and a way to nest without end
        if kind not in SCALARS:
            raise BadModelFile(f"{self.path}: {key} has the value type {kind}, which is unknown at this place")
        return SCALARS[kind]

    def _text(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise BadModelFile(f"{self.path}: {what} holds text that is not UTF-8") from error

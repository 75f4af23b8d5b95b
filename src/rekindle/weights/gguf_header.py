"""The header of a GGUF file: key-value metadata and the table of tensors.

Written here, and not taken from the gguf package, for one reason: its reader makes several numpy objects per string,
so a vocabulary of 248,000 tokens with its merges takes many seconds; one tight loop over the bytes takes a fraction of
one. Everything about tensor types still comes from that package.

Every count in the file is compared with the bytes that are left before anything of that size is made, so a damaged
header gives a sentence and never a huge allocation.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
from gguf.constants import GGMLQuantizationType

from rekindle.errors import BadModelFile
from rekindle.weights.source import SourceFile
from rekindle.weights.stored import Stored, row_bytes
from rekindle.weights.types import TensorInfo

MAGIC = b"GGUF"
VERSION = 3
READABLE_VERSIONS = (2, 3)  # version 1 counted in 32 bits and has not been written since 2023
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
WINDOW = 1 << 20  # bytes that are read at first; then twice as many each time

# value type → struct format of one value, little endian
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufPart:
    """One file: what it says, and where its tensors lie."""

    file: SourceFile
    metadata: dict[str, Any]
    tensors: dict[str, Stored]


def read_part(path: Path) -> GgufPart:
    file = SourceFile(path)
    cursor = _Cursor(file)
    if file.size < len(MAGIC):
        raise BadModelFile(f"{path} is not a GGUF file: it has {file.size} bytes")
    if (magic := cursor.take(4, "magic")) != MAGIC:
        raise BadModelFile(f"{path} is not a GGUF file: it begins with {magic!r}, not with {MAGIC!r}")
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
    cursor.require(24 * tensor_count, f"a table of {tensor_count} tensors")
    entries = [cursor.tensor_entry() for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise BadModelFile(f"{path}: general.alignment is {alignment!r}, not a positive number of bytes")
    start = -(-cursor.at // alignment) * alignment
    return GgufPart(file, metadata, _place(file, entries, start))


class Strings(Sequence[str]):
    """An array of strings, taken apart when one of them is first asked for. A vocabulary with its merges has half a
    million, which takes longer than all the rest of a header, and weights can be loaded before they are known."""

    def __init__(self, raw: bytes, count: int, where: str) -> None:
        """raw: whole strings, each behind its length."""
        self._raw, self._count, self._where = raw, count, where

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        return self._texts[index]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    @cached_property
    def _texts(self) -> list[str]:
        raw, at, unpack = self._raw, 0, _LENGTH.unpack_from
        found: list[str] = []
        try:
            for _ in range(self._count):
                start = at + 8
                at = start + unpack(raw, at)[0]
                found.append(raw[start:at].decode())
        except UnicodeDecodeError as error:
            raise BadModelFile(f"{self._where} holds text that is not UTF-8") from error
        return found


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    shape: tuple[int, ...]  # row-major
    type: str
    offset: int  # from the start of the data


def _place(file: SourceFile, entries: list[_Entry], start: int) -> dict[str, Stored]:
    tensors: dict[str, Stored] = {}
    for entry in entries:
        if entry.name in tensors:
            raise BadModelFile(f"{file.path}: tensor {entry.name} is listed twice")
        begin, nbytes = start + entry.offset, _nbytes(file.path, entry)
        if begin + nbytes > file.size:
            raise BadModelFile(
                f"{file.path} is truncated: tensor {entry.name} ends at byte {begin + nbytes}, "
                f"the file at byte {file.size}"
            )
        tensors[entry.name] = Stored(TensorInfo(entry.name, entry.shape, entry.type, nbytes), file, begin)
    return tensors


def _nbytes(path: Path, entry: _Entry) -> int:
    """0 of an unknown type: the model may not need the tensor."""
    if entry.type not in GGMLQuantizationType.__members__:
        return 0
    width = row_bytes(entry.shape[-1], entry.type)
    if width is None:
        raise BadModelFile(
            f"{path}: tensor {entry.name} has {entry.shape[-1]} values in a row, not whole blocks of {entry.type}"
        )
    return math.prod(entry.shape[:-1]) * width


class _Cursor:
    """Reads forward through the file; whatever lies beyond the end is one clear error."""

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        self.path = file.path
        self.size = file.size
        self.at = 0
        self.buffer = b""  # the first bytes of the file, as far as they were asked for

    def require(self, count: int, what: str) -> None:
        """That the file still has that many bytes; reads none of them."""
        if self.at + count > self.size:
            raise BadModelFile(
                f"{self.path} is truncated: {what} needs {count} bytes at byte {self.at}, the file has {self.size}"
            )

    def take(self, count: int, what: str) -> bytes:
        self.require(count, what)
        self.at += count
        self.reach(self.at)
        return self.buffer[self.at - count : self.at]

    def reach(self, stop: int) -> bytes:
        """The bytes before `stop`, which is inside the file, and more of them."""
        have = len(self.buffer)
        if stop > have:
            self.buffer += self.file.read(have, min(self.size, max(stop, 2 * have, WINDOW))).tobytes()
        return self.buffer

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

    def _array(self, kind: int, count: int, key: str) -> Sequence[Any]:
        if kind == STRING:
            return self._strings(count, key)
        dtype = np.dtype("<" + self._format(kind, key))
        return np.frombuffer(self.take(count * dtype.itemsize, key), dtype).tolist()

    def _strings(self, count: int, key: str) -> Strings:
        """Goes from length to length, to where the last string ends."""
        self.require(8 * count, key)
        buffer, size, at = self.buffer, self.size, self.at
        have = len(buffer)
        unpack = _LENGTH.unpack_from
        for index in range(count):
            if at + 8 > have:
                if at + 8 > size:
                    raise BadModelFile(f"{self.path} is truncated: {key} ends after {index} of {count} strings")
                buffer = self.reach(at + 8)
                have = len(buffer)
            at += 8 + unpack(buffer, at)[0]
            if at > size:
                raise BadModelFile(
                    f"{self.path} is truncated: string {index} of {key} ends at {at}, the file at byte {size}"
                )
        start, self.at = self.at, at
        return Strings(self.reach(at)[start:at], count, f"{self.path}: {key}")

    def tensor_entry(self) -> _Entry:
        name = self.string("a tensor name")
        dimensions = self.scalar("I", name)
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise BadModelFile(f"{self.path}: tensor {name} has {dimensions} dimensions, not 1 to {MAX_DIMENSIONS}")
        sizes = [self.scalar("Q", name) for _ in range(dimensions)]
        if 0 in sizes:
            raise BadModelFile(f"{self.path}: tensor {name} has a dimension of size 0: {sizes}")
        type = _type_name(self.scalar("I", name))
        return _Entry(name, tuple(reversed(sizes)), type, self.scalar("Q", name))

    def _format(self, kind: int, key: str) -> str:
        # arrays of arrays fall in here too: the format allows them, no converter writes them, and they nest without end
        if kind not in SCALARS:
            raise BadModelFile(f"{self.path}: {key} has the value type {kind}, which is unknown at this place")
        return SCALARS[kind]

    def _text(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise BadModelFile(f"{self.path}: {what} holds text that is not UTF-8") from error


def _type_name(number: int) -> str:
    try:
        return GGMLQuantizationType(number).name
    except ValueError:
        return f"number {number}"

"""Files read without the interpreter's lock: the fast form of `PlainFiles` in `snapshots/files.py`."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from rekindle.kernels import native


class NativeFiles:
    def __init__(self, library: Any) -> None:
        self._library = library

    def sizes(self, paths: Sequence[str]) -> list[int]:
        sizes = np.empty(len(paths), dtype=np.int64)
        self._library.file_sizes(_addresses(paths), len(paths), sizes.ctypes.data)
        return sizes.tolist()

    def read(self, reads: Sequence[tuple[str, int, Sequence[np.ndarray]]]) -> list[int]:
        paths, starts, memories = zip(*reads, strict=True)
        numbers = np.array([starts, list(map(len, memories))], dtype=np.int64)
        # [memories, 2]: struct iovec is an address and a length
        places = np.array([(m.ctypes.data, m.nbytes) for each in memories for m in each], dtype=np.int64)
        results = np.empty(len(paths), dtype=np.int64)
        self._library.read_files(
            _addresses(paths),
            numbers[0].ctypes.data,
            numbers[1].ctypes.data,
            places.ctypes.data,
            len(paths),
            results.ctypes.data,
        )
        return results.tolist()


def _addresses(paths: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(paths))(*map(os.fsencode, paths))


def native_files() -> NativeFiles | None:
    """None where there is no library: Python then reads files one by one."""
    library = native.library()
    return None if library is None else NativeFiles(library)

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
        sizes = (ctypes.c_int64 * len(paths))()
        self._library.file_sizes(_paths(paths), len(paths), sizes)
        return list(sizes)

    def read(self, reads: Sequence[tuple[str, int, Sequence[np.ndarray]]]) -> list[int]:
        """Numbers go over as ctypes has them: to make arrays of numpy takes longer than to open a file."""
        results = (ctypes.c_int64 * len(reads))()
        self._library.read_files(
            _paths([path for path, _, _ in reads]),
            _numbers([start for _, start, _ in reads]),
            _numbers([len(memories) for _, _, memories in reads]),
            _numbers([n for _, _, memories in reads for m in memories for n in (m.ctypes.data, m.nbytes)]),
            len(reads),
            results,
        )
        return list(results)


def _paths(paths: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(paths))(*map(os.fsencode, paths))


def _numbers(numbers: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def native_files() -> NativeFiles | None:
    """None where there is no library: Python then reads files one by one."""
    library = native.library()
    return None if library is None else NativeFiles(library)

"""One file of a model, held open for as long as it may be read.

Bytes are read, never mapped. A mapped file that is cut short kills the process, and one that is rewritten in place
changes weights which are already in use. What was read is the reader's own, whatever becomes of the file.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rekindle.errors import BadModelFile

PIECE = 4 << 20  # bytes that one thread reads at a time
THREADS = 8  # more of them wait for the memory


class _Look(NamedTuple):
    """What tells one state of a file from another. Not its ctime: a hard link or a chmod changes nothing in it."""

    device: int
    inode: int
    size: int
    written: int  # nanoseconds

    @classmethod
    def of(cls, found: os.stat_result) -> _Look:
        return cls(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


class SourceFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # Opening a pipe without a writer would block without end.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            self._file = os.fdopen(descriptor, "rb", buffering=0)  # closed with the last who holds it
            found = os.fstat(self._file.fileno())
        except OSError as error:
            raise BadModelFile(f"{path} cannot be opened: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):
            raise BadModelFile(f"{path} is not a regular file")
        self._opened = _Look.of(found)

    @property
    def size(self) -> int:
        return self._opened.size

    def read(self, start: int, stop: int) -> np.ndarray:
        """Bytes [start, stop) of the file, in an array of their own."""
        target = np.empty(stop - start, np.uint8)
        pieces = range(0, target.size, PIECE)
        if len(pieces) > 1:
            list(_threads().map(lambda at: self.read_into(target[at : at + PIECE], start + at), pieces))
        else:
            self.read_into(target, start)
        return target

    def read_into(self, target: np.ndarray, start: int) -> None:
        """Fills the target, flat uint8, with the bytes from `start` on, on the caller's thread."""
        done = 0
        while done < target.size:
            try:
                count = os.preadv(self._file.fileno(), [target[done:].data], start + done)
            except OSError as error:
                raise BadModelFile(f"{self.path} cannot be read: {error.strerror}") from error
            if count == 0:
                raise BadModelFile(
                    f"{self.path} was cut short while it was read: it ends at byte {start + done}, it had {self.size}"
                )
            done += count

    def rewritten(self) -> str | None:
        """What happened to the very bytes that this file had when it was opened; None if nothing did."""
        try:
            now = _Look.of(os.fstat(self._file.fileno()))
        except OSError as error:  # of a server of files that is gone
            return f"{self.path} cannot be looked at: {error.strerror}"
        if now.size != self.size:
            return f"{self.path} had {self.size:,} bytes when it was opened and has {now.size:,} now"
        return None if now == self._opened else f"{self.path} was written to after it was opened"

    def changed(self) -> str | None:
        """Also whether its path leads elsewhere now: to another file, or to none. The bytes held open stay good."""
        if what := self.rewritten():
            return what
        try:
            now = _Look.of(os.stat(self.path))
        except OSError as error:
            return f"{self.path} is gone: {error.strerror}"
        return None if now == self._opened else f"{self.path} was replaced by another file"

    def close(self) -> None:
        self._file.close()


class SourceFiles:
    """The files of one model together."""

    def __init__(self, files: Sequence[SourceFile]) -> None:
        self._files = tuple(files)

    def check(self) -> None:
        """Raises if one was rewritten since it was opened: what was read may then be of two models."""
        if what := next(filter(None, (file.rewritten() for file in self._files)), None):
            raise BadModelFile(f"{what}; it must not change while it is loaded")

    def changed(self) -> str | None:
        """What has happened to one of them since it was opened, in words."""
        return next(filter(None, (file.changed() for file in self._files)), None)

    def close(self) -> None:
        for file in self._files:
            file.close()


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="weights")

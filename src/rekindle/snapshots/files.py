"""The few ways in which the disk tier touches files: whole or not at all, readable by their owner only."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from blake3 import blake3

from rekindle.errors import BadSnapshotFile

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
FileRead = tuple[str, int, Sequence[Bytes]]  # path, first byte, memories to fill

NO_PLAIN_FILE = -(1 << 20)  # a fault beside -errno, and no errno is as large: a link, folder, FIFO, socket or device
READ_PIECE = 2 << 20  # bytes; about what a core's own cache holds
SHOWN = 80  # characters of a foreign text that a message repeats


def raw(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor in host memory; no copy if it is contiguous."""
    view: Bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return view


def digest(pieces: Iterable[Bytes], threads: int = 1) -> str:
    """The name of an object: the first 16 bytes of the blake3 of its content, in hex.

    threads: 1 is the caller's alone; the disk writer's has a low priority, blake3's own would not.
    """
    hasher = blake3(max_threads=threads)
    for piece in pieces:
        hasher.update(piece.data)
    return hasher.hexdigest(length=16)


def shown(text: str) -> str:
    """A name or word out of a file, as a message may repeat it: nothing that a terminal obeys, and not too long."""
    return text if text.isprintable() and len(text) <= SHOWN else ascii(text[:SHOWN])


def make_folder(path: Path) -> None:
    """A folder for its owner only, and so are those above it that are missing; what already exists keeps its mode."""
    if not path.parent.exists():
        make_folder(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def make_own_folder(path: Path) -> int:
    """A folder that is ours alone: a link is refused, since files would be deleted where it points; one that others
    could enter is closed to them, where the file system knows modes. Returns the mode it was found with."""
    make_folder(path)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "a link stands where a folder is expected", str(path))
    mode = stat.S_IMODE(status.st_mode)
    if is_open_to_others(path):
        with contextlib.suppress(OSError):
            os.chmod(path, mode & 0o700)
    return mode


def is_open_to_others(path: Path) -> bool:
    return bool(os.lstat(path).st_mode & 0o077)


def entries_in(folder: Path) -> list[os.DirEntry[str]]:
    """Whatever lies in a folder; nothing in one that is missing, may not be read or is a link."""
    try:
        if folder.is_symlink():
            return []
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []


def open_plain(path: Path | str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the regular file at `path`: no link is followed and no FIFO is waited for."""
    descriptor = _open(path, flags)
    if descriptor < 0:
        raise unreadable(path, descriptor)
    return descriptor


def _open(path: Path | str, flags: int) -> int:
    """The same, or a fault."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return _fault(error)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return NO_PLAIN_FILE
    return descriptor


def _fault(error: OSError) -> int:
    return -(error.errno or errno.EIO)


def unreadable(path: Path | str, fault: int) -> BadSnapshotFile:
    """What there is to say of a file that gave a fault: -errno, or NO_PLAIN_FILE."""
    why = {NO_PLAIN_FILE: "it is no plain file", -errno.ELOOP: "it is a link"}.get(fault) or os.strerror(-fault)
    return BadSnapshotFile(f"{shown(os.path.basename(path))}: cannot be read: {why}")


def read_plain(path: Path, most: int) -> bytes:
    """All of a small file; one of more than `most` bytes is refused before it is read."""
    with os.fdopen(open_plain(path), "rb") as file:
        try:
            found = os.fstat(file.fileno()).st_size
            data = file.read(most) if found <= most else b""
        except OSError as error:
            raise BadSnapshotFile(f"{shown(path.name)}: cannot be read: {error.strerror}") from error
    if found > most:
        raise BadSnapshotFile(f"{shown(path.name)}: {found} bytes, at most {most} can be ours")
    return data


def write_whole(temporary: Path, target: Path, pieces: Iterable[Bytes]) -> int:
    """Write `pieces` so that `target` is there whole or not at all, whatever moment the process dies at.

    The rename itself is durable only after `sync_folder`, which the caller does once for many files.
    """
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    written = 0
    try:
        try:
            for piece in pieces:
                _write_all(descriptor, piece.data)
                written += piece.nbytes
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, target)
    except OSError:
        # The first error is the one to report; a leftover under a temporary name is collected at the next open.
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return written


def _write_all(descriptor: int, left: memoryview) -> None:
    while left:
        left = left[os.write(descriptor, left) :]


def sync_folder(path: Path) -> None:
    """Make renames inside a folder survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ReadFiles(Protocol):
    """Reads that fill memory of our own.

    Not a mapping of the file: one that is cut short under a mapping kills the process, and one that is altered after
    its digest was checked gives a wrong answer.
    """

    def sizes(self, paths: Sequence[str]) -> list[int]:
        """Bytes of each regular file; of anything else a fault. Nothing is opened."""

    def read(self, reads: Sequence[FileRead]) -> list[int]:
        """Fill the memories of each read, one after the other: -> bytes read, fewer where a file ends early; or a
        fault. As `open_plain` opens files."""


class PlainFiles:
    """The definition of `ReadFiles`."""

    def sizes(self, paths: Sequence[str]) -> list[int]:
        return list(map(self._size, paths))

    def _size(self, path: str) -> int:
        try:
            status = os.lstat(path)
        except OSError as error:
            return _fault(error)
        return status.st_size if stat.S_ISREG(status.st_mode) else NO_PLAIN_FILE

    def read(self, reads: Sequence[FileRead]) -> list[int]:
        return [self._read(*read) for read in reads]

    def _read(self, path: str, start: int, memories: Sequence[Bytes]) -> int:
        descriptor = _open(path, os.O_RDONLY)  # several times cheaper than an object for the file
        if descriptor < 0:
            return descriptor
        at = start
        try:
            for memory in memories:
                rest = memory.data
                while rest and (got := os.preadv(descriptor, [rest], at)):
                    rest, at = rest[got:], at + got
        except OSError as error:
            return _fault(error)
        finally:
            os.close(descriptor)
        return at - start


def read_whole(files: ReadFiles, reads: Sequence[FileRead], nbytes: int) -> None:
    """Fill all memories; refuses files that cannot be read or end early. nbytes: of each file, as the manifest says."""
    for (path, start, memories), got in zip(reads, files.read(reads), strict=True):
        if got < 0:
            raise unreadable(path, got)
        if got < sum(memory.nbytes for memory in memories):
            left = f"{nbytes - start - got} bytes" + (" or more" if start and not got else "")
            name = shown(os.path.basename(path))
            raise BadSnapshotFile(f"{name}: ends {left} before the {nbytes} that the manifest says")


def check_sizes(files: ReadFiles, sizes: Mapping[str, int]) -> None:
    """sizes: bytes that the manifest says, by path."""
    for (path, nbytes), found in zip(sizes.items(), files.sizes(list(sizes)), strict=True):
        if found < 0:
            raise unreadable(path, found)
        if found != nbytes:
            name = shown(os.path.basename(path))
            raise BadSnapshotFile(f"{name}: the manifest says {nbytes} bytes, the file has {found}")


def read_pieces(descriptor: int, start: int, nbytes: int) -> Iterable[Bytes]:
    """So many bytes of an open file, a few at a time, whatever it claims to hold."""
    while nbytes and (data := os.pread(descriptor, min(nbytes, READ_PIECE), start)):
        yield np.frombuffer(data, dtype=np.uint8)
        start, nbytes = start + len(data), nbytes - len(data)

"""The few ways in which the disk tier touches files: whole or not at all, readable by their owner only."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from rekindle.errors import BadSnapshotFile

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MANY_THREADS = 16 << 20  # bytes of a file from which reading it is worth several threads
READ_PIECE = 2 << 20  # bytes; about what a core's own cache holds: most page objects are read in one
SHOWN = 80  # characters of a foreign text that a message repeats


def raw(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor in host memory; no copy if it is contiguous."""
    view: Bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return view


def digest(pieces: Iterable[Bytes]) -> str:
    """The name of an object: the first 16 bytes of the blake3 of its content, in hex.

    On the caller's thread alone: the disk writer's thread has a low priority, blake3's own threads would not.
    """
    hasher = blake3(max_threads=1)
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
    name = shown(os.path.basename(path))
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror
        raise BadSnapshotFile(f"{name}: cannot be read: {why}") from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise BadSnapshotFile(f"{name}: cannot be read: it is no plain file")
    return descriptor


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


def read_into(memories: Sequence[Bytes], path: str) -> str:
    """Fill memory of our own, one after the other, with the file's bytes; returns their digest.

    Not a mapping of the file: one that is cut short under a mapping kills the process, and one that is altered after
    its digest was checked gives a wrong answer. Each piece is hashed while the processor's caches still hold it.
    """
    left = sum(memory.nbytes for memory in memories)
    many, wanted = left >= MANY_THREADS, left
    hasher = blake3(max_threads=blake3.AUTO if many else 1)
    piece = MANY_THREADS // 2 if many else READ_PIECE
    descriptor = open_plain(path)  # several times cheaper than an object for the file
    try:
        for memory in memories:
            rest = memory.data
            while rest and (got := os.readv(descriptor, [rest[:piece]])):
                hasher.update(rest[:got])
                rest, left = rest[got:], left - got
    except OSError as error:
        raise BadSnapshotFile(f"{os.path.basename(path)}: cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    if left:
        name = os.path.basename(path)
        raise BadSnapshotFile(f"{name}: ends {left} bytes before the {wanted} that the manifest says")
    return hasher.hexdigest(length=16)


def check_size(path: str, nbytes: int) -> None:
    name = os.path.basename(path)
    try:
        status = os.lstat(path)
    except OSError as error:
        raise BadSnapshotFile(f"{name}: cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(status.st_mode):
        raise BadSnapshotFile(f"{name}: cannot be read: it is no plain file")
    if status.st_size != nbytes:
        raise BadSnapshotFile(f"{name}: the manifest says {nbytes} bytes, the file has {status.st_size}")


def read_pieces(descriptor: int, start: int, nbytes: int) -> Iterable[Bytes]:
    """So many bytes of an open file, a few at a time, whatever it claims to hold."""
    while nbytes and (data := os.pread(descriptor, min(nbytes, READ_PIECE), start)):
        yield np.frombuffer(data, dtype=np.uint8)
        start, nbytes = start + len(data), nbytes - len(data)

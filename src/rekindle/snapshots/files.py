"""The few ways in which the disk tier touches files: whole or not at all, readable by their owner only."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from rekindle.errors import BadSnapshotFile

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MANY_THREADS = 16 << 20  # bytes of a file from which reading it is worth several threads
READ_PIECE = 2 << 20  # bytes; about what a core's own cache holds: most page objects are read in one


def raw(tensor: torch.Tensor) -> Bytes:
    """The bytes of a tensor in host memory; no copy if it is contiguous."""
    view: Bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return view


def digest(pieces: Sequence[Bytes]) -> str:
    """The name of an object: the first 16 bytes of the blake3 of its content, in hex.

    On the caller's thread alone: the disk writer's stands back behind the token path, a crowd of helpers would not.
    """
    hasher = blake3(max_threads=1)
    for piece in pieces:
        hasher.update(piece.data)
    return hasher.hexdigest(length=16)


def make_folder(path: Path) -> None:
    """A folder for its owner only; what already exists keeps its mode."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)


def write_whole(temporary: Path, target: Path, pieces: Sequence[Bytes]) -> int:
    """Write `pieces` so that `target` is there whole or not at all, whatever moment the process dies at.

    The rename itself is durable only after `sync_folder`, which the caller does once for many files.
    """
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        try:
            for piece in pieces:
                _write_all(descriptor, piece.data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.rename(temporary, target)
    except OSError:
        # The first error is the one to report; a leftover under a temporary name is collected at the next open.
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    return sum(piece.nbytes for piece in pieces)


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
    name, left = os.path.basename(path), sum(memory.nbytes for memory in memories)
    many, wanted = left >= MANY_THREADS, left
    hasher = blake3(max_threads=blake3.AUTO if many else 1)
    piece = MANY_THREADS // 2 if many else READ_PIECE
    try:
        descriptor = os.open(path, os.O_RDONLY)  # several times cheaper than an object for the file
        try:
            for memory in memories:
                rest = memory.data
                while rest and (got := os.readv(descriptor, [rest[:piece]])):
                    hasher.update(rest[:got])
                    rest, left = rest[got:], left - got
        finally:
            os.close(descriptor)
    except OSError as error:
        raise BadSnapshotFile(f"{name}: cannot be read: {error.strerror}") from error
    if left:
        raise BadSnapshotFile(f"{name}: ends {left} bytes before the {wanted} that the manifest says")
    return hasher.hexdigest(length=16)


def check_size(path: str, nbytes: int) -> None:
    try:
        found = os.stat(path).st_size
    except OSError as error:
        raise BadSnapshotFile(f"{os.path.basename(path)}: cannot be read: {error.strerror}") from error
    if found != nbytes:
        raise BadSnapshotFile(f"{os.path.basename(path)}: the manifest says {nbytes} bytes, the file has {found}")

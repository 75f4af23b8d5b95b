"""The few ways in which the disk tier touches files: whole or not at all, readable by their owner only."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3

from rekindle.errors import BadSnapshotFile

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

MANY_THREADS = 16 << 20  # bytes of a file from which reading it is worth several threads
READ_PIECE = 512 << 10  # bytes; small enough for a core's own cache
MAPPING = 32 << 20  # bytes of memory that objects read together share
EDGE = 256  # bytes on which an object begins in it


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


def memory_for(sizes: Sequence[int]) -> list[Bytes]:
    """Fresh memory for objects that are read together, each on an EDGE, as few large mappings.

    To touch fresh memory costs more than to read a file into it, so the system is asked for large pages. A mapping
    lives as long as anything in it: no mapping holds much more than MAPPING bytes, so that an object which outlives
    its neighbours keeps little beside itself that no budget counts.
    """
    found: list[Bytes] = []
    together: list[int] = []
    for nbytes in sizes:
        if together and sum(map(_on_edge, together)) + nbytes > MAPPING:
            found += _mapped(together)
            together = []
        together.append(nbytes)
    return found + _mapped(together)


def _on_edge(nbytes: int) -> int:
    return -(-nbytes // EDGE) * EDGE


def _mapped(sizes: Sequence[int]) -> list[Bytes]:
    """One mapping, cut. It goes back to the system with the last piece."""
    starts = list(accumulate(map(_on_edge, sizes), initial=0))
    if not starts[-1]:
        return [np.empty(0, dtype=np.uint8) for _ in sizes]
    mapping = mmap.mmap(-1, starts[-1], flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without large pages is slower, not wrong
            mapping.madvise(mmap.MADV_HUGEPAGE)
    memory: Bytes = np.frombuffer(mapping, dtype=np.uint8)
    return [memory[start : start + nbytes] for start, nbytes in zip(starts, sizes, strict=False)]


def read_into(memory: Bytes, path: Path) -> str:
    """Fill memory of our own with the file's bytes; returns their digest.

    Not a mapping of the file: one that is cut short under a mapping kills the process, and one that is altered after
    its digest was checked gives a wrong answer. Each piece is hashed while the processor's caches still hold it.
    """
    many = memory.nbytes >= MANY_THREADS
    hasher = blake3(max_threads=blake3.AUTO if many else 1)
    piece = MANY_THREADS // 2 if many else READ_PIECE
    left = memory.data
    try:
        with path.open("rb", buffering=0) as file:
            while left and (got := file.readinto(left[:piece])):
                hasher.update(left[:got])
                left = left[got:]
    except OSError as error:
        raise BadSnapshotFile(f"{path.name}: cannot be read: {error.strerror}") from error
    if left:
        raise BadSnapshotFile(f"{path.name}: ends {len(left)} bytes before the {memory.nbytes} that the manifest says")
    return hasher.hexdigest(length=16)


def check_size(path: Path, nbytes: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise BadSnapshotFile(f"{path.name}: cannot be read: {error.strerror}") from error
    if found != nbytes:
        raise BadSnapshotFile(f"{path.name}: the manifest says {nbytes} bytes, the file has {found}")

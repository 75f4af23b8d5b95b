"""Files that are read in one call of C give what their definition in Python gives, whatever stands there."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rekindle.kernels import native
from rekindle.kernels.native.files import NativeFiles, native_files
from rekindle.snapshots.files import NO_PLAIN_FILE, Bytes, FileRead, PlainFiles, ReadFiles

CONTENT = bytes(range(256)) * 20
NOBODY = 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not pytest's own: a socket's path must be short, and a process without rights has to get there."""
    with tempfile.TemporaryDirectory() as path:
        os.chmod(path, 0o755)
        yield Path(path)


def plain(path: Path) -> None:
    path.write_bytes(CONTENT)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def short(path: Path) -> None:
    path.write_bytes(CONTENT[:1000])


def missing(path: Path) -> None: ...


def fifo(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(CONTENT)
    path.symlink_to(other)


def dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def directory(path: Path) -> None:
    path.mkdir()


def listener(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def unreadable(path: Path) -> None:
    path.write_bytes(CONTENT)
    path.chmod(0)


def below_a_file(path: Path) -> None:
    """The path leads through it."""
    path.parent.rmdir()
    path.parent.write_bytes(CONTENT)


KINDS = (plain, empty, short, missing, fifo, link, dangling_link, directory, listener, unreadable, below_a_file)
CUTS = {  # bytes of the file at which reading starts, and of the memories that are filled
    "whole": (0, (len(CONTENT),)),
    "in two": (0, (256, len(CONTENT) - 256)),
    "in many, some of them empty": (0, (0, 1, 0, 999, 2000, 0, len(CONTENT) - 3000, 0)),
    "from the middle": (700, (300, 500)),
    "beyond the end": (len(CONTENT) - 100, (60, 60, 60)),
    "from behind the end": (len(CONTENT) + 5, (10,)),
    "nothing": (0, (0,)),
    "no memory": (0, ()),
    "in very many": (3, (2,) * 1500),
}


def answers(
    files: ReadFiles, reads: list[tuple[Path, int, tuple[int, ...]]]
) -> tuple[list[int], list[int], list[bytes]]:
    """Sizes, what reading said, and what the memories hold then."""
    memories = [[np.full(nbytes, 0xEE, dtype=np.uint8) for nbytes in cuts] for _, _, cuts in reads]
    told: list[FileRead] = [(str(p), start, m) for (p, start, _), m in zip(reads, memories, strict=True)]
    return (
        files.sizes([path for path, _, _ in told]),
        files.read(told),
        [b"".join(map(bytes, each)) for each in memories],
    )


def by_nobody(work: Callable[[], object]) -> None:
    """In a process that modes hold back: root becomes somebody else."""
    child = os.fork()
    if child == 0:
        failed = 1
        try:
            if os.geteuid() == 0:
                os.setuid(NOBODY)
            work()
            failed = 0
        finally:
            os._exit(failed)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_file_gives_what_the_definition_gives(level: str, folder: Path, kind: Callable[[Path], None]) -> None:
    path, files = folder / "below" / "file", native_files()
    path.parent.mkdir()
    kind(path)
    assert files is not None
    reads = [(path, start, cuts) for start, cuts in CUTS.values()]
    assert answers(files, reads) == answers(PlainFiles(), reads)


def test_faults_say_what_stands_there(level: str, folder: Path) -> None:
    kinds = (missing, fifo, link, dangling_link, directory, listener)
    for kind in kinds:
        kind(folder / kind.__name__)
    for files in (native_files(), PlainFiles()):
        assert files is not None
        reads = [(folder / kind.__name__, 0, (5,)) for kind in kinds]
        sizes, got, memories = answers(files, reads)
        assert sizes == [-2, *[NO_PLAIN_FILE] * 5]  # ENOENT
        assert got == [-2, NO_PLAIN_FILE, -40, -40, NO_PLAIN_FILE, -6]  # ELOOP; ENXIO
        assert memories == [b"\xee" * 5] * 6


def test_a_file_without_rights_is_not_read(level: str, folder: Path) -> None:
    unreadable(folder / "file")
    files = native_files()
    assert files is not None

    def refused() -> None:
        assert files is not None
        for each in (files, PlainFiles()):
            assert answers(each, [(folder / "file", 0, (5,))]) == ([len(CONTENT)], [-13], [b"\xee" * 5])  # EACCES

    by_nobody(refused)


def test_one_bad_file_changes_nothing_of_the_others(level: str, folder: Path) -> None:
    kinds = [KINDS[n % len(KINDS[:-1])] for n in range(60)]
    reads = list[tuple[Path, int, tuple[int, ...]]]()
    for n, (kind, (start, cuts)) in enumerate(zip(kinds, list(CUTS.values()) * 7, strict=False)):
        (folder / str(n)).mkdir()
        kind(folder / str(n) / "file")
        reads.append((folder / str(n) / "file", start, cuts))
    files = native_files()
    assert files is not None
    assert answers(files, reads) == answers(PlainFiles(), reads)


def test_no_descriptor_is_left_open(level: str, folder: Path) -> None:
    for kind in KINDS[:-1]:
        kind(folder / kind.__name__)
    files = native_files()
    assert files is not None
    before = os.listdir("/proc/self/fd")
    answers(files, [(folder / kind.__name__, 0, (300, 300)) for kind in KINDS[:-1]])
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_without_a_library_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    native.library.cache_clear()
    monkeypatch.setenv(native.SWITCH, "off")
    assert native_files() is None
    native.library.cache_clear()


def test_memory_that_is_read_into_is_the_callers(level: str, folder: Path) -> None:
    """In the place of a part of a larger array."""
    plain(folder / "file")
    files: NativeFiles | None = native_files()
    assert files is not None
    whole: Bytes = np.zeros(1000, dtype=np.uint8)
    assert files.read([(str(folder / "file"), 10, [whole[100:103], whole[500:502]])]) == [5]
    assert bytes(whole[99:104]) == bytes([0, 10, 11, 12, 0])
    assert bytes(whole[499:503]) == bytes([0, 13, 14, 0])

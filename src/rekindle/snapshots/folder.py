"""The folder of one model: where its files lie, the lock of the one writer, deleting, and the quarantine.

<directory>/<first 16 hex of the fingerprint>/
    lock                 held by the one process that may write
    manifests/<id>.json  a snapshot exists from the moment its manifest is renamed into place
    objects/<name>       pages and own objects, named by their content; shared by every manifest that names them
    temporary/           files being written
    aside/               the quarantine: what could not be used, each with its reason
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
from pathlib import Path

import numpy as np

from rekindle.errors import BadSnapshotFile
from rekindle.snapshots.files import (
    entries_in,
    is_open_to_others,
    make_folder,
    make_own_folder,
    open_plain,
    shown,
    write_whole,
)
from rekindle.snapshots.manifest import FINGERPRINT, NAME

logger = logging.getLogger(__name__)

KEPT_ASIDE = 16  # files kept in quarantine for a person to look at
FOLDER_DIGITS = 16  # of the fingerprint


def folder_of(directory: Path, fingerprint: str) -> Path:
    """Each model has its own folder, so that models never mix."""
    if not FINGERPRINT.fullmatch(fingerprint):
        raise BadSnapshotFile(f"a fingerprint is {FOLDER_DIGITS} or more hex digits, not {shown(fingerprint)}")
    return directory / fingerprint[:FOLDER_DIGITS]


def held_bytes(directory: Path, fingerprint: str) -> int:
    """What the manifests and objects of a model take on disk."""
    folder = folder_of(directory, fingerprint)
    return sum(_sizes_of(folder / "manifests", ".json").values()) + sum(_sizes_of(folder / "objects").values())


class StoreFolder:
    def __init__(self, directory: Path, fingerprint: str) -> None:
        self.path = folder_of(directory, fingerprint)
        self.objects = self.path / "objects"
        self.manifests = self.path / "manifests"
        self._directory = directory
        self._temporary = self.path / "temporary"
        self._aside = self.path / "aside"
        self._numbers = itertools.count()
        self._deletion_failed = False
        self._lock_file = self._become_writer()

    @property
    def read_only(self) -> bool:
        return self._lock_file is None

    def _become_writer(self) -> int | None:
        """The descriptor of the lock if we are the one writer; None, and one line in the log, if we may only read."""
        try:
            self._make_folders()
            descriptor = open_plain(self.path / "lock", os.O_RDWR | os.O_CREAT)
        except (OSError, BadSnapshotFile) as error:
            logger.warning("disk tier %s is read-only: %s; hits are served, nothing is saved", self.path, error)
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            why = "another server writes to it" if isinstance(error, BlockingIOError) else str(error)
            logger.warning("disk tier %s is read-only: %s; hits are served, nothing is saved", self.path, why)
            return None
        return descriptor

    def _make_folders(self) -> None:
        """The directory itself may hold more than ours, so its mode is left alone; the folders inside hold prompts."""
        make_folder(self._directory)
        own = (self.path, self.objects, self.manifests, self._temporary, self._aside)
        loosest = max(map(make_own_folder, own), key=lambda mode: mode & 0o077)
        if loosest & 0o077:
            now = "others may still read it" if any(map(is_open_to_others, own)) else "now it is its owner's only"
            logger.warning("disk tier %s holds prompts and had mode %04o: %s", self.path, loosest, now)

    def close(self) -> None:
        """Give the lock back."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    # Files

    def manifest(self, id: str) -> Path:
        return self.manifests / f"{id}.json"

    def new_temporary(self) -> Path:
        return self._temporary / f"{os.getpid()}-{next(self._numbers)}"

    def manifest_files(self) -> list[Path]:
        """Whatever lies where manifests lie."""
        return sorted(Path(entry.path) for entry in entries_in(self.manifests))

    def object_sizes(self) -> dict[str, int]:
        """Bytes by name."""
        return _sizes_of(self.objects)

    def obstacles(self) -> list[Path]:
        """Links, folders, FIFOs, sockets and devices with the name of an object: in their place nothing can be
        written."""
        others = [Path(e.path) for e in entries_in(self.objects) if not e.is_file(follow_symlinks=False)]
        return [path for path in others if NAME.fullmatch(path.name)]

    def clear_temporary(self) -> None:
        """Files that a process which died had half written."""
        for path in _files_in(self._temporary):
            self.unlink(path)

    def unlink(self, path: Path) -> bool:
        """False if the disk refuses; what stays is collected at the next open. Logged once, not per file."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            if not self._deletion_failed:
                logger.warning("disk tier %s: cannot delete: %s", self.path, error)
            self._deletion_failed = True
            return False
        return True

    # The quarantine

    def quarantine(self, path: Path, reason: str) -> None:
        """Keep what stood there and the reason for a person to look at. The objects of a manifest are not kept: what is
        sound in them lives on in other snapshots, and an altered one is worth nothing."""
        if self.read_only:
            return
        # A disk that refuses the move leaves a file that will be refused again; the caller has forgotten it.
        with contextlib.suppress(OSError):
            target = self._place_aside(path.name)
            if path.is_dir() and not path.is_symlink():
                os.chmod(path, 0o700)  # or it could not be moved
            os.rename(path, target)
            text = np.frombuffer(f"{reason}\n".encode(errors="backslashreplace"), dtype=np.uint8)
            write_whole(self.new_temporary(), target.with_name(f"{target.name}.reason"), [text])
            self._trim_aside()

    def _place_aside(self, name: str) -> Path:
        """Where nothing stands, so that no folder is in the way and nothing is lost."""
        places = (self._aside / (f"{number}-{name}" if number else name) for number in itertools.count())
        return next(place for place in places if not os.path.lexists(place))

    def _trim_aside(self) -> None:
        """The oldest files go; a folder that is not empty is left to a person."""
        kept = [Path(entry.path) for entry in entries_in(self._aside) if not entry.name.endswith(".reason")]
        for old in sorted(kept, key=lambda path: path.lstat().st_mtime)[:-KEPT_ASIDE]:
            if old.is_dir() and not old.is_symlink():
                continue
            old.unlink(missing_ok=True)
            old.with_name(f"{old.name}.reason").unlink(missing_ok=True)


def _sizes_of(folder: Path, ending: str = "") -> dict[str, int]:
    """Bytes by name; a file whose name is no object's, or without its ending no manifest's, is not ours."""
    sizes = {}
    for path in _files_in(folder):
        with contextlib.suppress(OSError):  # evicted by the writer while we read, or not ours to look at
            if path.name.endswith(ending) and NAME.fullmatch(path.name.removesuffix(ending)):
                sizes[path.name] = path.lstat().st_size
    return sizes


def _files_in(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in entries_in(folder) if entry.is_file(follow_symlinks=False)]

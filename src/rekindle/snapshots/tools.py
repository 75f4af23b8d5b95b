"""What `rekindle cache` does to a directory: list, show, verify, prune, export, import. Nothing here prints."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np

from rekindle.config import show_bytes
from rekindle.errors import BadConfig, BadSnapshotFile
from rekindle.snapshots import about, manifest
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.files import PlainFiles, check_sizes, digest, entries_in, open_plain, read_pieces, shown
from rekindle.snapshots.folder import FOLDER_DIGITS
from rekindle.snapshots.manifest import FINGERPRINT, MOST_BYTES, NAME, PAGE_HEADER, Manifest, key_of
from rekindle.snapshots.record import join_tokens, read_head

NO_BUDGET = 1 << 62  # prune has its own; only a server has a budget
MOST_MEMBERS = 100_000  # of a file to be imported: some six million tokens
MOST_MANIFESTS = 128 << 20  # bytes of all of them
MOST_HEADER = 4 << 10  # bytes that tar may spend on telling of one member; ours take 512


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """One line of `cache list`."""

    id: str
    fingerprint: str
    about: dict[str, str]  # the model and settings it was made under; empty where about.json is missing
    position: int
    kind: str
    conversation: str | None
    saved: int  # seconds since the epoch
    used: float
    own_bytes: int  # not shared with any other snapshot
    total_bytes: int  # with its pages
    namespace: str = ""  # the common one


@dataclass(frozen=True, slots=True)
class Finding:
    """What `cache verify` found out about one snapshot."""

    id: str
    fault: str | None  # None if every byte is as it was written


@dataclass(frozen=True, slots=True)
class Pruned:
    removed: tuple[str, ...]
    freed: int
    left: int  # bytes
    in_use: tuple[Path, ...] = ()  # folders that a server is using, whose snapshots stay


def list_snapshots(directory: Path) -> list[SnapshotInfo]:
    """Every readable snapshot of every model, most recently used first. Changes nothing, takes no lock."""
    found = []
    read_about = cache(about.read_about)
    for listed, path in _manifests(directory):
        try:
            status = path.lstat()
        except FileNotFoundError:  # evicted by a server meanwhile
            continue
        found.append(
            SnapshotInfo(
                id=listed.id,
                fingerprint=listed.fingerprint,
                about=read_about(path.parent.parent),
                position=listed.position,
                kind=listed.kind,
                conversation=listed.conversation,
                namespace=listed.whose,
                saved=listed.saved,
                used=status.st_mtime,
                own_bytes=listed.own_bytes + status.st_size,
                total_bytes=status.st_size + sum(listed.objects.values()),
            )
        )
    return sorted(found, key=lambda info: -info.used)


def show_snapshot(directory: Path, id: str) -> dict[str, Any]:
    """The manifest as plain data. `id` may be the beginning of one."""
    listed, _ = _find(directory, id)
    plain: dict[str, Any] = msgspec.json.decode(manifest.encode(listed))
    return plain


def verify_snapshots(directory: Path) -> list[Finding]:
    """Check every manifest and every object it names against its digest, each object once. Changes nothing."""
    findings = []
    checked: dict[Path, str | None] = {}
    for folder in _folders(directory):
        for path in sorted(Path(entry.path) for entry in entries_in(folder / "manifests")):
            try:
                _verify(path, folder, checked)
            except BadSnapshotFile as error:
                findings.append(Finding(path.stem, str(error)))
            else:
                findings.append(Finding(path.stem, None))
    return findings


def prune_snapshots(directory: Path, budget: int) -> Pruned:
    """Evict the least recently used snapshots, whatever their model, until at most `budget` bytes are left. Those of a
    model that a server is using stay, and count."""
    with _stores(directory) as stores:
        idle, in_use = [s for s in stores if not s.read_only], tuple(s.folder for s in stores if s.read_only)
        before = sum(store.bytes for store in stores)
        if in_use and not idle and before > budget:
            raise BadConfig(f"{in_use[0]} cannot be changed now: a server is using it, or it may not be written")
        oldest = sorted(((r, s) for s in idle for r in s.records()), key=lambda pair: pair[0].used)
        removed = []
        for record, store in oldest:
            if sum(s.bytes for s in stores) <= budget:
                break
            store.remove(record.id)
            removed.append(record.id)
        left = sum(store.bytes for store in stores)
    return Pruned(tuple(removed), before - left, left, in_use)


def export_chain(directory: Path, id: str, target: Path) -> list[str]:
    """Write a snapshot and every shorter one on its way, with all their objects, into one tar file.

    Everything is verified first. Returns the ids, shortest first.
    """
    last, path = _find(directory, id)
    folder = path.parent.parent
    tokens = _tokens(folder, last)
    chain = []
    for listed, _ in _manifests(directory):
        if listed.fingerprint == last.fingerprint and listed.position <= last.position:
            prefix = key_of(listed.fingerprint, tokens[: listed.position], last.whose)
            if prefix == listed.id:
                chain.append(listed)
    chain.sort(key=lambda listed: listed.position)
    checked: dict[Path, str | None] = {}
    for listed in chain:
        _verify(folder / "manifests" / f"{listed.id}.json", folder, checked)
    try:
        _write_tar(target, folder, chain)
    except OSError as error:
        raise BadConfig(f"{target} cannot be written: {error.strerror or error}") from error
    return [listed.id for listed in chain]


def _write_tar(target: Path, folder: Path, chain: Sequence[Manifest]) -> None:
    partial = target.with_name(f"{target.name}.partial")
    partial.unlink(missing_ok=True)  # of an export that was killed; a link in its place is not followed
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
            # Manifests first: a reader knows what to expect before the first large object.
            for listed in chain:
                data = manifest.encode(listed)
                _add(tar, f"manifests/{listed.id}.json", io.BytesIO(data), len(data))
            if words := about.read_about(folder):
                data = about.encode(words)
                _add(tar, about.FILE, io.BytesIO(data), len(data))
            for name, nbytes in {name: n for listed in chain for name, n in listed.objects.items()}.items():
                with os.fdopen(open_plain(folder / "objects" / name), "rb") as source:
                    _add(tar, f"objects/{name}", source, nbytes)
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def import_chain(directory: Path, source: Path) -> list[str]:
    """Take in the snapshots of an exported file. Every checksum is verified before the first one becomes visible."""
    with os.fdopen(open_plain(source), "rb") as file:
        manifests, objects, words = _contents(file, shown(source.name))
        _check_import(file, manifests, objects)
        _check_room(directory, sum(place.nbytes for place in objects.values()))
        return [_adopt(directory, file, objects, words, listed) for listed in manifests]


# Reading a directory without owning it


def _folders(directory: Path) -> list[Path]:
    inside = entries_in(directory.resolve())
    folders = sorted(Path(entry.path) for entry in inside if entry.is_dir(follow_symlinks=False))
    return [folder for folder in folders if len(folder.name) == FOLDER_DIGITS and FINGERPRINT.fullmatch(folder.name)]


def _manifests(directory: Path) -> Iterator[tuple[Manifest, Path]]:
    for folder in _folders(directory):
        for path in sorted(Path(entry.path) for entry in entries_in(folder / "manifests")):
            try:
                listed = _read(path)
            except BadSnapshotFile:
                continue  # `verify` names it with its reason
            yield listed, path


def _read(path: Path) -> Manifest:
    """A manifest, if it lies where its model's lie."""
    if path.suffix != ".json":
        raise BadSnapshotFile(f"{shown(path.name)}: not the name of a manifest")
    listed, folder = manifest.read(path, None), path.parent.parent.name
    if not listed.fingerprint.startswith(folder):
        raise BadSnapshotFile(f"{listed.id}: of model {listed.fingerprint}, it lies in the folder of {folder}")
    return listed


def _find(directory: Path, id: str) -> tuple[Manifest, Path]:
    found = [(listed, path) for listed, path in _manifests(directory) if listed.id.startswith(id)]
    if len(found) != 1:
        raise BadConfig(f"{len(found)} snapshots begin with {id!r}, one is needed")
    return found[0]


def _verify(path: Path, folder: Path, checked: dict[Path, str | None]) -> None:
    listed = _read(path)
    for name, nbytes in listed.objects.items():
        file = folder / "objects" / name
        check_sizes(PlainFiles(), {str(file): nbytes})
        if file not in checked:
            checked[file] = _fault(file, nbytes)
        fault = checked[file]
        if fault is not None:
            raise BadSnapshotFile(f"{listed.id}: {fault}")
    if key_of(listed.fingerprint, _tokens(folder, listed), listed.whose) != listed.id:
        raise BadSnapshotFile(f"{listed.id}: its token ids are not those of its key")


def _fault(file: Path, nbytes: int) -> str | None:
    """A few bytes at a time: nothing that a file claims takes memory."""
    try:
        with os.fdopen(open_plain(file), "rb") as opened:
            found = digest(read_pieces(opened.fileno(), 0, nbytes))
    except BadSnapshotFile as error:
        return f"object {error}"
    except OSError as error:
        return f"object {file.name} cannot be read: {error.strerror}"
    return None if found == file.name else f"object {file.name} has been altered"


def _tokens(folder: Path, listed: Manifest) -> np.ndarray:
    return join_tokens([read_head(folder / "objects" / name) for name in listed.pages], listed.tail_tokens)


@contextmanager
def _stores(directory: Path) -> Iterator[list[DiskStore]]:
    """The stores of every model in the directory; owned for writing, unless a server is using them."""
    fingerprints = dict.fromkeys(listed.fingerprint for listed, _ in _manifests(directory))
    stores: list[DiskStore] = []
    try:
        for fingerprint in fingerprints:
            stores.append(DiskStore(directory, fingerprint, NO_BUDGET))
        yield stores
    finally:
        for store in stores:
            store.close()


def _open(directory: Path, fingerprint: str) -> DiskStore:
    store = DiskStore(directory, fingerprint, NO_BUDGET)
    if store.read_only:
        raise BadConfig(f"{store.folder} cannot be changed now: a server is using it, or it may not be written")
    return store


# Tar files: headers are read by tarfile, under a guard; contents by us, from where the headers say they are


class Place(NamedTuple):
    """Where in a tar file the content of a member lies."""

    start: int
    nbytes: int


class _Guard:
    """A file that tells only so much about one member: tarfile reads a header as long as the header claims to be."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.left = MOST_HEADER
        self.tell, self.seek = file.tell, file.seek

    def read(self, nbytes: int) -> bytes:
        self.left -= nbytes
        if self.left < 0:
            raise BadSnapshotFile(f"the header of a member has more than {MOST_HEADER} bytes")
        return self._file.read(nbytes)


def _add(tar: tarfile.TarFile, name: str, source: BinaryIO, nbytes: int) -> None:
    info = tarfile.TarInfo(name)
    info.size = nbytes
    info.mode = 0o600
    tar.addfile(info, source)


def _members(file: BinaryIO, called: str) -> Iterator[tuple[str, Place]]:
    guard, whole = _Guard(file), os.fstat(file.fileno()).st_size
    try:
        with tarfile.open(fileobj=guard, mode="r:") as tar:  # type: ignore[call-overload]  # all that it reads with
            for _ in range(MOST_MEMBERS):
                guard.left = MOST_HEADER
                member = tar.next()
                if member is None:
                    return
                tar.members.clear()  # or it would keep every one of them
                if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
                    raise BadSnapshotFile(f"{shown(member.name)}: not a plain file")
                if not 0 <= member.size <= whole - member.offset_data:
                    raise BadSnapshotFile(f"{shown(member.name)}: {member.size} bytes do not fit the file")
                yield member.name, Place(member.offset_data, member.size)
    except (tarfile.TarError, ValueError, OSError, RecursionError) as error:
        raise BadSnapshotFile(f"{called}: not a readable tar file: {shown(str(error))}") from error
    raise BadSnapshotFile(f"{called}: more than {MOST_MEMBERS} members")


def _contents(file: BinaryIO, called: str) -> tuple[list[Manifest], dict[str, Place], dict[str, str]]:
    """Manifests, objects, and what is said of all of them. Members are read by name and never unpacked, so no name in
    the file can become a path."""
    manifests: dict[str, Manifest] = {}
    objects: dict[str, Place] = {}
    words: dict[str, str] = {}
    left = MOST_MANIFESTS
    for path, place in _members(file, called):
        folder, _, name = path.partition("/")
        id = name.removesuffix(".json")
        if name in objects or id in manifests or (path == about.FILE and words):
            raise BadSnapshotFile(f"{shown(path)}: comes twice")
        if folder == "manifests" and NAME.fullmatch(id) and name != id:
            left -= place.nbytes
            if left < 0 or place.nbytes > MOST_BYTES:
                raise BadSnapshotFile(f"{shown(path)}: manifests of more bytes than can be ours")
            manifests[id] = manifest.decode(b"".join(map(bytes, _bytes(file, place))), None, id)
        elif folder == "objects" and NAME.fullmatch(name):
            objects[name] = place
        elif path == about.FILE and place.nbytes <= about.MOST_BYTES:
            words = about.decode(b"".join(map(bytes, _bytes(file, place))))
        else:
            raise BadSnapshotFile(f"{shown(path)}: no part of an exported snapshot")
    if not manifests:
        raise BadSnapshotFile(f"{called}: the file holds no manifest")
    return sorted(manifests.values(), key=lambda listed: listed.position), objects, words


def _check_import(file: BinaryIO, manifests: Sequence[Manifest], objects: dict[str, Place]) -> None:
    """What the manifests say first, the digests, which take long, last."""
    heads: dict[str, np.ndarray] = {}
    for listed in manifests:
        for name, nbytes in listed.objects.items():
            if name not in objects or objects[name].nbytes != nbytes:
                raise BadSnapshotFile(f"{listed.id}: object {name} of {nbytes} bytes is not in the file")
        for name in listed.pages:
            if name not in heads:
                heads[name] = _head(file, objects[name])
        tokens = join_tokens([heads[name] for name in listed.pages], listed.tail_tokens)
        if key_of(listed.fingerprint, tokens, listed.whose) != listed.id:
            raise BadSnapshotFile(f"{listed.id}: its token ids are not those of its key")
    if unnamed := objects.keys() - {name for listed in manifests for name in listed.objects}:
        raise BadSnapshotFile(f"object {min(unnamed)} belongs to no manifest of the file")
    for name, place in objects.items():
        if digest(_bytes(file, place)) != name:
            raise BadSnapshotFile(f"object {name} has been altered")


def _check_room(directory: Path, nbytes: int) -> None:
    there = next(folder for folder in (directory.absolute(), *directory.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    if nbytes > free:
        raise BadConfig(f"the objects take {show_bytes(nbytes)}, {directory} has {show_bytes(free)} free")


def _adopt(directory: Path, file: BinaryIO, objects: dict[str, Place], words: dict[str, str], listed: Manifest) -> str:
    store = _open(directory, listed.fingerprint)
    try:
        if words and not about.read_about(store.folder):
            about.describe(store, words)
        return store.adopt(listed, lambda name: _bytes(file, objects[name])).id
    except OSError as error:
        raise BadConfig(f"{store.folder} cannot be written: {error.strerror or error}") from error
    finally:
        store.close()


def _head(file: BinaryIO, place: Place) -> np.ndarray:
    return np.concatenate([*_bytes(file, Place(place.start, PAGE_HEADER))]).view(np.int32)


def _bytes(file: BinaryIO, place: Place) -> Iterable[np.ndarray]:
    return read_pieces(file.fileno(), *place)

"""What `rekindle cache` does to a directory: list, show, verify, prune, export, import. Nothing here prints."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.errors import BadConfig, BadSnapshotFile
from rekindle.snapshots import manifest
from rekindle.snapshots.about import read_about
from rekindle.snapshots.disk import FOLDER_DIGITS, DiskStore, Record
from rekindle.snapshots.files import digest
from rekindle.snapshots.manifest import NAME, PAGE_HEADER, Manifest, key_of

NO_BUDGET = 1 << 62  # these tools do what they are told; the budget is the server's


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """One line of `cache list`."""

    id: str
    fingerprint: str
    about: dict[str, str]  # the model and settings it was made under; empty where nobody has left word
    position: int
    kind: str
    conversation: str | None
    saved: int  # seconds since the epoch
    used: float
    own_bytes: int  # not shared with any other snapshot
    total_bytes: int  # with its pages


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


def list_snapshots(directory: Path) -> list[SnapshotInfo]:
    """Every readable snapshot of every model, most recently used first. Changes nothing, takes no lock."""
    found = []
    about = cache(read_about)
    for listed, path in _manifests(directory):
        status = path.stat()
        found.append(
            SnapshotInfo(
                id=listed.id,
                fingerprint=listed.fingerprint,
                about=about(path.parent.parent),
                position=listed.position,
                kind=listed.kind,
                conversation=listed.conversation,
                saved=listed.saved,
                used=status.st_mtime,
                own_bytes=listed.own_bytes + status.st_size,
                total_bytes=status.st_size + sum(listed.objects.values()),
            )
        )
    return sorted(found, key=lambda info: -info.used)


def show_snapshot(directory: Path, id: str) -> dict[str, Any]:
    """The manifest as plain data. `id` may be the beginning of one."""
    _, path = _find(directory, id)
    shown: dict[str, Any] = json.loads(path.read_bytes())
    return shown


def verify_snapshots(directory: Path) -> list[Finding]:
    """Check every manifest and every object it names against its digest, each object once. Changes nothing."""
    findings = []
    checked: dict[Path, str | None] = {}
    for folder in _folders(directory):
        for path in sorted((folder / "manifests").glob("*")):
            try:
                _verify(path, folder, checked)
            except BadSnapshotFile as error:
                findings.append(Finding(path.stem, str(error)))
            else:
                findings.append(Finding(path.stem, None))
    return findings


def prune_snapshots(directory: Path, budget: int) -> Pruned:
    """Evict the least recently used snapshots, whatever their model, until at most `budget` bytes are left."""
    with _stores(directory) as stores:
        oldest = sorted(((r, s) for s in stores for r in s.records()), key=lambda pair: pair[0].used)
        before = sum(store.bytes for store in stores)
        removed = []
        for record, store in oldest:
            if sum(s.bytes for s in stores) <= budget:
                break
            store.remove(record.id)
            removed.append(record.id)
        left = sum(store.bytes for store in stores)
    return Pruned(tuple(removed), before - left, left)


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
            prefix = key_of(listed.fingerprint, tokens[: listed.position])
            if prefix == listed.id:
                chain.append(listed)
    chain.sort(key=lambda listed: listed.position)
    checked: dict[Path, str | None] = {}
    for listed in chain:
        _verify(folder / "manifests" / f"{listed.id}.json", folder, checked)
    if not target.parent.is_dir():
        raise BadConfig(f"{target} cannot be written: there is no folder {target.parent}")
    partial = target.with_name(f"{target.name}.partial")
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w") as tar:
        # Manifests first: a reader knows what to expect before the first large object.
        for listed in chain:
            _add(tar, f"manifests/{listed.id}.json", manifest.encode(listed))
        for name in dict.fromkeys(name for listed in chain for name in listed.objects):
            tar.add(folder / "objects" / name, arcname=f"objects/{name}", filter=_anonymous)
    os.replace(partial, target)
    return [listed.id for listed in chain]


def import_chain(directory: Path, source: Path) -> list[str]:
    """Take in the snapshots of an exported file. Every checksum is verified before the first one becomes visible."""
    try:
        with tarfile.open(source, mode="r:") as tar:
            manifests, objects = _contents(tar)
            _check_import(tar, manifests, objects)
            return [_adopt(directory, tar, objects, listed) for listed in manifests]
    except tarfile.TarError as error:
        raise BadSnapshotFile(f"{source.name}: not a readable tar file: {error}") from error


# Reading a directory without owning it


def _folders(directory: Path) -> list[Path]:
    return sorted(path.parent for path in directory.glob("*/manifests") if len(path.parent.name) == FOLDER_DIGITS)


def _manifests(directory: Path) -> Iterator[tuple[Manifest, Path]]:
    for folder in _folders(directory):
        for path in sorted((folder / "manifests").glob("*.json")):
            try:
                listed = manifest.read(path, None)
            except BadSnapshotFile:
                continue  # `verify` names it with its reason
            yield listed, path


def _find(directory: Path, id: str) -> tuple[Manifest, Path]:
    found = [(listed, path) for listed, path in _manifests(directory) if listed.id.startswith(id)]
    if len(found) != 1:
        raise BadConfig(f"{len(found)} snapshots begin with {id!r}, one is needed")
    return found[0]


def _verify(path: Path, folder: Path, checked: dict[Path, str | None]) -> None:
    listed = manifest.read(path, None)
    for name, nbytes in listed.objects.items():
        file = folder / "objects" / name
        if file not in checked:
            checked[file] = _fault(file, name)
        fault = checked[file]
        if fault is None and file.stat().st_size != nbytes:
            fault = f"object {name} has {file.stat().st_size} bytes, the manifest says {nbytes}"
        if fault is not None:
            raise BadSnapshotFile(f"{listed.id}: {fault}")
    if key_of(listed.fingerprint, _tokens(folder, listed)) != listed.id:
        raise BadSnapshotFile(f"{listed.id}: its token ids are not those of its key")


def _fault(file: Path, name: str) -> str | None:
    try:
        found = digest([np.fromfile(file, dtype=np.uint8)])
    except OSError as error:
        return f"object {name} cannot be read: {error.strerror}"
    return None if found == name else f"object {name} has been altered"


def _tokens(folder: Path, listed: Manifest) -> np.ndarray:
    heads = []
    for name in listed.pages:
        try:
            head = np.fromfile(folder / "objects" / name, dtype=np.int32, count=PAGE_HEADER // 4)
        except OSError as error:
            raise BadSnapshotFile(f"{listed.id}: object {name} cannot be read: {error.strerror}") from error
        heads.append(head)
    return np.concatenate([*heads, np.asarray(listed.tail_tokens, dtype=np.int32)], dtype=np.int32)


@contextmanager
def _stores(directory: Path) -> Iterator[list[DiskStore]]:
    """The stores of every model in the directory, owned for writing."""
    fingerprints = dict.fromkeys(listed.fingerprint for listed, _ in _manifests(directory))
    stores: list[DiskStore] = []
    try:
        for fingerprint in fingerprints:
            stores.append(_open(directory, fingerprint))
        yield stores
    finally:
        for store in stores:
            store.close()


def _open(directory: Path, fingerprint: str) -> DiskStore:
    store = DiskStore(directory, fingerprint, NO_BUDGET)
    if store.read_only:
        raise BadConfig(f"{store.folder} cannot be changed now: a server is using it, or it may not be written")
    return store


# Tar files


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    info.mode = 0o600
    tar.addfile(info, io.BytesIO(data))


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info


def _contents(tar: tarfile.TarFile) -> tuple[list[Manifest], dict[str, tarfile.TarInfo]]:
    """Members are read by name and never unpacked, so no name in the file can become a path."""
    manifests, objects = [], {}
    for member in tar.getmembers():
        folder, _, name = member.name.partition("/")
        if not member.isfile():
            raise BadSnapshotFile(f"{member.name}: not a plain file")
        if folder == "manifests" and name.endswith(".json"):
            manifests.append(manifest.decode(_bytes(tar, member).tobytes(), None, name.removesuffix(".json")))
        elif folder == "objects" and NAME.fullmatch(name):
            objects[name] = member
        else:
            raise BadSnapshotFile(f"{member.name}: no part of an exported snapshot")
    if not manifests:
        raise BadSnapshotFile("the file holds no manifest")
    return sorted(manifests, key=lambda listed: listed.position), objects


def _check_import(tar: tarfile.TarFile, manifests: Sequence[Manifest], objects: dict[str, tarfile.TarInfo]) -> None:
    heads: dict[str, np.ndarray] = {}
    for name, member in objects.items():
        data = _bytes(tar, member)
        if digest([data]) != name:
            raise BadSnapshotFile(f"object {name} has been altered")
        heads[name] = data[:PAGE_HEADER].copy()
    for listed in manifests:
        for name, nbytes in listed.objects.items():
            if name not in objects or objects[name].size != nbytes:
                raise BadSnapshotFile(f"{listed.id}: object {name} of {nbytes} bytes is not in the file")
        pages = [heads[name].view(np.int32) for name in listed.pages]
        tokens = np.concatenate([*pages, np.asarray(listed.tail_tokens, dtype=np.int32)], dtype=np.int32)
        if key_of(listed.fingerprint, tokens) != listed.id:
            raise BadSnapshotFile(f"{listed.id}: its token ids are not those of its key")


def _adopt(directory: Path, tar: tarfile.TarFile, objects: dict[str, tarfile.TarInfo], listed: Manifest) -> str:
    store = _open(directory, listed.fingerprint)
    try:
        record: Record = store.adopt(listed, lambda name: [_bytes(tar, objects[name])])
    finally:
        store.close()
    return record.id


def _bytes(tar: tarfile.TarFile, member: tarfile.TarInfo) -> np.ndarray:
    file = tar.extractfile(member)
    assert file is not None, "only plain files are read"
    return np.frombuffer(file.read(), dtype=np.uint8)

"""What a folder of snapshots was made for, in words: a start that finds none of its own says what differs."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from rekindle.errors import BadSnapshotFile
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.files import read_plain, write_whole

log = logging.getLogger(__name__)

FILE = "about.json"  # beside the manifests; nothing but people depend on it
MOST_BYTES = 1 << 16  # of it

About = Mapping[str, str]  # say {"model": "tiny", "KV": "bf16"}: all that decides whether a snapshot can be restored


@dataclass(frozen=True, slots=True)
class Strangers:
    """Snapshots in the same directory that cannot be restored here."""

    count: int
    differs: str  # the settings that differ there, in words


def describe(store: DiskStore, about: About) -> None:
    """Write down what the store's snapshots were made for."""
    if store.read_only or read_about(store.folder) == about:
        return
    text = np.frombuffer(encode(about), dtype=np.uint8)
    try:
        write_whole(store.folder / "temporary" / f"{os.getpid()}-about", store.folder / FILE, [text])
    except OSError as error:
        log.warning("disk tier %s: cannot write %s: %s", store.folder, FILE, error)


def read_about(folder: Path) -> dict[str, str]:
    """Empty where the file is missing or cannot be read."""
    try:
        return decode(read_plain(folder / FILE, MOST_BYTES))
    except BadSnapshotFile:
        return {}


def encode(about: About) -> bytes:
    return msgspec.json.encode(about)


def decode(data: bytes) -> dict[str, str]:
    """Empty where the bytes are none of ours."""
    try:
        about = msgspec.json.decode(data, type=dict[str, str])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return {}
    return about if all(word.isprintable() for word in (*about, *about.values())) else {}


def strangers(directory: Path, store: DiskStore, about: About) -> list[Strangers]:
    """What lies beside the store, the most first."""
    folders = {path.parent for path in directory.glob("*/manifests/*.json")} - {store.folder / "manifests"}
    found = [
        Strangers(len(list(folder.glob("*.json"))), _difference(read_about(folder.parent), about)) for folder in folders
    ]
    return sorted(found, key=lambda each: -each.count)


def _difference(there: About, here: About) -> str:
    if not there:
        return f"nothing in their folder says which; here {in_words(here)}"
    names = [name for name in {**here, **there} if there.get(name) != here.get(name)]
    known = ", ".join(f"{name} {there.get(name, 'none')} (here {here.get(name, 'none')})" for name in names)
    return known or "made by another version of Rekindle"


def in_words(about: About) -> str:
    return ", ".join(f"{name} {value}" for name, value in about.items())

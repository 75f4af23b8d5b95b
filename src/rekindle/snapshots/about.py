"""What a folder of snapshots was made for, in words: for whoever finds it empty under another setting."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.files import write_whole

log = logging.getLogger(__name__)

FILE = "about.json"  # beside the manifests; nothing but people depend on it

About = Mapping[str, str]  # say {"model": "tiny", "KV": "bf16"}: all that decides whether a snapshot can be restored


@dataclass(frozen=True, slots=True)
class Strangers:
    """Snapshots in the same directory that cannot be restored here."""

    count: int
    differs: str  # what is another there, in words


def describe(store: DiskStore, about: About) -> None:
    """Leave word of what the store's snapshots were made for."""
    if store.read_only or read_about(store.folder) == about:
        return
    text = np.frombuffer(msgspec.json.encode(about), dtype=np.uint8)
    try:
        write_whole(store.folder / "temporary" / f"{os.getpid()}-about", store.folder / FILE, [text])
    except OSError as error:
        log.warning("disk tier %s: cannot write %s: %s", store.folder, FILE, error)


def read_about(folder: Path) -> dict[str, str]:
    """Empty where nobody has left word, or nothing that can be read."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=dict[str, str])
    except (OSError, msgspec.MsgspecError):
        return {}


def strangers(directory: Path, store: DiskStore, about: About) -> list[Strangers]:
    """What lies beside the store, the most first."""
    folders = {path.parent for path in directory.glob("*/manifests/*.json")} - {store.folder / "manifests"}
    found = [
        Strangers(len(list(folder.glob("*.json"))), _difference(read_about(folder.parent), about)) for folder in folders
    ]
    return sorted(found, key=lambda each: -each.count)


def _difference(there: About, here: About) -> str:
    if not there:
        return f"nothing in their folder says which; here {told(here)}"
    names = [name for name in {**here, **there} if there.get(name) != here.get(name)]
    known = ", ".join(f"{name} {there.get(name, 'none')} (here {here.get(name, 'none')})" for name in names)
    return known or "made by another version of Rekindle"


def told(about: About) -> str:
    return ", ".join(f"{name} {value}" for name, value in about.items())

"""What a store's folder holds: records of manifests, objects with their sizes, and how many manifests name each.

An object is deleted when the last manifest that names it is; one that a save has reserved is not deleted before the
save ends, whether it is on disk already or not.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from rekindle.errors import BadSnapshotFile
from rekindle.snapshots.folder import StoreFolder
from rekindle.snapshots.live import LivePages
from rekindle.snapshots.record import Expected, Record


class Inventory:
    """Thread-safe."""

    def __init__(self, folder: StoreFolder, live: LivePages) -> None:
        self.bad_files = 0  # quarantined since the start
        self._folder = folder
        self._live = live
        self._lock = threading.Lock()  # the fields below; short
        self._records: dict[str, Record] = {}
        self._references: Counter[str] = Counter()  # manifests, and saves under way, that name an object
        self._sizes: dict[str, int] = {}  # objects that are there
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """Of all manifests and objects, each object once."""
        with self._lock:
            return self._bytes

    def __len__(self) -> int:
        with self._lock:
            return len(self._records)

    def __contains__(self, id: str) -> bool:
        with self._lock:
            return id in self._records

    def records(self) -> list[Record]:
        """Least recently used first."""
        with self._lock:
            return sorted(self._records.values(), key=lambda record: record.used)

    # At the start

    def scan(self, expected: Expected) -> list[str]:
        """Take in every whole manifest, quarantine what cannot be used, and delete what no manifest names; returns the
        reasons for the quarantine."""
        self._sizes = self._folder.object_sizes()
        bad = {path: f"{path.name}: no plain file" for path in self._folder.obstacles()}
        for path in self._folder.manifest_files():
            try:
                record = expected.examine(path, self._sizes)
            except BadSnapshotFile as error:
                bad[path] = str(error)
            else:
                self._records[record.id] = record
                self._references.update(record.objects.keys())
        for path, reason in bad.items():
            self._folder.quarantine(path, reason)
        self.bad_files = len(bad)
        if not self._folder.read_only:
            self._collect()
        self._bytes = sum(r.manifest_bytes for r in self._records.values()) + sum(self._sizes.values())
        return list(bad.values())

    def _collect(self) -> None:
        """Leftovers of a process that died: half-written files and objects that no manifest names."""
        self._folder.clear_temporary()
        for name in self._sizes.keys() - self._references.keys():
            if self._folder.unlink(self._folder.objects / name):
                del self._sizes[name]

    # While something is saved

    def reserve(self, objects: dict[str, int]) -> dict[str, int]:
        """Refer to every object; returns those that are not on disk."""
        with self._lock:
            self._references.update(objects.keys())
            return {name: nbytes for name, nbytes in objects.items() if name not in self._sizes}

    def add_object(self, name: str, nbytes: int) -> None:
        """It is on disk now; a reservation refers to it."""
        with self._lock:
            self._sizes[name] = nbytes
            self._bytes += nbytes

    def add_record(self, record: Record) -> None:
        """Its manifest is on disk now; the reservation of its objects becomes its own."""
        with self._lock:
            replaced = self._records.get(record.id)
            self._records[record.id] = record
            self._bytes += record.manifest_bytes - (replaced.manifest_bytes if replaced else 0)
        if replaced:
            self.release(replaced.objects)

    def release(self, objects: Iterable[str]) -> None:
        """Refer to these objects no longer; delete those to which nothing else refers."""
        for name in objects:
            with self._lock:
                self._references[name] -= 1
                if self._references[name] > 0:
                    continue
                del self._references[name]
                self._delete_object(name)

    # Out

    def remove(self, id: str) -> None:
        """The manifest first, then every object that no other manifest names.

        Nothing is synced: should power fail and only some of it last, the manifest misses an object and is
        quarantined at the next start.
        """
        with self._lock:
            record = self._records.pop(id, None)
            if record is None:
                return
            if self._folder.unlink(self._folder.manifest(id)):
                self._bytes -= record.manifest_bytes
        self.release(record.objects)

    def quarantine(self, id: str, reason: str) -> Record | None:
        """Its manifest goes to the quarantine, its objects as in `remove`; None if it is unknown."""
        with self._lock:
            record = self._records.pop(id, None)
            if record is None:
                return None
            self.bad_files += 1
            self._folder.quarantine(self._folder.manifest(id), reason)
            self._bytes -= record.manifest_bytes
        self.release(record.objects)
        return record

    def drop_object(self, name: str) -> None:
        """Delete an altered object, so that the next save of the same content writes it anew."""
        with self._lock:
            self._delete_object(name)

    def _delete_object(self, name: str) -> None:
        if self._folder.read_only or name not in self._sizes:
            return
        if self._folder.unlink(self._folder.objects / name):
            self._bytes -= self._sizes.pop(name)
            self._live.forget(name)

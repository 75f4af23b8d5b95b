"""The disk store: content-addressed objects, and one manifest per snapshot.

The owner of the directory is trusted, its files are not: links, FIFOs and everything else that is no regular file are
never opened, a manifest is believed as far as it was checked, an object as far as its digest is its name.
Objects are durable before the manifest that names them, so a process killed at any moment leaves whole snapshots
and leftovers that no manifest names; the next writer deletes those when it opens the directory.

    folder.py     where files lie, the lock of the one writer, the quarantine
    record.py     what is remembered of a snapshot, and what a manifest may say for one model
    inventory.py  records, objects and who names them: what may be deleted
    saving.py     writing
    loading.py    reading and verifying
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from rekindle.errors import BadSnapshotFile
from rekindle.prompt import BoundaryKind
from rekindle.snapshots.files import PlainFiles, ReadFiles
from rekindle.snapshots.folder import StoreFolder
from rekindle.snapshots.inventory import Inventory
from rekindle.snapshots.live import LivePages
from rekindle.snapshots.loading import Loader
from rekindle.snapshots.manifest import Manifest
from rekindle.snapshots.record import Expected, Record, join_tokens, read_head
from rekindle.snapshots.saving import Pieces, Rest, Saver
from rekindle.snapshots.slabs import Slabs
from rekindle.snapshots.types import Snapshot

logger = logging.getLogger(__name__)


class DiskStore:
    """Snapshots of one model under a directory. Thread-safe; `save` is meant for one background thread."""

    def __init__(
        self,
        directory: Path | str,
        fingerprint: str,
        budget: int,
        *,
        slabs: Slabs | None = None,
        files: ReadFiles | None = None,
        vocabulary: int | None = None,
        largest: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """slabs: memory for what is loaded; pinned, a GPU reads it as fast as what was captured. files: reads without
        the interpreter's lock, where there are any. vocabulary, and largest, the bytes beyond which no object can be of
        this model: what a manifest may say, where it is known."""
        self.budget = budget
        self.make_room: Callable[[int], None] | None = None  # before a save: evict this many bytes
        self.make_room_in_ram: Callable[[int], None] | None = None  # before a load: evict until this many fit …
        self.most_in_ram: int | None = None  # … of so many bytes; None: as many as there are
        self.slabs = slabs or Slabs()
        self._place = StoreFolder(Path(directory), fingerprint)
        self._expected = Expected(fingerprint, vocabulary, largest)
        live = LivePages()
        self._inventory = Inventory(self._place, live)
        self._saver = Saver(self._place, self._inventory, live, fingerprint, budget, self._ask_for_room, clock)
        self._loader = Loader(
            self._place, self._expected, live, self.slabs, files or PlainFiles(), self._inventory.drop_object
        )
        self._scan()

    @property
    def folder(self) -> Path:
        return self._place.path

    @property
    def read_only(self) -> bool:
        return self._place.read_only

    @property
    def bad_files(self) -> int:
        """Quarantined since the start."""
        return self._inventory.bad_files

    def _scan(self) -> None:
        bad = self._inventory.scan(self._expected)
        if bad:
            logger.warning("disk tier %s: set %d files aside, the first: %s", self.folder, len(bad), bad[0])

    def _ask_for_room(self, wanted: int) -> None:
        if self.make_room is not None:
            self.make_room(wanted)

    # What is here

    @property
    def bytes(self) -> int:
        """Bytes of all manifests and objects, each object once."""
        return self._inventory.bytes

    def __len__(self) -> int:
        return len(self._inventory)

    def __contains__(self, id: str) -> bool:
        return id in self._inventory

    def records(self) -> list[Record]:
        """Least recently used first."""
        return self._inventory.records()

    def keyed_records(self) -> Iterator[tuple[Record, np.ndarray]]:
        """Every snapshot with its tokens, least recently used first; one whose tokens do not give its id is
        quarantined.

        Reads the head of each page object once, however many snapshots share it.
        """
        heads: dict[str, np.ndarray] = {}
        for record in self.records():
            try:
                tokens = self._tokens(record, heads)
            except BadSnapshotFile as error:
                self.quarantine(record.id, str(error))
            else:
                yield record, tokens

    def _tokens(self, record: Record, heads: dict[str, np.ndarray]) -> np.ndarray:
        for name in record.pages:
            if name not in heads:
                heads[name] = read_head(self._place.objects / name)
        tokens = join_tokens([heads[name] for name in record.pages], record.tail_tokens)
        self._expected.check_tokens(tokens, record.id, record.namespace)
        return tokens

    # In and out

    def save(
        self,
        snapshot: Snapshot,
        kind: BoundaryKind = BoundaryKind.END,
        conversation: str | None = None,
        rest: Rest = lambda: None,
    ) -> Record:
        """Make a snapshot durable; `rest` is called after every piece of work. Raises OSError when the disk refuses and
        DoesNotFit when the budget does; either way the store is as it was."""
        assert not self.read_only, "the caller asks read_only before it saves"
        return self._saver.save(snapshot, kind, conversation, rest)

    def adopt(self, listed: Manifest, pieces: Pieces) -> Record:
        """Save a snapshot that is bytes already (an import); the caller has verified every object."""
        assert not self.read_only, "the caller asks read_only before it saves"
        assert listed.fingerprint == self._expected.fingerprint, "the caller opened the store of another model"
        return self._saver.adopt(listed, pieces)

    def load(self, id: str) -> Snapshot:
        """The snapshot, read and verified; raises BadSnapshotFile."""
        return self._loader.load(id, self.make_room_in_ram, self.most_in_ram)

    def touch(self, id: str) -> None:
        """Note a use, for retention after a restart. A hint: a disk that refuses it loses nothing else."""
        if not self.read_only:
            with contextlib.suppress(OSError):
                os.utime(self._place.manifest(id), follow_symlinks=False)

    def remove(self, id: str) -> None:
        """Evict a snapshot and every object that only it needs."""
        assert not self.read_only, "the caller asks read_only before it evicts"
        self._inventory.remove(id)

    def quarantine(self, id: str, reason: str) -> None:
        """Never load a snapshot again; its manifest is kept for a person. One line in the log, never an error."""
        record = self._inventory.quarantine(id, reason)
        if record is not None:
            logger.warning("disk tier: snapshot %s at %d quarantined: %s", id, record.position, reason)

    def close(self) -> None:
        """Give the lock back. What was loaded stays usable."""
        self._loader.close()
        self._place.close()

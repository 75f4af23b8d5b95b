"""Writing snapshots: objects first, durable before the manifest that names them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np

from rekindle.errors import DoesNotFit
from rekindle.prompt import BoundaryKind
from rekindle.snapshots import layout, manifest
from rekindle.snapshots.files import digest, sync_folder, write_whole
from rekindle.snapshots.folder import StoreFolder
from rekindle.snapshots.inventory import Inventory
from rekindle.snapshots.layout import Pages
from rekindle.snapshots.live import LivePage, LivePages
from rekindle.snapshots.manifest import FORMAT, VERSION, Manifest, PageRow, StretchRow, key_of
from rekindle.snapshots.record import Record
from rekindle.snapshots.types import Snapshot
from rekindle.spec import PAGE

Pieces = Callable[[str], Iterable[np.ndarray]]  # the bytes of an object, by its name
Rest = Callable[[], None]  # called after every piece of work


class Saver:
    def __init__(
        self,
        folder: StoreFolder,
        inventory: Inventory,
        live: LivePages,
        fingerprint: str,
        budget: int,
        make_room: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        """make_room: evicts at least this many bytes, as far as it can."""
        self._folder = folder
        self._inventory = inventory
        self._live = live
        self._fingerprint = fingerprint
        self._budget = budget
        self._make_room = make_room
        self._clock = clock
        self._saving = threading.Lock()  # one save at a time; taken before, never after, the inventory's lock

    def save(self, snapshot: Snapshot, kind: BoundaryKind, conversation: str | None, rest: Rest) -> Record:
        with self._saving:
            columns = layout.page_columns(snapshot)
            rows = layout.page_rows(snapshot)
            names = tuple(self._page_name(snapshot, i, column, rows, rest) for i, column in enumerate(columns))
            own = layout.own_object(snapshot)
            listed = Manifest(
                format=FORMAT,
                version=VERSION,
                fingerprint=self._fingerprint,
                id=key_of(self._fingerprint, snapshot.tokens, snapshot.namespace),
                position=snapshot.position,
                kind=kind.value,
                conversation=conversation,
                saved=int(self._clock()),
                grid=snapshot.grid,
                stretches=tuple(StretchRow(s.stop, s.how, s.cuts) for s in snapshot.stretches),
                own=digest(own.pieces),
                own_bytes=own.nbytes,
                parts=own.rows,
                page_rows=rows,
                tail_tokens=tuple(snapshot.tokens[len(names) * PAGE :].tolist()),
                pages=names,
                namespace=snapshot.namespace or msgspec.UNSET,
            )
            pages = {name: i for i, name in enumerate(names)}

            def pieces(name: str) -> Sequence[np.ndarray]:
                if name == listed.own:
                    return own.pieces
                i = pages[name]
                return layout.page_pieces(_page_tokens(snapshot, i), columns[i], rows)

            record = self._write(listed, pieces, rest)
            known = self._live.find(names)
            self._live.remember(
                {
                    name: LivePage(column, _page_tokens(snapshot, i).copy())
                    for i, (name, column) in enumerate(zip(names, columns, strict=True))
                    if name not in known
                }
            )
            return record

    def _page_name(self, snapshot: Snapshot, i: int, column: Pages, rows: Sequence[PageRow], rest: Rest) -> str:
        """Only a page not met before is hashed."""
        name = self._live.name_of(column)
        if name is None:
            name = digest(layout.page_pieces(_page_tokens(snapshot, i), column, rows))
            rest()
        return name

    def adopt(self, listed: Manifest, pieces: Pieces) -> Record:
        """Save a snapshot that is bytes already (an import); the caller has verified every object."""
        with self._saving:
            return self._write(listed, pieces, lambda: None)

    def _write(self, listed: Manifest, pieces: Pieces, rest: Rest) -> Record:
        text = np.frombuffer(manifest.encode(listed), dtype=np.uint8)
        # From here no eviction can delete an object that this snapshot needs, whether it is there or not.
        missing = self._inventory.reserve(listed.objects)
        try:
            self._find_room(listed, sum(missing.values()) + text.nbytes, text.nbytes)
            for name in missing:
                nbytes = write_whole(self._folder.new_temporary(), self._folder.objects / name, pieces(name))
                self._inventory.add_object(name, nbytes)
                rest()
            if missing:
                sync_folder(self._folder.objects)
            write_whole(self._folder.new_temporary(), self._folder.manifest(listed.id), [text])
        except BaseException:
            self._inventory.release(listed.objects)
            raise
        # The snapshot exists. Should the last sync fail, it is forgotten like any evicted one.
        record = Record.of(listed, text.nbytes, self._clock())
        self._inventory.add_record(record)
        try:
            sync_folder(self._folder.manifests)
        except OSError:
            self._inventory.remove(listed.id)
            raise
        return record

    def _find_room(self, listed: Manifest, wanted: int, text_bytes: int) -> None:
        alone = sum(listed.objects.values()) + text_bytes
        if alone > self._budget:
            raise DoesNotFit(f"a snapshot of {alone} bytes is larger than the whole disk budget of {self._budget}")
        over = self._inventory.bytes + wanted - self._budget
        if over > 0:
            self._make_room(over)
        over = self._inventory.bytes + wanted - self._budget
        if over > 0:
            raise DoesNotFit(f"the disk budget of {self._budget} bytes lacks {over}, and nothing more may be evicted")


def _page_tokens(snapshot: Snapshot, page: int) -> np.ndarray:
    return snapshot.tokens[page * PAGE : (page + 1) * PAGE]

"""Reading snapshots back into slabs, every byte verified."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from rekindle.errors import BadSnapshotFile, SnapshotMismatch
from rekindle.snapshots import layout
from rekindle.snapshots.files import Bytes, check_size, read_into
from rekindle.snapshots.folder import StoreFolder
from rekindle.snapshots.layout import OwnRun
from rekindle.snapshots.live import LivePages
from rekindle.snapshots.manifest import PAGE_HEADER, Manifest
from rekindle.snapshots.record import Expected, join_tokens
from rekindle.snapshots.slabs import Cuts, Slab, Slabs, SlabSlice
from rekindle.snapshots.types import Snapshot
from rekindle.spec import PAGE

MakeRoom = Callable[[int], None]  # evicts from RAM until this many bytes fit

READERS = min(os.cpu_count() or 1, 8)  # threads that read snapshots


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """An object, and memory for it in slabs; token ids of a page have theirs outside."""

    name: str
    memories: tuple[Bytes, ...]
    slabs: tuple[Slab, ...]


class Loader:
    def __init__(
        self,
        folder: StoreFolder,
        expected: Expected,
        live: LivePages,
        slabs: Slabs,
        drop_object: Callable[[str], None],
    ) -> None:
        """drop_object: is called with the name of an altered one."""
        self._folder = folder
        self._expected = expected
        self._live = live
        self._slabs = slabs
        self._drop_object = drop_object
        # Pages outlive the own objects they were loaded with: in one slab they would keep each other's memory.
        self._own_cuts, self._page_cuts = Cuts(slabs), Cuts(slabs)
        self._readers = ThreadPoolExecutor(READERS, "rekindle-disk-reader")

    def load(self, id: str, make_room: MakeRoom | None) -> Snapshot:
        """The snapshot, read and verified: every object's digest is its name, and the tokens give its id."""
        listed = self._expected.read(self._folder.manifest(id))
        # All lengths before any digest: a chain with a lost page is refused at once.
        for name, nbytes in listed.objects.items():
            check_size(f"{self._folder.objects}/{name}", nbytes)
        found = {name: self._live.find(name) for name in listed.pages}
        wanted = [name for name, column in found.items() if column is None]
        own, heads, bodies = self._verified(listed, wanted, make_room)
        columns = {name: column for name, column in found.items() if column is not None}
        for name, head, column in zip(wanted, heads, layout.read_pages(listed, bodies), strict=True):
            columns[name] = (column, head)
        tokens = join_tokens([columns[name][1] for name in listed.pages], listed.tail_tokens)
        self._expected.check_tokens(tokens, id, listed.whose)
        try:
            by_page = [columns[name][0] for name in listed.pages]
            snapshot = layout.read_snapshot(listed, tokens, by_page, own)
        except SnapshotMismatch as error:
            raise BadSnapshotFile(f"{id}: {error}") from error
        for name in wanted:
            self._live.remember(name, columns[name][0], columns[name][1].copy())
        return snapshot

    def _verified(
        self, listed: Manifest, wanted: Sequence[str], make_room: MakeRoom | None
    ) -> tuple[list[tuple[OwnRun, Bytes]], np.ndarray, list[SlabSlice]]:
        """Read the own object and the wanted pages and check their digests, several at a time, the longest first:
        -> own object, token ids int32 [pages, PAGE], the rest of each page object."""
        body = listed.page_bytes - PAGE_HEADER
        coming = listed.own_bytes + len(wanted) * body
        # In runs that fit the slabs in stock: a larger one would have to be made first, which takes as long as to read.
        runs = layout.own_runs(listed, self._slabs.size)
        pieces = [self._own_cuts.cut(run.stop - run.start) for run in runs]
        own = [(run, piece.memory) for run, piece in zip(runs, pieces, strict=True)]
        work = deque([_Reading(listed.own, tuple(p.memory for p in pieces), tuple(p.slab for p in pieces))])
        if make_room is not None and coming > self._slabs.spare():
            self._verify_all(work)  # alone, so that an altered one evicts nothing
            make_room(coming)
        # Token ids lie elsewhere: as many pages fit a slab as if there were none.
        heads = np.empty((len(wanted), PAGE), dtype=np.int32)
        bodies = [self._page_cuts.cut(body) for _ in wanted]
        for name, head, piece in zip(wanted, heads.view(np.uint8), bodies, strict=True):
            work.append(_Reading(name, (head, piece.memory), (piece.slab,)))
        for reader in [self._readers.submit(self._verify_all, work) for _ in range(min(READERS, len(work)))]:
            reader.result()
        return own, heads, bodies

    def _verify_all(self, work: deque[_Reading]) -> None:
        """Until nothing is left to be read, or one of the threads finds an object altered."""
        while True:
            try:
                reading = work.popleft()
            except IndexError:
                return
            try:
                self._verify(reading)
            except BaseException:
                work.clear()
                raise

    def _verify(self, reading: _Reading) -> None:
        for slab in reading.slabs:
            slab.make()
        if read_into(reading.memories, f"{self._folder.objects}/{reading.name}") != reading.name:
            self._drop_object(reading.name)
            raise BadSnapshotFile(f"object {reading.name} has been altered: its digest is not its name")

    def close(self) -> None:
        self._readers.shutdown()

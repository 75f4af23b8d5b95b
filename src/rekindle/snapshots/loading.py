"""Reading snapshots back into slabs, every byte verified."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import numpy as np
from blake3 import blake3

from rekindle.errors import BadSnapshotFile, SnapshotMismatch
from rekindle.hurry import give_way
from rekindle.snapshots import layout
from rekindle.snapshots.files import ReadFiles, check_sizes, digest, read_whole
from rekindle.snapshots.folder import StoreFolder
from rekindle.snapshots.layout import OwnRun, PageRun
from rekindle.snapshots.live import LivePage, LivePages
from rekindle.snapshots.manifest import PAGE_HEADER, Manifest, stretches_of
from rekindle.snapshots.rank import stand_back
from rekindle.snapshots.record import Expected, join_tokens
from rekindle.snapshots.slabs import Cuts, Slabs, SlabSlice
from rekindle.snapshots.types import Snapshot
from rekindle.spec import PAGE

MakeRoom = Callable[[int], None]  # evicts from RAM until this many bytes fit
Columns = dict[str, tuple[layout.Pages, np.ndarray]]  # by page object: the pages of all layers, and the token ids
T = TypeVar("T")

READERS = min(os.cpu_count() or 1, 16)  # threads that read snapshots …
RANK = 5  # … and their niceness: together they would keep the token loop from every core
# Bytes of pages that a reader reads before it hashes them: between two reads it waits for the interpreter's lock, and
# of much more the processor's caches would have lost the first before it is hashed.
READ_AT_ONCE = 4 << 20
MANY_THREADS = 16 << 20  # bytes of an object from which hashing it is worth several threads


class Reads:
    """What readers do for one load. Once a part of it has failed, or the load ends, no more is read."""

    def __init__(self, readers: ThreadPoolExecutor) -> None:
        self._readers = readers
        self._left = deque[Callable[[], None]]()
        self._begun = list[Future[None]]()

    def __enter__(self) -> Reads:
        return self

    def __exit__(self, *raised: object) -> None:
        self._left.clear()

    def begin(self, reads: Sequence[Callable[[], None]]) -> None:
        """A reader takes one after the other: handed over one by one they would cost it more than the files do."""
        self._left += reads
        self._begun += [self._readers.submit(self._read) for _ in range(min(READERS, len(reads)))]

    def _read(self) -> None:
        while True:
            try:
                read = self._left.popleft()
            except IndexError:
                return
            try:
                give_way()
                read()
            except BaseException:
                self._left.clear()
                raise

    def finish(self) -> None:
        """Wait for all that was begun; raises what one of them did."""
        for each in self._begun:
            each.result()


class LoadsUnderWay:
    """Loads that have begun, and the bytes they bring. One that memory has no room for beside them waits, and those
    that come after it wait behind it."""

    def __init__(self) -> None:
        self.count = 0
        self.coming = 0
        self._changed = threading.Condition()
        self._line = deque[object]()

    @contextmanager
    def entered(self, need: Callable[[], tuple[int, T]], most: int | None) -> Iterator[T]:
        """need: bytes that the load would bring now, and what it knows; asked again after others have ended, which may
        have brought a part of it. most: bytes that all loads under way may bring, if there are several."""
        place = object()
        with self._changed:
            self._line.append(place)
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._line[0] is place)
            while True:
                before = self.count
                nbytes, known = need()
                if self._begin(nbytes, most):
                    break
                del known  # what it holds may leave memory meanwhile
                self._wait_for_an_end(before)
        finally:
            with self._changed:
                self._line.remove(place)
                self._changed.notify_all()
        try:
            yield known
        finally:
            with self._changed:
                self.count -= 1
                self.coming -= nbytes
                self._changed.notify_all()

    def _wait_for_an_end(self, before: int) -> None:
        """Of one of so many loads; none begins meanwhile."""
        with self._changed:
            self._changed.wait_for(lambda: self.count < before)

    def _begin(self, nbytes: int, most: int | None) -> bool:
        with self._changed:
            fits = most is None or not self.count or self.coming + nbytes <= most
            if fits:
                self.count += 1
                self.coming += nbytes
            return fits


class Loader:
    def __init__(
        self,
        folder: StoreFolder,
        expected: Expected,
        live: LivePages,
        slabs: Slabs,
        files: ReadFiles,
        drop_object: Callable[[str], None],
    ) -> None:
        """drop_object: is called with the name of an altered one."""
        self._folder = folder
        self._expected = expected
        self._live = live
        self._slabs = slabs
        self._files = files
        self._drop_object = drop_object
        # Pages outlive the own objects they were loaded with: in one slab they would keep each other's memory.
        self._own_cuts, self._page_cuts = Cuts(slabs), Cuts(slabs)
        self._under_way = LoadsUnderWay()
        self._readers = ThreadPoolExecutor(READERS, "rekindle-disk-reader", stand_back, (RANK,))

    def load(self, id: str, make_room: MakeRoom | None, most: int | None = None) -> Snapshot:
        """The snapshot, read and verified: every object's digest is its name, and the tokens give its id. most: bytes
        that all loads under way may bring, if there are several."""
        listed = self._expected.read(self._folder.manifest(id))
        # All lengths before any digest: a chain with a lost page is refused at once.
        check_sizes(self._files, {self._path(name): nbytes for name, nbytes in listed.objects.items()})
        need = partial(self._need, listed)
        with self._under_way.entered(need, most) as columns, self._slabs.reading():
            return self._load(id, listed, columns, make_room)

    def _need(self, listed: Manifest) -> tuple[int, Columns]:
        """Bytes that a load brings now, and the pages that it need not read."""
        columns = self._live.find(listed.pages)
        unknown = len({*listed.pages} - columns.keys())
        return listed.own_bytes + unknown * (listed.page_bytes - PAGE_HEADER), columns

    def _load(self, id: str, listed: Manifest, columns: Columns, make_room: MakeRoom | None) -> Snapshot:
        wanted = [name for name in dict.fromkeys(listed.pages) if name not in columns]
        own = self._own_memory(listed)
        with Reads(self._readers) as own_reads, Reads(self._readers) as page_reads:
            unread = deque(range(len(own)))
            own_reads.begin([partial(self._read_own, listed, own, part, unread) for part in self._shares(len(own))])
            if make_room is not None and self._under_way.coming > self._slabs.spare():
                own_reads.finish()  # alone, so that an altered one evicts nothing
                make_room(self._under_way.coming)  # for all of them, none of which the tier counts yet
            runs = self._page_runs(listed, wanted)
            coming = listed.own_bytes + sum(run.bodies.memory.nbytes for run in runs)
            page_reads.begin([partial(self._verify_pages, *batch) for batch in _batches(runs, coming // READERS)])
            # While they are read, all that needs no bytes.
            for run in runs:
                columns |= zip(run.names, zip(layout.read_pages(listed, run), run.heads, strict=True), strict=True)
            give_way()
            parts, logits = layout.read_parts(
                listed, [columns[name][0] for name in listed.pages], [(run, piece.memory) for run, piece in own]
            )
            fresh = {name: LivePage(*columns[name]) for name in wanted}
            own_reads.finish()
            page_reads.finish()
        tokens = join_tokens([columns[name][1] for name in listed.pages], listed.tail_tokens)
        self._expected.check_tokens(tokens, id, listed.whose)
        try:
            snapshot = Snapshot(tokens, parts, logits, listed.grid, stretches_of(listed), listed.whose)
        except SnapshotMismatch as error:
            raise BadSnapshotFile(f"{id}: {error}") from error
        self._live.remember(fresh)
        return snapshot

    def _path(self, name: str) -> str:
        return f"{self._folder.objects}/{name}"

    # The own object

    def _own_memory(self, listed: Manifest) -> list[tuple[OwnRun, SlabSlice]]:
        """In runs that fit the slabs in stock: a larger one would have to be made first, which takes as long as to
        read. Several threads read them."""
        runs = layout.own_runs(listed, self._slabs.size)
        return [(run, self._own_cuts.cut(run.stop - run.start)) for run in runs]

    def _shares(self, runs: int) -> list[range]:
        """Of so many runs, what readers read at once. Beside other loads all readers have work, and take several: after
        each they wait for the interpreter's lock."""
        loads = self._under_way.count
        parts = runs if loads == 1 else min(runs, max(1, READERS // loads))
        return [range(runs * part // parts, runs * (part + 1) // parts) for part in range(parts)]

    def _read_own(
        self, listed: Manifest, own: Sequence[tuple[OwnRun, SlabSlice]], part: range, unread: deque[int]
    ) -> None:
        """Some runs of it. unread: as many numbers as runs that are not read yet; whoever takes out the last one
        verifies all of it, on a reader's thread, whose priority the threads of blake3 have then: beside other loads on
        that thread alone, since all cores are at work."""
        taken = [own[number] for number in part]
        for _, piece in taken:
            piece.slab.make()
        path = self._path(listed.own)
        read_whole(self._files, [(path, run.start, [piece.memory]) for run, piece in taken], listed.own_bytes)
        if not [unread.pop() for _ in part][-1]:
            many = listed.own_bytes >= MANY_THREADS and self._under_way.count == 1
            self._check(listed.own, digest((piece.memory for _, piece in own), blake3.AUTO if many else 1))

    # Pages

    def _page_runs(self, listed: Manifest, names: Sequence[str]) -> list[PageRun]:
        runs, body = list[PageRun](), listed.page_bytes - PAGE_HEADER
        while names:
            count = min(len(names), self._page_cuts.fitting(max(1, body)))
            heads = np.empty((count, PAGE), dtype=np.int32)  # of each run: they live no longer than its slab
            runs.append(PageRun(names[:count], heads, self._page_cuts.cut(count * body)))
            names = names[count:]
        return runs

    def _verify_pages(self, run: PageRun, pages: range) -> None:
        run.bodies.slab.make()
        heads, body = run.heads.view(np.uint8), run.body
        memories = [(heads[page], run.bodies.memory[page * body : (page + 1) * body]) for page in pages]
        names = [run.names[page] for page in pages]
        reads = [(self._path(name), 0, both) for name, both in zip(names, memories, strict=True)]
        read_whole(self._files, reads, PAGE_HEADER + body)
        for name, both in zip(names, memories, strict=True):
            self._check(name, digest(both))

    def _check(self, name: str, found: str) -> None:
        if found != name:
            self._drop_object(name)
            raise BadSnapshotFile(f"object {name} has been altered: its digest is not its name")

    def close(self) -> None:
        self._readers.shutdown()


def _batches(runs: Sequence[PageRun], share: int) -> Iterator[tuple[PageRun, range]]:
    """The pages that a reader reads at once. share: of one reader in all bytes of the load; more would keep others
    idle."""
    for run in runs:
        count, most = len(run.names), max(1, min(READ_AT_ONCE, share) // max(1, run.body))
        parts = -(-count // most)
        for part in range(parts):
            yield run, range(count * part // parts, count * (part + 1) // parts)

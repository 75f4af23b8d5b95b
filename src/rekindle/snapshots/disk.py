"""The disk tier: content-addressed objects, and one manifest per snapshot.

    <directory>/<first 16 hex of the fingerprint>/
        lock                 held by the one process that may write
        manifests/<id>.json  a snapshot exists from the moment its manifest is renamed into place
        objects/<name>       pages and own objects, named by their content; shared by every manifest that names them
        temporary/           files being written
        aside/               manifests that could not be used, each with its reason

Objects are durable before the manifest that names them, so a process killed at any moment leaves whole snapshots
and leftovers that no manifest names; the next writer collects those when it opens the directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rekindle.errors import BadSnapshotFile, DoesNotFit, SnapshotMismatch
from rekindle.prompt import BoundaryKind
from rekindle.snapshots import layout, manifest
from rekindle.snapshots.files import Bytes, check_size, digest, make_folder, read_into, sync_folder, write_whole
from rekindle.snapshots.layout import Pages
from rekindle.snapshots.live import LivePages
from rekindle.snapshots.manifest import FORMAT, NAME, PAGE_HEADER, VERSION, Manifest, PageRow, StretchRow, key_of
from rekindle.snapshots.slabs import Cuts, Piece, Slab, Slabs
from rekindle.snapshots.types import Snapshot
from rekindle.spec import PAGE

logger = logging.getLogger(__name__)

KEPT_ASIDE = 16  # manifests kept for a person to look at
FOLDER_DIGITS = 16  # of the fingerprint
READERS = min(os.cpu_count() or 1, 8)  # threads that read snapshots


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """What the store remembers of one snapshot without opening it."""

    id: str
    position: int
    kind: BoundaryKind
    conversation: str | None
    has_logits: bool
    has_drafter: bool
    saved: int  # seconds since the epoch
    used: float  # last use, seconds since the epoch; only a hint for retention
    own_bytes: int
    manifest_bytes: int
    own: str
    pages: tuple[str, ...]
    page_bytes: int
    tail_tokens: tuple[int, ...]

    @property
    def objects(self) -> dict[str, int]:
        """Every object the snapshot needs, once, with its size."""
        return {**dict.fromkeys(self.pages, self.page_bytes), self.own: self.own_bytes}

    @property
    def nbytes(self) -> int:
        """Bytes it would take alone on an empty disk."""
        return self.manifest_bytes + sum(self.objects.values())


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """An object, and memory for it in a slab; token ids of a page have theirs outside."""

    name: str
    memories: tuple[Bytes, ...]
    slab: Slab


class DiskStore:
    """Snapshots of one model under a directory. Thread-safe; `save` is meant for one background thread."""

    def __init__(
        self,
        directory: Path | str,
        fingerprint: str,
        budget: int,
        *,
        slabs: Slabs | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """slabs: memory for what is loaded; pinned, a GPU reads it as fast as what was captured."""
        self.folder = folder_of(Path(directory), fingerprint)
        self.fingerprint = fingerprint
        self.budget = budget
        self.make_room: Callable[[int], None] | None = None  # asked to free so many bytes before a save …
        self.make_room_in_ram: Callable[[int], None] | None = None  # … and of RAM for what a load reads
        self.slabs = slabs or Slabs()
        self.bad_files = 0
        self._clock = clock
        self._objects = self.folder / "objects"
        self._manifests = self.folder / "manifests"
        self._temporary = self.folder / "temporary"
        self._aside = self.folder / "aside"
        self._saving = threading.Lock()  # one save at a time; held before, never after, `_state`
        self._state = threading.Lock()  # the fields below; short
        self._records: dict[str, Record] = {}
        self._references: Counter[str] = Counter()
        self._sizes: dict[str, int] = {}  # objects that are there
        self._bytes = 0
        self._deletion_failed = False
        self._live = LivePages()
        # Pages outlive the own objects they were loaded with: in one slab they would keep each other's memory.
        self._own_cuts, self._page_cuts = Cuts(self.slabs), Cuts(self.slabs)
        self._numbers = itertools.count()
        self._readers = ThreadPoolExecutor(READERS, "rekindle-disk-reader")
        self._lock_file = self._become_writer()
        self._scan()

    # Opening

    @property
    def read_only(self) -> bool:
        return self._lock_file is None

    def _become_writer(self) -> int | None:
        """The descriptor of the lock if we are the one writer; None, and one line in the log, if we may only read."""
        try:
            for folder in (self.folder, self._objects, self._manifests, self._temporary, self._aside):
                make_folder(folder)
            descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            logger.warning("disk tier %s is read-only: %s; hits are served, nothing is saved", self.folder, error)
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            why = "another server writes to it" if isinstance(error, BlockingIOError) else str(error)
            logger.warning("disk tier %s is read-only: %s; hits are served, nothing is saved", self.folder, why)
            return None
        return descriptor

    def _scan(self) -> None:
        """Take in every whole manifest, set the others aside, and collect what nobody names."""
        self._sizes = _sizes_in(self._objects)
        bad: list[str] = []
        for path in sorted(_files_in(self._manifests)):
            try:
                self._admit(self._examine(path))
            except BadSnapshotFile as error:
                bad.append(str(error))
                self.bad_files += 1
                self._move_aside(path, str(error))
        if bad:
            logger.warning("disk tier %s: set %d manifests aside, the first: %s", self.folder, len(bad), bad[0])
        if not self.read_only:
            self._collect()
        self._bytes = sum(r.manifest_bytes for r in self._records.values()) + sum(self._sizes.values())

    def _examine(self, path: Path) -> Record:
        """A record of the manifest at `path` if all its objects are there in full length."""
        if path.suffix != ".json" or not NAME.fullmatch(path.stem):
            raise BadSnapshotFile(f"{path.name}: not the name of a manifest")
        listed = manifest.read(path, self.fingerprint)
        for name, nbytes in listed.objects.items():
            if self._sizes.get(name) != nbytes:
                raise BadSnapshotFile(f"{path.name}: object {name} should have {nbytes} bytes, {self._sizes.get(name)}")
        try:
            status = path.stat()
        except OSError as error:
            raise BadSnapshotFile(f"{path.name}: cannot be read: {error.strerror}") from error
        return self._record(listed, status.st_size, status.st_mtime)

    @staticmethod
    def _record(listed: Manifest, manifest_bytes: int, used: float) -> Record:
        return Record(
            id=listed.id,
            position=listed.position,
            kind=BoundaryKind(listed.kind),
            conversation=listed.conversation,
            has_logits=listed.has_logits,
            has_drafter=any(row.name == "drafter" for row in listed.parts),
            saved=listed.saved,
            used=used,
            own_bytes=listed.own_bytes,
            manifest_bytes=manifest_bytes,
            own=listed.own,
            pages=tuple(map(sys.intern, listed.pages)),  # a chain repeats its names in every manifest
            page_bytes=listed.page_bytes,
            tail_tokens=listed.tail_tokens,
        )

    def _admit(self, record: Record) -> None:
        self._records[record.id] = record
        self._references.update(record.objects.keys())

    def _collect(self) -> None:
        """Leftovers of a process that died: half-written files and objects that no manifest names."""
        for path in _files_in(self._temporary):
            self._unlink(path)
        for path in _files_in(self._objects):
            if path.name not in self._references and self._unlink(path):
                self._sizes.pop(path.name, None)

    # What is here

    @property
    def bytes(self) -> int:
        """Bytes of all manifests and objects, each object once."""
        with self._state:
            return self._bytes

    def __len__(self) -> int:
        with self._state:
            return len(self._records)

    def __contains__(self, id: str) -> bool:
        with self._state:
            return id in self._records

    def records(self) -> list[Record]:
        """Least recently used first."""
        with self._state:
            return sorted(self._records.values(), key=lambda record: record.used)

    def keyed_records(self) -> Iterator[tuple[Record, np.ndarray]]:
        """Every snapshot with its tokens, least recently used first; one whose tokens do not give its id is set aside.

        Reads the head of each page object once, however many snapshots share it.
        """
        heads: dict[str, np.ndarray] = {}
        for record in self.records():
            try:
                tokens = self._tokens(record, heads)
            except BadSnapshotFile as error:
                self.set_aside(record.id, str(error))
            else:
                yield record, tokens

    def _tokens(self, record: Record, heads: dict[str, np.ndarray]) -> np.ndarray:
        for name in record.pages:
            if name not in heads:
                heads[name] = _read_head(self._objects / name)
        tokens = _join([heads[name] for name in record.pages], record.tail_tokens)
        if key_of(self.fingerprint, tokens) != record.id:
            raise BadSnapshotFile(f"{record.id}: the token ids in its pages are not those of its key")
        return tokens

    # Saving

    def save(
        self,
        snapshot: Snapshot,
        kind: BoundaryKind = BoundaryKind.END,
        conversation: str | None = None,
        rest: Callable[[], None] = lambda: None,
    ) -> Record:
        """Make a snapshot durable; `rest` is called after every piece of work. Raises OSError when the disk refuses and
        DoesNotFit when the budget does; either way the store is as it was."""
        assert not self.read_only, "the caller asks read_only before it saves"
        with self._saving:
            columns = layout.page_columns(snapshot)
            rows = layout.page_rows(snapshot)
            names = tuple(self._page_name(snapshot, i, column, rows, rest) for i, column in enumerate(columns))
            own = layout.own_object(snapshot)
            listed = Manifest(
                format=FORMAT,
                version=VERSION,
                fingerprint=self.fingerprint,
                id=key_of(self.fingerprint, snapshot.tokens),
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
            )
            pages = {name: i for i, name in enumerate(names)}

            def pieces(name: str) -> Sequence[np.ndarray]:
                if name == listed.own:
                    return own.pieces
                i = pages[name]
                return layout.page_pieces(_page_tokens(snapshot, i), columns[i], rows)

            record = self._save(listed, pieces, rest)
            for i, (name, column) in enumerate(zip(names, columns, strict=True)):
                if self._live.find(name) is None:
                    self._live.remember(name, column, _page_tokens(snapshot, i).copy())
            return record

    def _page_name(
        self, snapshot: Snapshot, i: int, column: Pages, rows: Sequence[PageRow], rest: Callable[[], None]
    ) -> str:
        """Only a page not met before is hashed."""
        name = self._live.name_of(column)
        if name is None:
            name = digest(layout.page_pieces(_page_tokens(snapshot, i), column, rows))
            rest()
        return name

    def adopt(self, listed: Manifest, pieces: Callable[[str], Sequence[np.ndarray]]) -> Record:
        """Save a snapshot that is bytes already (an import); the caller has verified every object."""
        assert not self.read_only, "the caller asks read_only before it saves"
        assert listed.fingerprint == self.fingerprint, "the caller opened the store of another model"
        with self._saving:
            return self._save(listed, pieces, lambda: None)

    def _save(
        self, listed: Manifest, pieces: Callable[[str], Sequence[np.ndarray]], rest: Callable[[], None]
    ) -> Record:
        text = np.frombuffer(manifest.encode(listed), dtype=np.uint8)
        # From here no eviction can delete an object that this snapshot needs, whether it is there or not.
        missing = self._reserve(listed.objects)
        try:
            self._find_room(listed, sum(missing.values()) + text.nbytes, text.nbytes)
            for name in missing:
                self._write_object(name, pieces(name))
                rest()
            if missing:
                sync_folder(self._objects)
            path = self._manifest_path(listed.id)
            write_whole(self._new_temporary(), path, [text])
        except BaseException:
            self._release(listed.objects)
            raise
        # The snapshot exists. Should the last sync fail, it is forgotten like any evicted one.
        record = self._record(listed, text.nbytes, self._clock())
        with self._state:
            replaced = self._records.get(listed.id)
            self._records[listed.id] = record
            self._bytes += record.manifest_bytes - (replaced.manifest_bytes if replaced else 0)
        if replaced:
            self._release(replaced.objects)
        try:
            sync_folder(self._manifests)
        except OSError:
            self.remove(listed.id)
            raise
        return record

    def _reserve(self, objects: dict[str, int]) -> dict[str, int]:
        """Refer to every object; returns those that are not on disk."""
        with self._state:
            self._references.update(objects.keys())
            return {name: nbytes for name, nbytes in objects.items() if name not in self._sizes}

    def _find_room(self, listed: Manifest, wanted: int, text_bytes: int) -> None:
        alone = sum(listed.objects.values()) + text_bytes
        if alone > self.budget:
            raise DoesNotFit(f"a snapshot of {alone} bytes is larger than the whole disk budget of {self.budget}")
        over = self.bytes + wanted - self.budget
        if over > 0 and self.make_room is not None:
            self.make_room(over)
        over = self.bytes + wanted - self.budget
        if over > 0:
            raise DoesNotFit(f"the disk budget of {self.budget} bytes lacks {over}, and nothing more may be evicted")

    def _write_object(self, name: str, pieces: Sequence[np.ndarray]) -> None:
        nbytes = write_whole(self._new_temporary(), self._objects / name, pieces)
        with self._state:
            self._sizes[name] = nbytes
            self._bytes += nbytes

    def _new_temporary(self) -> Path:
        return self._temporary / f"{os.getpid()}-{next(self._numbers)}"

    def _manifest_path(self, id: str) -> Path:
        return self._manifests / f"{id}.json"

    # Loading

    def load(self, id: str) -> Snapshot:
        """The snapshot, read and verified: every object's digest is its name, and the tokens give its id."""
        listed = manifest.read(self._manifest_path(id), self.fingerprint)
        # All lengths before any digest: a chain with a lost page is refused at once.
        for name, nbytes in listed.objects.items():
            check_size(f"{self._objects}/{name}", nbytes)
        found = {name: self._live.find(name) for name in listed.pages}
        wanted = [name for name, column in found.items() if column is None]
        own, heads, bodies = self._verified(listed, wanted)
        columns = {name: column for name, column in found.items() if column is not None}
        for name, head, column in zip(wanted, heads, layout.read_pages(listed, bodies), strict=True):
            columns[name] = (column, head)
        tokens = _join([columns[name][1] for name in listed.pages], listed.tail_tokens)
        if key_of(self.fingerprint, tokens) != id:
            raise BadSnapshotFile(f"{id}: its token ids are not those of its key")
        try:
            by_page = [columns[name][0] for name in listed.pages]
            snapshot = layout.read_snapshot(listed, tokens, by_page, torch.from_numpy(own.memory))
        except SnapshotMismatch as error:
            raise BadSnapshotFile(f"{id}: {error}") from error
        for name in wanted:
            self._live.remember(name, columns[name][0], columns[name][1].copy())
        return snapshot

    def _verified(self, listed: Manifest, wanted: Sequence[str]) -> tuple[Piece, np.ndarray, list[Piece]]:
        """Read the own object and the wanted pages and check their digests, several at a time, the longest first:
        -> own object, token ids int32 [pages, PAGE], what stands behind them in each page object."""
        body = listed.page_bytes - PAGE_HEADER
        coming = listed.own_bytes + len(wanted) * body
        own = self._own_cuts.cut(listed.own_bytes)
        work = deque([_Reading(listed.own, (own.memory,), own.slab)])
        if self.make_room_in_ram is not None and coming > self.slabs.spare():
            self._verify_all(work)  # alone, so that an altered one sends nobody away
            self.make_room_in_ram(coming)
        # Token ids lie elsewhere: as many pages fit a slab as if there were none.
        heads = np.empty((len(wanted), PAGE), dtype=np.int32)
        bodies = [self._page_cuts.cut(body) for _ in wanted]
        for name, head, piece in zip(wanted, heads.view(np.uint8), bodies, strict=True):
            work.append(_Reading(name, (head, piece.memory), piece.slab))
        for reader in [self._readers.submit(self._verify_all, work) for _ in range(min(READERS, len(work)))]:
            reader.result()
        return own, heads, bodies

    def _verify_all(self, work: deque[_Reading]) -> None:
        """Until nothing is left to be read, or somebody finds that it is of no use."""
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
        reading.slab.make()
        if read_into(reading.memories, f"{self._objects}/{reading.name}") != reading.name:
            self._drop_object(reading.name)
            raise BadSnapshotFile(f"object {reading.name} has been altered: its digest is not its name")

    def touch(self, id: str) -> None:
        """Note a use, for retention after a restart. A hint: a disk that refuses it loses nothing else."""
        if not self.read_only:
            with contextlib.suppress(OSError):
                os.utime(self._manifest_path(id))

    # Removing

    def remove(self, id: str) -> None:
        """Evict a snapshot: its manifest first, then every object that no other manifest names.

        Nothing is synced: should power fail and only some of it last, the manifest misses an object and is set aside.
        """
        assert not self.read_only, "the caller asks read_only before it evicts"
        with self._state:
            record = self._records.pop(id, None)
            if record is None:
                return
            if self._unlink(self._manifest_path(id)):
                self._bytes -= record.manifest_bytes
        self._release(record.objects)

    def set_aside(self, id: str, reason: str) -> None:
        """Take a snapshot that must not be used again out of sight; one line in the log, never an error."""
        with self._state:
            record = self._records.pop(id, None)
            if record is None:
                return
            self.bad_files += 1
            self._move_aside(self._manifest_path(id), reason)
            self._bytes -= record.manifest_bytes
        logger.warning("disk tier: snapshot %s at %d set aside: %s", id, record.position, reason)
        self._release(record.objects)

    def _move_aside(self, path: Path, reason: str) -> None:
        """Keep the manifest and the reason for a person to look at. Its objects are not kept: what is sound in them
        lives on in other snapshots, and an altered one is worth nothing."""
        if self.read_only:
            return
        # A disk that refuses the move leaves a manifest that will be refused again; the caller has forgotten it.
        with contextlib.suppress(OSError):
            os.replace(path, self._aside / path.name)
            (self._aside / f"{path.name}.reason").write_text(reason + "\n")
            kept = sorted((p for p in _files_in(self._aside) if p.suffix != ".reason"), key=lambda p: p.stat().st_mtime)
            for old in kept[:-KEPT_ASIDE]:
                old.unlink(missing_ok=True)
                old.with_name(f"{old.name}.reason").unlink(missing_ok=True)

    def _release(self, objects: Iterable[str]) -> None:
        for name in objects:
            with self._state:
                self._references[name] -= 1
                if self._references[name] > 0:
                    continue
                del self._references[name]
                self._delete_object(name)

    def _drop_object(self, name: str) -> None:
        """Delete an altered object, so that the next save of the same content writes it anew."""
        with self._state:
            if not self.read_only:
                self._delete_object(name)

    def _delete_object(self, name: str) -> None:
        if self.read_only or name not in self._sizes:
            return
        if self._unlink(self._objects / name):
            self._bytes -= self._sizes.pop(name)
            self._live.forget(name)

    def _unlink(self, path: Path) -> bool:
        """False if the disk refuses; what stays is collected at the next open. Said once, not per file."""
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            if not self._deletion_failed:
                logger.warning("disk tier %s: cannot delete: %s", self.folder, error)
            self._deletion_failed = True
            return False
        return True

    def close(self) -> None:
        """Give the lock back. What was loaded stays usable."""
        self._readers.shutdown()
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None


def folder_of(directory: Path, fingerprint: str) -> Path:
    """Each model has its own folder, so that models never mix."""
    usable = re.fullmatch(rf"[0-9a-f]{{{FOLDER_DIGITS},}}", fingerprint)
    assert usable, f"a fingerprint is {FOLDER_DIGITS} or more hex digits, not {fingerprint!r}"
    return directory / fingerprint[:FOLDER_DIGITS]


def _files_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.is_file(follow_symlinks=False)]
    except OSError:  # a directory that could not be made, or may not be read: said when it was opened
        return []


def _sizes_in(folder: Path) -> dict[str, int]:
    sizes = {}
    for path in _files_in(folder):
        with contextlib.suppress(FileNotFoundError):  # evicted by the writer while we read
            sizes[path.name] = path.stat().st_size
    return sizes


def _read_head(path: Path) -> np.ndarray:
    """The token ids at the front of a page object. Not verified: the digest over all tokens of a snapshot is."""
    try:
        with path.open("rb") as file:
            data = file.read(PAGE_HEADER)
    except OSError as error:
        raise BadSnapshotFile(f"{path.name}: cannot be read: {error.strerror}") from error
    if len(data) != PAGE_HEADER:
        raise BadSnapshotFile(f"{path.name}: ends inside its token ids")
    return np.frombuffer(data, dtype=np.int32)


def _page_tokens(snapshot: Snapshot, page: int) -> np.ndarray:
    return snapshot.tokens[page * PAGE : (page + 1) * PAGE]


def _join(pages: Sequence[np.ndarray], tail: Sequence[int]) -> np.ndarray:
    return np.concatenate([*pages, np.asarray(tail, dtype=np.int32)], dtype=np.int32)

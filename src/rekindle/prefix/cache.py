"""The prefix cache: the index, both tiers and the policy behind one door, and one lock."""

from __future__ import annotations

import contextlib
import logging
import threading
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from rekindle.config import show_bytes
from rekindle.errors import BadSnapshotFile
from rekindle.prefix.index import PrefixIndex, Walk
from rekindle.prefix.retention import Conversations, Retention
from rekindle.prefix.types import Entry, Hit, Lookup, Miss, Tier
from rekindle.prompt import BoundaryKind
from rekindle.snapshots.disk import DiskStore, Record
from rekindle.snapshots.memory import MemoryStore
from rekindle.snapshots.slabs import Slabs
from rekindle.snapshots.types import Snapshot
from rekindle.snapshots.writer import DiskWriter, Save

log = logging.getLogger("rekindle.prefix")

CONTINUATIONS = 8  # that are named for one prefix; more answers than that to one prompt are hardly kept


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the start, and how things stand now."""

    lookups: int  # also those whose request ended before it started, or waited and looked again
    hits: Mapping[str, int]  # that were restored, by tier
    restored: Mapping[str, int]  # tokens, by tier
    misses: Mapping[str, int]  # starts without any hit, by reason
    short_hits: Mapping[str, int]  # hits shorter than the prompt, by reason
    published: int
    already_published: int
    evictions: Mapping[str, int]  # by "tier:what became of it"
    saves: int
    refused_saves: Mapping[str, int]  # by reason
    bad_files: int
    set_aside: int  # by an audit
    ram_entries: int
    ram_bytes: int
    ram_budget: int
    disk_entries: int
    disk_bytes: int
    disk_budget: int
    saves_waiting: int
    disk: str  # off, read-only, ok or troubled


class PrefixCache:
    """Published snapshots in RAM and on disk. Every method may be called from any thread; none waits for the disk
    except `lookup` for the file it restores, and `flush` and `close`."""

    def __init__(
        self, ram_budget: int, disk: DiskStore | None = None, *, slabs: Sequence[Slabs] = (), queue: int = 4
    ) -> None:
        """slabs: that captures lie in; beside those of the disk tier they share what the RAM tier leaves."""
        self._lock = threading.RLock()  # everything below; held for bookkeeping only, never while a file is read
        self._index = PrefixIndex()
        self._memory = MemoryStore(ram_budget)
        self._disk = disk
        self._writer = DiskWriter(disk, queue) if disk is not None and not disk.read_only else None
        self._retention = {
            Tier.RAM: Retention(Tier.RAM, ram_budget),
            Tier.DISK: Retention(Tier.DISK, disk.budget if disk else 0),
        }
        self._conversations = Conversations(self._place)
        self._operations = 0
        self._count: Counter[str] = Counter()
        self._hits: Counter[str] = Counter()
        self._restored: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._short_hits: Counter[str] = Counter()
        self._evictions: Counter[str] = Counter()
        self._slabs = list(dict.fromkeys([*slabs, *([disk.slabs] if disk is not None else [])]))
        for its_slabs in self._slabs:
            its_slabs.spare = self._spare
        if disk is not None:
            self._take_in(disk)

    def _spare(self) -> int:
        """Bytes that may lie idle, of each that lends memory."""
        return (self._memory.budget - self._memory.bytes) // len(self._slabs)

    def _take_in(self, disk: DiskStore) -> None:
        """Start with what an earlier run left on disk."""
        for record, tokens in disk.keyed_records():
            entry = Entry(
                position=record.position,
                kind=record.kind,
                conversation=record.conversation or uuid.uuid4().hex,
                own_bytes=record.own_bytes,
                has_logits=record.has_logits,
                has_drafter=record.has_drafter,
                inherited=True,
            )
            self._use(entry)
            self._hang_on_disk(entry, tokens, record.id)
        disk.make_room = self._make_room_on_disk
        disk.make_room_in_ram = self._make_room_for_load
        if not disk.read_only:
            self._make_room_on_disk(disk.bytes - disk.budget)
        log.info("snapshots found: %d (%s) in %s", len(disk), show_bytes(disk.bytes), disk.folder)

    # Looking up

    def lookup(self, tokens: Sequence[int] | np.ndarray, limit: int | None = None) -> Lookup:
        """The longest published prefix of a prompt, of at most `limit` tokens, read from disk if need be.

        The hit is pinned: its taker calls `hit.release()`, and `taken()` if it started with it. A snapshot as long as
        the prompt serves only with its logits: without them nothing could be sampled.
        """
        prompt = np.asarray(tokens, dtype=np.int32)
        with self._lock:
            walk = self._index.walk(prompt)
        return self._answer(walk, prompt, len(prompt) if limit is None else limit)

    def lookup_in_ram(self, tokens: Sequence[int] | np.ndarray) -> Lookup | None:
        """The same without a wait; None, and nothing is counted or pinned, where a file would have to be read."""
        prompt = np.asarray(tokens, dtype=np.int32)
        with self._lock:
            walk = self._index.walk(prompt)
            longest = next((entry for entry in walk.candidates if _serves(entry, len(prompt))), None)
            if longest is not None and longest.snapshot is None:
                return None
            return self._answer(walk, prompt, len(prompt))

    def lookup_of_nothing(self, reason: Miss) -> Lookup:
        """For a start that no snapshot can serve: it counts as a miss like any other."""
        return Lookup(None, 0, None, None, reason, partial(self._note_taken, None, reason))

    def _answer(self, walk: Walk, prompt: np.ndarray, limit: int) -> Lookup:
        with self._lock:
            self._count["lookups"] += 1
            self._conversations.looked_up()
        hit, hurdle = self._first_usable(walk, prompt, limit)
        miss = self._explain(hit, hurdle, walk, len(prompt))
        if hit is not None:
            self._note_use(hit, walk)
        ours = int(prompt[walk.depth]) if walk.depth < len(prompt) else None
        return Lookup(hit, walk.depth, ours, walk.seen, miss, partial(self._note_taken, hit, miss))

    def _first_usable(self, walk: Walk, prompt: np.ndarray, limit: int) -> tuple[Hit | None, Miss | None]:
        """The longest candidate that can be used, and what stood in the way of a longer one."""
        hurdle: Miss | None = None
        for entry in walk.candidates:
            if entry.position > limit:
                continue
            if not _serves(entry, len(prompt)):
                hurdle = Miss.NO_LOGITS
                continue
            self.acquire(entry)  # before its file is read: what is being restored is no victim
            try:
                fetched = self._fetch(entry)
            except BaseException:
                self.release(entry)
                raise
            if isinstance(fetched, Miss):
                self.release(entry)
                hurdle = fetched
                continue
            snapshot, tier = fetched
            assert np.array_equal(snapshot.tokens, prompt[: entry.position]), "a hit is a prefix of its prompt"
            return Hit(snapshot, entry.position, tier, entry, partial(self.release, entry)), hurdle
        return None, hurdle

    def _fetch(self, entry: Entry) -> tuple[Snapshot, Tier] | Miss:
        with self._lock:
            if entry.snapshot is not None:
                return entry.snapshot, Tier.RAM
            disk, id = self._disk, entry.disk_id
        if disk is None or id is None:
            return Miss.EVICTED
        try:
            snapshot = disk.load(id)
        except BadSnapshotFile as error:
            disk.set_aside(id, str(error))
            with self._lock:
                self._drop_from_disk(entry, "bad_file")
            return Miss.BAD_FILE
        disk.touch(id)
        with self._lock:
            self._lift_to_ram(entry, snapshot)
        return snapshot, Tier.DISK

    def known_length(self, tokens: Sequence[int] | np.ndarray) -> int:
        """How much of a prompt a lookup would find now; nothing is loaded, pinned or counted."""
        prompt = np.asarray(tokens, dtype=np.int32)
        with self._lock:
            candidates = self._index.walk(prompt).candidates
            return max((entry.position for entry in candidates if _serves(entry, len(prompt))), default=0)

    def continuations(self, tokens: Sequence[int] | np.ndarray, longest: int) -> list[list[int]]:
        """Runs of at most `longest` tokens that published prefixes have behind exactly these, newest first.

        Nothing is loaded, pinned or counted.
        """
        prompt = np.asarray(tokens, dtype=np.int32)
        with self._lock:
            return [run.tolist() for run in self._index.below(prompt, longest, CONTINUATIONS)]

    @staticmethod
    def _explain(hit: Hit | None, hurdle: Miss | None, walk: Walk, length: int) -> Miss | None:
        reached = hit.position if hit is not None else 0
        if reached == length:
            return None
        if hurdle is not None:
            return hurdle
        if walk.depth == 0 and walk.seen is None:
            return Miss.EMPTY
        return Miss.UNSEEN if reached == walk.depth else Miss.NO_BOUNDARY

    def _note_taken(self, hit: Hit | None, miss: Miss | None) -> None:
        with self._lock:
            if hit is None:
                self._misses[miss or Miss.EMPTY] += 1
                return
            self._hits[hit.tier] += 1
            self._restored[hit.tier] += hit.position
            if miss is not None:
                self._short_hits[miss] += 1

    def _note_use(self, hit: Hit, walk: Walk) -> None:
        """For the policy: asked for is used, whatever becomes of the request."""
        with self._lock:
            hit.entry.hits += 1
            self._use(hit.entry)
            self._conversations.came_back(hit.entry)
            # A conversation deep below its system prompt still stands on it.
            for entry in walk.candidates:
                if entry.kind is BoundaryKind.SYSTEM and entry.position <= hit.position:
                    entry.hits += entry is not hit.entry
                    self._use(entry)

    # Publishing

    def wants(self, tokens: Sequence[int] | np.ndarray, kind: BoundaryKind, drafter: bool = False) -> bool:
        """Whether a snapshot of these tokens is worth capturing; if not, the one there is counts as used."""
        if not self._memory.budget and self._writer is None:
            return False  # it would be evicted before anyone could find it
        with self._lock:
            known = self._index.find(np.asarray(tokens, dtype=np.int32))
            if known is None or not known.has_logits or (drafter and not known.has_drafter):
                return True
            self._meet_again(known, kind)
            return False

    def publish(self, snapshot: Snapshot, kind: BoundaryKind, conversation: str | None = None) -> Entry:
        """Make a snapshot findable under exactly its tokens: in RAM now, on disk in a while.

        Without the name of a conversation it belongs to that of the snapshot it continues. What is published already
        stays, unless the new one holds more (logits, the drafter's context).
        """
        assert snapshot.position > 0, "nothing is not worth publishing"
        for part in snapshot.parts:
            position = getattr(part, "position", snapshot.position)
            assert position == snapshot.position, f"layer {part.layer} at {position}, the key at {snapshot.position}"
        with self._lock:
            walk = self._index.walk(snapshot.tokens)
            known = walk.candidates[0] if walk.candidates else None
            if known is not None and known.position == snapshot.position:
                if not self._holds_more(snapshot, known):
                    self._meet_again(known, kind)
                    self._lift_to_ram(known, snapshot)
                    return known
                self._replace(known)
            entry = Entry(
                position=snapshot.position,
                kind=kind,
                conversation=conversation or self._conversation_of(walk),
                own_bytes=snapshot.own_bytes,
                has_logits=snapshot.logits is not None,
                has_drafter=bool(snapshot.drafter),
            )
            self._count["published"] += 1
            self._use(entry)
            self._hang_in_ram(entry, snapshot)
            self._conversations.published(entry)
            self._offer(entry)
            self._make_room_in_ram()
            return entry

    @staticmethod
    def _holds_more(snapshot: Snapshot, known: Entry) -> bool:
        more_logits = snapshot.logits is not None and not known.has_logits
        more_drafter = bool(snapshot.drafter) and not known.has_drafter
        less = (known.has_logits and snapshot.logits is None) or (known.has_drafter and not snapshot.drafter)
        return (more_logits or more_drafter) and not less and not known.pins and not known.saving

    def _replace(self, known: Entry) -> None:
        id = self._drop(known, "replaced")
        # Before the new one is offered, which will be saved under the same id.
        if id is not None and self._disk is not None and not self._disk.read_only:
            self._disk.remove(id)

    def _meet_again(self, known: Entry, kind: BoundaryKind) -> None:
        """A boundary that is published already: it keeps the kind that is kept longest."""
        self._count["already_published"] += 1
        if kind is BoundaryKind.SYSTEM or known.kind is BoundaryKind.LATTICE:
            self._conversations.forget(known)
            known.kind = kind
        self._use(known)
        self._conversations.published(known)

    @staticmethod
    def _conversation_of(walk: Walk) -> str:
        for entry in walk.candidates:
            if entry.kind is not BoundaryKind.SYSTEM:
                return entry.conversation
        return uuid.uuid4().hex

    def _hang_in_ram(self, entry: Entry, snapshot: Snapshot) -> None:
        entry.snapshot = snapshot
        self._memory.add(snapshot)
        changed = self._index.publish(snapshot.tokens, entry, Tier.RAM)
        self._retention[Tier.RAM].place(entry)
        if changed is not None:
            self._retention[Tier.RAM].place(changed)

    def _hang_on_disk(self, entry: Entry, tokens: np.ndarray, id: str) -> None:
        entry.disk_id = id
        changed = self._index.publish(tokens, entry, Tier.DISK)
        self._retention[Tier.DISK].place(entry)
        if changed is not None:
            self._retention[Tier.DISK].place(changed)

    def _lift_to_ram(self, entry: Entry, snapshot: Snapshot) -> None:
        """A snapshot that was on disk only is in RAM too from now on, as far as the budget goes."""
        if entry.gone or entry.snapshot is not None:
            return
        self._hang_in_ram(entry, snapshot)
        self._make_room_in_ram()

    # Saving

    def _offer(self, entry: Entry) -> bool:
        """Hand an entry to the writer; False if the writer refuses or there is none."""
        snapshot = entry.snapshot
        if self._writer is None or snapshot is None or entry.disk_id is not None:
            return False
        entry.saving = self._writer.offer(self._save_of(entry, snapshot))
        return entry.saving

    def _save_of(self, entry: Entry, snapshot: Snapshot) -> Save:
        def done(record: Record | None) -> None:
            self._saved(entry, snapshot.tokens, record)

        return Save(snapshot, entry.kind, entry.conversation, done)

    def _saved(self, entry: Entry, tokens: np.ndarray, record: Record | None) -> None:
        """On the writer's thread: the entry is on disk, or could not be."""
        with self._lock:
            entry.saving = False
            if record is not None and not entry.gone:
                self._hang_on_disk(entry, tokens, record.id)
            unwanted = entry.gone
            if entry.leaving:
                self._drop_from_ram(entry, "to_disk" if record is not None else "lost")
        if unwanted and record is not None and self._disk is not None:
            self._disk.remove(record.id)

    # Evicting

    def _make_room_in_ram(self, coming: int = 0) -> None:
        """For what is there, and so many bytes more."""
        while self._memory.bytes + coming > self._memory.budget:
            victim = self._retention[Tier.RAM].victim()
            if victim is None:
                break  # all that is left is in use
            self._leave_ram(victim)
        for slabs in self._slabs:
            slabs.review()

    def _make_room_for_load(self, coming: int) -> None:
        """Called by the store before it reads, on the loader's thread: what leaves now is memory for what comes."""
        with self._lock:
            self._make_room_in_ram(coming)

    def _leave_ram(self, entry: Entry) -> None:
        """To disk if it is there or can get there, otherwise away."""
        if entry.disk_id is not None:
            self._drop_from_ram(entry, "to_disk")
        elif entry.saving or self._offer(entry):
            # Its bytes are the writer's queue's now, which has a bound of its own; it is found until it is saved.
            assert entry.snapshot is not None, "what leaves RAM is in RAM"
            entry.leaving = True
            self._memory.remove(entry.snapshot)
        else:
            self._drop_from_ram(entry, "lost")

    def _make_room_on_disk(self, wanted: int) -> None:
        """Called by the store before a save, on the writer's thread and without its locks."""
        disk = self._disk
        assert disk is not None, "only a disk tier asks for room on disk"
        goal = disk.bytes - wanted
        while disk.bytes > goal:
            with self._lock:
                victim = self._retention[Tier.DISK].victim()
                if victim is None:
                    return
                id = victim.disk_id
                self._drop_from_disk(victim, "lost" if victim.snapshot is None else "to_ram")
            if id is not None:
                disk.remove(id)

    def _drop_from_ram(self, entry: Entry, what: str) -> None:
        if entry.snapshot is None:
            return
        if not entry.leaving:
            self._memory.remove(entry.snapshot)
        entry.leaving = False
        entry.snapshot = None
        self._unhang(entry, Tier.RAM, what)

    def _drop_from_disk(self, entry: Entry, what: str) -> None:
        """Forget that it is on disk; the file is the caller's."""
        if entry.disk_id is None:
            return
        entry.disk_id = None
        self._unhang(entry, Tier.DISK, what)

    def _unhang(self, entry: Entry, tier: Tier, what: str) -> None:
        self._evictions[f"{tier}:{what}"] += 1
        self._retention[tier].forget(entry)
        changed = self._index.evict(entry, tier)
        if changed is not None:
            self._retention[tier].place(changed)
        if entry.tier is None:
            entry.gone = True
            self._conversations.forget(entry)

    def _drop(self, entry: Entry, what: str) -> str | None:
        """Out of both tiers; returns the id of the file to be dealt with."""
        id = entry.disk_id
        entry.gone = True
        self._drop_from_ram(entry, what)
        self._drop_from_disk(entry, what)
        return id

    def evict(self, entry: Entry) -> None:
        """Forget a snapshot in both tiers."""
        with self._lock:
            id = self._drop(entry, "asked")
        if id is not None and self._disk is not None and not self._disk.read_only:
            self._disk.remove(id)

    def set_aside(self, entry: Entry, reason: str) -> None:
        """An audit found a snapshot wrong: it is never used again, and its manifest is kept for a person."""
        with self._lock:
            self._count["set_aside"] += 1
            id = self._drop(entry, "set_aside")
        if id is not None and self._disk is not None:
            self._disk.set_aside(id, reason)

    # Pinning

    @contextlib.contextmanager
    def pin(self, entry: Entry) -> Iterator[None]:
        """While the block runs the entry is no victim."""
        self.acquire(entry)
        try:
            yield
        finally:
            self.release(entry)

    def acquire(self, entry: Entry) -> None:
        with self._lock:
            entry.pins += 1
            self._place(entry)

    def release(self, entry: Entry) -> None:
        with self._lock:
            assert entry.pins > 0, "released more often than acquired"
            entry.pins -= 1
            if not entry.gone:
                self._use(entry)
                self._make_room_in_ram()

    def _use(self, entry: Entry) -> None:
        self._operations += 1
        entry.used = self._operations
        self._place(entry)

    def _place(self, entry: Entry) -> None:
        for retention in self._retention.values():
            retention.place(entry)

    # How things stand

    @property
    def steps(self) -> int:
        """Tree nodes and heap items looked at since the start."""
        return self._index.steps + sum(retention.steps for retention in self._retention.values())

    def stats(self) -> CacheStats:
        disk, writer = self._disk, self._writer
        with self._lock:
            return CacheStats(
                lookups=self._count["lookups"],
                hits=dict(self._hits),
                restored=dict(self._restored),
                misses=dict(self._misses),
                short_hits=dict(self._short_hits),
                published=self._count["published"],
                already_published=self._count["already_published"],
                evictions=dict(self._evictions),
                saves=writer.saves if writer else 0,
                refused_saves=dict(writer.refused) if writer else {},
                bad_files=disk.bad_files if disk else 0,
                set_aside=self._count["set_aside"],
                ram_entries=self._index.counts[Tier.RAM],
                ram_bytes=self._memory.bytes,
                ram_budget=self._memory.budget,
                disk_entries=self._index.counts[Tier.DISK],
                disk_bytes=disk.bytes if disk else 0,
                disk_budget=disk.budget if disk else 0,
                saves_waiting=writer.waiting if writer else 0,
                disk=self._disk_state(),
            )

    def _disk_state(self) -> str:
        if self._disk is None:
            return "off"
        if self._writer is None:
            return "read-only"
        return "troubled" if self._writer.troubled else "ok"

    def entries(self) -> list[Entry]:
        """Every published prefix, longest used last; for people and tests."""
        with self._lock:
            both = {entry for tier in Tier for entry in self._index.entries(tier)}
            return sorted(both, key=lambda entry: entry.used)

    def flush(self) -> None:
        """Wait until what was offered to the disk is there or refused."""
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        """Save what is in RAM only, then let go of the disk."""
        if self._writer is not None:
            for entry in self.entries():
                self._save_before_closing(self._writer, entry)
            self._writer.close()
        if self._disk is not None:
            if self._writer is not None:
                log.info(
                    "snapshots saved: %d (%s) in %s", len(self._disk), show_bytes(self._disk.bytes), self._disk.folder
                )
            self._disk.close()

    def _save_before_closing(self, writer: DiskWriter, entry: Entry) -> None:
        with self._lock:
            snapshot = entry.snapshot
            if snapshot is None or entry.disk_id is not None or entry.saving:
                return
            entry.saving = True
        # Waits for a place in the queue, so not under the lock that the writer's thread needs to finish a save.
        if not writer.put(self._save_of(entry, snapshot)):
            with self._lock:
                entry.saving = False


def _serves(entry: Entry, length: int) -> bool:
    """Whether a prompt of so many tokens, of which it is a prefix, can go on from it."""
    return entry.position < length or entry.has_logits

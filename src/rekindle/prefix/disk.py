"""The disk tier: a store of files and the thread that writes to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rekindle.prefix.tier import Inherited, Offer, Room, TierCounts
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.record import Record
from rekindle.snapshots.types import Snapshot
from rekindle.snapshots.writer import DiskWriter, Save

# Bytes that loads may bring together, however little RAM keeps of them: one behind the other small ones would take
# several times as long.
LEAST_LOADED = 1 << 30


class DiskTier:
    name = "disk"
    instant, persistent = False, True

    def __init__(self, store: DiskStore, queue: int = 4, busy: Callable[[], bool] = lambda: True) -> None:
        """queue: snapshots that may always wait for the writer. What is refused it asks for when it has a place, and
        is offered again when it leaves RAM. busy: whether somebody is being answered, beside whom it writes slowly."""
        self._store = store
        self._writer = None if store.read_only else DiskWriter(store, queue, busy=busy)

    @property
    def where(self) -> str:
        return str(self._store.folder)

    @property
    def writable(self) -> bool:
        return self._writer is not None

    @property
    def budget(self) -> int:
        return self._store.budget

    @property
    def bytes(self) -> int:
        return self._store.bytes

    def open(self, room: Room) -> Iterator[Inherited]:
        self._store.make_room, self._store.make_room_in_ram = room.own, room.memory
        if self._writer is not None:
            self._writer.more = lambda: None if (offer := room.left()) is None else _save_of(offer)
        self._store.most_in_ram = max(room.in_memory, LEAST_LOADED)
        for record, tokens in self._store.keyed_records():
            yield Inherited(
                id=record.id,
                tokens=tokens,
                namespace=record.namespace,
                kind=record.kind,
                conversation=record.conversation,
                own_bytes=record.own_bytes,
                has_logits=record.has_logits,
            )

    def add(self, offer: Offer, wait: bool = False) -> bool:
        if self._writer is None:
            return False
        save = _save_of(offer)
        return self._writer.put(save) if wait else self._writer.offer(save)

    def load(self, id: str) -> Snapshot:
        snapshot = self._store.load(id)
        self._store.touch(id)
        return snapshot

    def remove(self, id: str) -> None:
        if self.writable:
            self._store.remove(id)

    def quarantine(self, id: str, reason: str) -> None:
        self._store.quarantine(id, reason)

    def trim(self) -> None: ...

    def counts(self) -> TierCounts:
        writer = self._writer
        if writer is None:
            return TierCounts(state="read-only", bad_files=self._store.bad_files)
        return TierCounts(
            state="troubled" if writer.troubled else "ok",
            saves=writer.saves,
            waiting=writer.waiting,
            refused=dict(writer.refused),
            bad_files=self._store.bad_files,
        )

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        self._store.close()


def _save_of(offer: Offer) -> Save:
    def done(record: Record | None) -> None:
        offer.done(None if record is None else record.id)

    return Save(offer.snapshot, offer.kind, offer.conversation, done)

"""What a tier is: one place where snapshots rest. The cache holds its tiers in order, the fastest first, and loops.

RAM (`ram.py`) and disk (`disk.py`) are two of them. A third, say an object store, is one file with a class that
answers `Tier`, and one line where the tuple of tiers is made. The index, the retention policy, the metrics and the
responses know a tier by its name only.

The cache calls a tier from any thread. A tier decides by itself how it stores, when it writes and what it verifies;
the cache decides what is added, what is evicted and what is promoted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from rekindle.prompt import BoundaryKind
from rekindle.snapshots.types import Snapshot


@dataclass(frozen=True, slots=True)
class Offer:
    """A snapshot that a tier may add."""

    snapshot: Snapshot
    kind: BoundaryKind
    conversation: str
    # Once, if the tier took the offer, from any thread: the id under which the tier now holds the snapshot, or None
    # if it could not be stored after all.
    done: Callable[[str | None], None]


@dataclass(frozen=True, slots=True)
class Inherited:
    """A snapshot that an earlier process left in a tier."""

    id: str
    tokens: np.ndarray  # int32 [position]
    namespace: str
    kind: BoundaryKind
    conversation: str | None
    own_bytes: int
    has_logits: bool


@dataclass(frozen=True, slots=True)
class Room:
    """What a tier asks of the cache. Called without any lock that `remove` takes."""

    own: Callable[[int], None]  # evict at least this many bytes from this tier, as far as nothing is pinned
    memory: Callable[[int], None]  # evict from the instant tiers until this many bytes more fit their budgets
    in_memory: int  # bytes that these may hold, all together
    left: Callable[[], Offer | None]  # an offer that this tier refused and might take now, as if it had taken it


@dataclass(frozen=True, slots=True)
class TierCounts:
    """What a tier did since the start, and how it stands."""

    state: str = "ok"  # off, read-only, ok or troubled
    saves: int = 0
    waiting: int = 0  # offers taken and not yet done
    refused: Mapping[str, int] = field(default_factory=dict)  # offers, by reason
    bad_files: int = 0  # found unreadable or altered, or quarantined


class Tier(Protocol):
    @property
    def name(self) -> str:
        """In reports, metrics and responses."""

    @property
    def where(self) -> str:
        """A folder or an address, for the log."""

    @property
    def instant(self) -> bool:
        """Snapshots lie in this process: `add` and `load` finish before they return and wait for nothing."""

    @property
    def persistent(self) -> bool:
        """What it holds outlives the process."""

    @property
    def writable(self) -> bool:
        """False: it is only read; `add` refuses, `remove` changes nothing."""

    @property
    def budget(self) -> int:
        """Bytes it may take."""

    @property
    def bytes(self) -> int:
        """Bytes it takes now; what several snapshots share counts once."""

    def open(self, room: Room) -> Iterable[Inherited]:
        """Once, before any other call: what it holds already, the least recently used first. What another process adds
        to the same place later is not seen before the next start."""

    def add(self, offer: Offer, wait: bool = False) -> bool:
        """Take an offer, or refuse it at once. Does not wait for storage; with `wait` (at shutdown) it may wait for a
        place in its queue. A tier that refused asks for what is `left` when it has a place. One that is not instant
        keeps its budget by asking for room before it writes."""

    def load(self, id: str) -> Snapshot:
        """The snapshot, verified, bit for bit what was added. The last use is noted. Raises BadSnapshotFile where the
        copy is bad: it is quarantined for good. Raises TierUnavailable where the tier cannot be reached, or not in
        time: the copy stays and is tried again at the next lookup."""

    def remove(self, id: str) -> None:
        """Evicted. Nothing happens if the id is unknown."""

    def quarantine(self, id: str, reason: str) -> None:
        """Never load it again, in later processes neither; keep what a person needs to find the cause."""

    def trim(self) -> None:
        """The cache has evicted what it could: give back memory that may not lie idle any more."""

    def counts(self) -> TierCounts: ...

    def flush(self) -> None:
        """Return when every offer taken so far is done."""

    def close(self) -> None:
        """Finish what was taken, then let go of files and connections. Loaded snapshots stay usable."""


class Off:
    """A tier that is switched off: reports and metrics still name it, with zeros."""

    where, instant, persistent, writable = "", False, False, False
    budget, bytes = 0, 0

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, room: Room) -> Iterable[Inherited]:
        return ()

    def add(self, offer: Offer, wait: bool = False) -> bool:
        return False

    def load(self, id: str) -> Snapshot:
        raise AssertionError(f"the {self.name} tier is off and holds no {id}")

    def remove(self, id: str) -> None: ...

    def quarantine(self, id: str, reason: str) -> None: ...

    def trim(self) -> None: ...

    def counts(self) -> TierCounts:
        return TierCounts(state="off")

    def flush(self) -> None: ...

    def close(self) -> None: ...

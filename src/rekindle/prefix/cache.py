"""The prefix cache: published snapshots in a row of tiers, found by the tokens of a prompt."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rekindle.config import show_bytes
from rekindle.prefix.catalogue import Catalogue, key_of
from rekindle.prefix.held import HeldStates
from rekindle.prefix.lattice import lattice, most_points
from rekindle.prefix.lookup import Lookups
from rekindle.prefix.moves import Moves
from rekindle.prefix.publish import Publishing
from rekindle.prefix.tier import Tier
from rekindle.prefix.types import Entry, Lookup, Miss
from rekindle.prompt import BoundaryKind
from rekindle.snapshots.types import Snapshot
from rekindle.spec import SnapshotBytes

log = logging.getLogger("rekindle.prefix")


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
    quarantined: int  # by an audit, or because the stages refused them
    entries: Mapping[str, int]  # by tier, as the five below
    bytes: Mapping[str, int]
    budgets: Mapping[str, int]
    states: Mapping[str, str]  # off, read-only, ok or troubled
    saves: int  # of all tiers, as the three below
    saves_waiting: int
    refused_saves: Mapping[str, int]  # by reason
    bad_files: int


class PrefixCache:
    """Every method may be called from any thread. None waits for a tier that is not instant, except `lookup` for the
    snapshot it loads, and `flush` and `close`."""

    def __init__(
        self, tiers: Sequence[Tier], sizes: SnapshotBytes | None = None, held: HeldStates | None = None
    ) -> None:
        """tiers: the fastest first; sizes: what snapshots of the model take, where it is known; held: the tier before
        them all, if engines keep states in their slots."""
        self.held = held
        self._catalogue = Catalogue(tiers)
        self._lock = self._catalogue.lock
        self._moves = Moves(self._catalogue)
        self._lookups = Lookups(self._catalogue, self._moves, self.release)
        self._publishing = Publishing(self._catalogue, self._moves, sizes)
        self._quarantined = 0
        instant = max((tier.budget for tier in tiers if tier.instant), default=0)
        self.points = most_points(instant, sizes.state) if sizes is not None else 0  # of a lattice, evenly spaced
        for tier in self.tiers:
            self._open(tier)

    def _open(self, tier: Tier) -> None:
        self._publishing.take_in(tier)
        if tier.writable:
            self._moves.keep_budget(tier)
        if tier.persistent:
            self._say(tier, "found")

    def _say(self, tier: Tier, what: str) -> None:
        count = self._catalogue.index.counts[tier.name]
        log.info("snapshots %s: %d (%s) in %s", what, count, show_bytes(tier.bytes), tier.where)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        return self._catalogue.tiers

    # Looking up

    def lookup(self, tokens: Sequence[int] | np.ndarray, limit: int | None = None, namespace: str = "") -> Lookup:
        """The longest prefix of a prompt that was published in its name space, of at most `limit` tokens, loaded from
        a slower tier if need be.

        The hit is pinned: the caller calls `hit.release()`, and `taken()` if a sequence started with it. A snapshot
        as long as the prompt serves only with its logits: without them nothing could be sampled.
        """
        return self._lookups.lookup(tokens, limit, namespace)

    def lookup_in_ram(self, tokens: Sequence[int] | np.ndarray, namespace: str = "") -> Lookup | None:
        """The same without a wait; None, and nothing is counted or pinned, where the snapshot has to be loaded."""
        return self._lookups.lookup_at_hand(tokens, namespace)

    def lookup_held(self, tokens: Sequence[int] | np.ndarray, position: int, namespace: str = "") -> Lookup:
        """For a prompt that goes on from a state which its engine holds: nothing is loaded or pinned, and the snapshot
        of that state, if there is one, counts as used."""
        assert self.held is not None, "states are held where the cache has a tier for them"
        return self._lookups.lookup_held(tokens, position, self.held.name, namespace)

    def record_bypass(self, reason: Miss) -> Lookup:
        """For a start that no snapshot can serve: it counts as a miss like any other."""
        return self._lookups.record_bypass(reason)

    def known_length(self, tokens: Sequence[int] | np.ndarray, namespace: str = "") -> int:
        """How much of a prompt a lookup would find now; nothing is loaded, pinned or counted."""
        return self._lookups.known_length(tokens, namespace)

    def must_be_read(self, tokens: Sequence[int] | np.ndarray, namespace: str = "", *, beyond: int = 0) -> bool:
        """Whether the longest published prefix, if it is longer than `beyond`, lies in a slow tier only.

        Nothing is loaded, pinned or counted.
        """
        return self._lookups.must_be_read(tokens, beyond, namespace)

    def continuations(self, tokens: Sequence[int] | np.ndarray, longest: int, namespace: str = "") -> list[list[int]]:
        """Runs of at most `longest` tokens that follow exactly these in published prefixes, newest first.

        Nothing is loaded, pinned or counted.
        """
        return self._lookups.continuations(tokens, longest, namespace)

    def by_tier(self, tokens: int = 0, tier: str | None = None) -> dict[str, int]:
        """For a report on one request: `tokens` restored from `tier`, none from the others."""
        held = (self.held.name,) if self.held is not None else ()
        return {name: tokens if name == tier else 0 for name in (*held, *self._catalogue.names)}

    def find(self, tokens: np.ndarray, namespace: str = "") -> Entry | None:
        """What is published under exactly these tokens; nothing is loaded, pinned or counted."""
        with self._lock:
            return self._catalogue.index.find(key_of(tokens), namespace)

    # Publishing

    def refusal(self, position: int) -> str | None:
        """Why no snapshot of so many tokens can be kept, in words; None if one can."""
        return self._publishing.refusal(position)

    def lattice(self, start: int, stop: int, grid: int) -> list[int]:
        """Positions between two boundaries where snapshots are worth taking too; none where sizes are not known."""
        return lattice(start, stop, grid, self.points)

    def wants(self, tokens: Sequence[int] | np.ndarray, kind: BoundaryKind, namespace: str = "") -> bool:
        """Whether a snapshot of these tokens is worth capturing; if not, the one there is counts as used."""
        return self._publishing.wants(key_of(tokens), kind, namespace)

    def publish(self, snapshot: Snapshot, kind: BoundaryKind, conversation: str | None = None) -> Entry:
        """Make a snapshot findable under exactly its tokens, in its name space: in memory now, in slower tiers later.

        Without the name of a conversation it belongs to that of the snapshot it continues. What is published already
        stays, unless the new one holds more (logits).
        """
        return self._publishing.publish(snapshot, kind, conversation)

    def keep(self, tokens: Sequence[int] | np.ndarray, seconds: float, namespace: str = "") -> bool:
        """Evict a snapshot of exactly these tokens after all others, for so long. False if there is none."""
        with self._lock:
            entry = self._catalogue.index.find(key_of(tokens), namespace)
            if entry is not None:
                self._catalogue.keep(entry, seconds)
            return entry is not None

    def release(self, entry: Entry) -> None:
        """Undo the pin of a hit."""
        with self._lock:
            assert entry.pins > 0, "released more often than acquired"
            entry.pins -= 1
            if not entry.gone:
                self._catalogue.use(entry)
                self._moves.make_room_in_memory()

    def quarantine(self, entry: Entry, reason: str) -> None:
        """A snapshot was found wrong: no tier loads it again; persistent tiers keep its manifest for a person."""
        with self._lock:
            self._quarantined += 1
            held = self._catalogue.drop_everywhere(entry, "quarantined")
        for tier, id in held:
            tier.quarantine(id, reason)

    # How things stand

    @property
    def steps(self) -> int:
        """Tree nodes and heap items looked at since the start."""
        return self._catalogue.index.steps + sum(each.steps for each in self._catalogue.retention.values())

    def stats(self) -> CacheStats:
        stats = self._stats_of_tiers()
        if (held := self.held) is None:
            return stats
        return replace(
            stats,
            evictions={f"{held.name}:given_up": held.given_up, **stats.evictions},
            entries={held.name: held.count, **stats.entries},
            bytes={held.name: held.bytes, **stats.bytes},
            budgets={held.name: held.budget, **stats.budgets},
            states={held.name: "ok", **stats.states},
        )

    def _stats_of_tiers(self) -> CacheStats:
        left = self._moves.left  # first: what a tier takes from here meanwhile is counted there
        counts = {tier.name: tier.counts() for tier in self.tiers}
        lookups, publishing = self._lookups, self._publishing
        with self._lock:
            return CacheStats(
                lookups=lookups.lookups,
                hits=dict(lookups.hits),
                restored=dict(lookups.restored),
                misses=dict(lookups.misses),
                short_hits=dict(lookups.short_hits),
                published=publishing.published,
                already_published=publishing.already_published,
                evictions=dict(self._catalogue.evictions),
                quarantined=self._quarantined,
                entries=dict(self._catalogue.index.counts),
                bytes={tier.name: tier.bytes for tier in self.tiers},
                budgets={tier.name: tier.budget for tier in self.tiers},
                states={name: each.state for name, each in counts.items()},
                saves=sum(each.saves for each in counts.values()),
                saves_waiting=sum(each.waiting for each in counts.values()) + left,
                refused_saves=dict(sum((Counter(each.refused) for each in counts.values()), Counter())),
                bad_files=sum(each.bad_files for each in counts.values()),
            )

    def entries(self) -> list[Entry]:
        """Every published prefix, the least recently used first; for people and tests."""
        with self._lock:
            return sorted(self._catalogue.index.entries(), key=lambda entry: entry.used)

    def at_hand(self, entry: Entry) -> Snapshot | None:
        """The snapshot of an entry, if it is in this process's memory; for people and tests."""
        with self._lock:
            found = self._catalogue.at_hand(entry)
        return found[0] if found is not None else None

    def flush(self) -> None:
        """Wait until what was offered to slower tiers is there or refused."""
        for tier in self.tiers:
            tier.flush()

    def close(self) -> None:
        """Save what lies in memory only, points of the lattice last, then let go of every tier."""
        found = sorted(self.entries(), key=lambda entry: entry.kind is BoundaryKind.LATTICE)
        for tier in self.tiers:
            if tier.persistent and tier.writable:
                for entry in found:
                    self._moves.save(entry, tier)
        for tier in self.tiers:
            tier.close()
            if tier.persistent and tier.writable:
                self._say(tier, "saved")

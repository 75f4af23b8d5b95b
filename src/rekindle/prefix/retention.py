"""What to keep and what to evict: one order for every tier, found without looking at those that stay.

A tier over its budget loses, in this order, least recently used first within each rank:

    LATTICE    points between boundaries that lie far apart
    LEAF       ends of branches that no active conversation needs
    ANCESTOR   what lies on the way to something longer
    FRESH      the newest snapshots of conversations that have not come back yet
    RETURNING  the newest snapshots of conversations that have
    SYSTEM     system + tools, which every conversation under the same prompt starts from
    KEPT       what a client asked to keep for a time that is not over, the first to be over first

System prompts may hold a quarter of a tier (and always one). Beyond that they go right behind the lattice, those never
hit before the others, so that side calls with prompts of their own push out neither conversations nor the system prompt
in use.
What clients asked to keep may hold half of a tier (and always one) in the same way. Of both, the name space that holds
most loses first: a client that marks everything pushes out its own marks before those of others.
What is pinned is in no rank and cannot be evicted.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from rekindle.prefix.types import Entry, Standing
from rekindle.prompt import BoundaryKind
from rekindle.spec import NEWEST

FRESH_CONVERSATIONS = 4
RETURNING_CONVERSATIONS = 8
PATIENCE = 64  # lookups after which a conversation that did not come back is no longer active


class Rank(IntEnum):
    LATTICE = 0
    LEAF = 1
    ANCESTOR = 2
    FRESH = 3
    RETURNING = 4
    SYSTEM = 5
    KEPT = 6


SHARES = {Rank.SYSTEM: 4, Rank.KEPT: 2}  # n: these may hold 1/n of the bytes of a tier

Key = tuple[
    bool, float
]  # (was it ever hit, for system prompts; last use, or the end of its time), smallest leaves first
Group = tuple[Rank, str]  # candidates of one rank; of the ranks with shares, those of one name space

now = time.monotonic


def rank_of(entry: Entry, leaf: bool) -> Rank:
    if entry.kept_until > now():
        return Rank.KEPT
    if entry.kind is BoundaryKind.SYSTEM:
        return Rank.SYSTEM
    if entry.standing is not Standing.IDLE:
        return Rank.RETURNING if entry.standing is Standing.RETURNING else Rank.FRESH
    if entry.kind is BoundaryKind.LATTICE:
        return Rank.LATTICE
    return Rank.LEAF if leaf else Rank.ANCESTOR


def _group(rank: Rank, entry: Entry) -> Group:
    return rank, entry.namespace if rank in SHARES else ""


class Retention:
    """Which entry leaves one tier next. One heap per group; an entry that moved leaves a stale item, skipped later."""

    def __init__(self, tier: str, budget: int) -> None:
        self.tier = tier
        self.budget = budget
        self.steps = 0  # heap items looked at, ever; what the cost laws count
        self._places: dict[Entry, tuple[Rank, Key]] = {}
        self._heaps: defaultdict[Group, list[tuple[Key, int, Entry]]] = defaultdict(list)
        self._counts: Counter[Group] = Counter()
        self._bytes: Counter[Group] = Counter()
        self._pushes = 0

    def __len__(self) -> int:
        return len(self._places)

    def place(self, entry: Entry) -> None:
        """Give an entry its place, new or changed; a pinned or leaving one has none."""
        copy = entry.copies.get(self.tier)
        self.forget(entry)
        if copy is None or entry.pins or copy.leaving is not None:
            return
        rank = rank_of(entry, not copy.node.children)
        key = (rank is Rank.SYSTEM and entry.hits > 0, entry.kept_until if rank is Rank.KEPT else entry.used)
        group = _group(rank, entry)
        self._places[entry] = (rank, key)
        self._counts[group] += 1
        self._bytes[group] += entry.own_bytes
        self._push(group, key, entry)

    def forget(self, entry: Entry) -> None:
        """No longer a candidate."""
        place = self._places.pop(entry, None)
        if place is None:
            return
        group = _group(place[0], entry)
        self._counts[group] -= 1
        self._bytes[group] -= entry.own_bytes

    def victim(self) -> Entry | None:
        """The next to leave, no longer a candidate; None if all that is left is pinned."""
        self._end_keeping()
        for group in self._order():
            entry = self._pop(group)
            if entry is not None:
                self.forget(entry)
                return entry
        return None

    def _order(self) -> list[Group]:
        crowded = [rank for rank in SHARES if self._is_crowded(rank)]
        return [group for rank in (Rank.LATTICE, *crowded, *Rank) for group in self._groups(rank)]

    def _groups(self, rank: Rank) -> list[Group]:
        """Those that hold most of the tier first."""
        return sorted((group for group in self._heaps if group[0] is rank), key=lambda group: -self._bytes[group])

    def _is_crowded(self, rank: Rank) -> bool:
        """A single one is let be, however large."""
        groups = self._groups(rank)
        held = sum(self._bytes[group] for group in groups)
        return held * SHARES[rank] > self.budget and sum(self._counts[group] for group in groups) > 1

    def _end_keeping(self) -> None:
        """Entries whose time is over go back to the rank they would have without it."""
        for group in self._groups(Rank.KEPT):
            heap = self._heaps[group]
            while heap and (heap[0][0][1] <= now() or not self._is_live(Rank.KEPT, heap[0])):
                self.steps += 1
                item = heapq.heappop(heap)
                if self._is_live(Rank.KEPT, item):
                    self.place(item[2])

    def _push(self, group: Group, key: Key, entry: Entry) -> None:
        heap = self._heaps[group]
        self._pushes += 1
        heapq.heappush(heap, (key, self._pushes, entry))
        # Stale items may outnumber the living only so far: sweeping costs no more than the pushes that made them.
        if len(heap) > 2 * self._counts[group] + 64:
            self.steps += len(heap)
            heap[:] = [item for item in heap if self._is_live(group[0], item)]
            heapq.heapify(heap)

    def _pop(self, group: Group) -> Entry | None:
        heap = self._heaps[group]
        while heap:
            self.steps += 1
            item = heapq.heappop(heap)
            if self._is_live(group[0], item):
                return item[2]
        return None

    def _is_live(self, rank: Rank, item: tuple[Key, int, Entry]) -> bool:
        return self._places.get(item[2]) == (rank, item[0])


@dataclass(slots=True)
class _Conversation:
    newest: deque[Entry] = field(default_factory=deque)
    seen: int = 0  # lookups when it was last seen
    returning: bool = False


class Conversations:
    """Which conversations are active and which snapshots they will need next.

    Fresh and returning ones are bounded apart, so that no number of side calls, which never come back, ends the
    protection of a conversation that does; and one that stays away loses it after PATIENCE lookups, so that a quiet
    conversation cannot keep new ones out for ever.
    """

    def __init__(self, changed: Callable[[Entry], None]) -> None:
        self._changed = changed
        self._lookups = 0
        self._fresh: OrderedDict[str, _Conversation] = OrderedDict()  # longest unseen first
        self._returning: OrderedDict[str, _Conversation] = OrderedDict()

    def published(self, entry: Entry) -> None:
        """A new snapshot of a conversation: it will be needed next."""
        if entry.kind is BoundaryKind.SYSTEM:
            return  # shared by many conversations, kept on its own account
        conversation = self._see(entry.conversation)
        self._add(conversation, entry)
        self._bound()

    def came_back(self, entry: Entry) -> None:
        """A prompt hit one of its snapshots."""
        if entry.kind is BoundaryKind.SYSTEM:
            return
        conversation = self._see(entry.conversation)
        self._fresh.pop(entry.conversation, None)
        self._returning[entry.conversation] = conversation
        conversation.returning = True
        self._add(conversation, entry)
        for newest in conversation.newest:
            self._stand(newest, Standing.RETURNING)
        self._bound()

    def looked_up(self) -> None:
        """Time passes, counted in lookups."""
        self._lookups += 1
        for group in (self._fresh, self._returning):
            while group and next(iter(group.values())).seen + PATIENCE < self._lookups:
                self._retire(group)

    def forget(self, entry: Entry) -> None:
        """Evicted from every tier."""
        conversation = self._fresh.get(entry.conversation) or self._returning.get(entry.conversation)
        if conversation is not None and entry in conversation.newest:
            conversation.newest.remove(entry)

    def _see(self, name: str) -> _Conversation:
        group = self._returning if name in self._returning else self._fresh
        conversation = group.setdefault(name, _Conversation())
        conversation.seen = self._lookups
        group.move_to_end(name)
        return conversation

    def _add(self, conversation: _Conversation, entry: Entry) -> None:
        if entry.kind is BoundaryKind.LATTICE:
            return  # where a prompt branched off behind it, a snapshot is published there
        if entry in conversation.newest:
            conversation.newest.remove(entry)
        conversation.newest.append(entry)
        self._stand(entry, Standing.RETURNING if conversation.returning else Standing.FRESH)
        if len(conversation.newest) > NEWEST:
            self._stand(conversation.newest.popleft(), Standing.IDLE)

    def _bound(self) -> None:
        for group, bound in ((self._fresh, FRESH_CONVERSATIONS), (self._returning, RETURNING_CONVERSATIONS)):
            if len(group) > bound:
                self._retire(group)

    def _retire(self, group: OrderedDict[str, _Conversation]) -> None:
        _, conversation = group.popitem(last=False)
        for entry in conversation.newest:
            self._stand(entry, Standing.IDLE)

    def _stand(self, entry: Entry, standing: Standing) -> None:
        if entry.standing is not standing:
            entry.standing = standing
            self._changed(entry)


def check_budgets(snapshot_bytes: int, budgets: Mapping[str, int]) -> list[str]:
    """Warnings for budgets, by tier, in which a tier cannot do its work; `snapshot_bytes` is what one snapshot of the
    model takes before its first page. A budget of 0 is a wish to keep nothing."""
    warnings = []
    for tier, budget in budgets.items():
        if not budget:
            continue
        if budget < snapshot_bytes:
            warnings.append(
                f"the {tier} budget of {budget:,} bytes is smaller than one snapshot of this model "
                f"({snapshot_bytes:,} bytes before its pages): nothing will be kept in {tier}"
            )
        elif budget < (NEWEST + 1) * snapshot_bytes:
            warnings.append(
                f"the {tier} budget of {budget:,} bytes holds fewer than {NEWEST + 1} snapshots of this model "
                f"({snapshot_bytes:,} bytes each before pages): one conversation will not keep all it needs"
            )
    return warnings

"""Finding the longest published prefix of a prompt, and counting what lookups came to."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from rekindle.errors import BadSnapshotFile, TierUnavailable
from rekindle.prefix.catalogue import Catalogue, key_of
from rekindle.prefix.index import Walk
from rekindle.prefix.moves import Moves
from rekindle.prefix.tier import Tier
from rekindle.prefix.types import Entry, Hit, Lookup, Miss
from rekindle.prompt import BoundaryKind
from rekindle.snapshots.types import Snapshot

log = logging.getLogger("rekindle.prefix")

CONTINUATIONS = 8  # named for one prefix at most; more answers to one prompt are hardly kept


class Lookups:
    def __init__(self, catalogue: Catalogue, moves: Moves, release: Callable[[Entry], None]) -> None:
        """release: undoes the pin of a hit."""
        self.lookups = 0
        self.hits: Counter[str] = Counter()  # by tier
        self.restored: Counter[str] = Counter()  # tokens, by tier
        self.misses: Counter[str] = Counter()  # by reason
        self.short_hits: Counter[str] = Counter()  # by reason
        self._catalogue = catalogue
        self._lock = catalogue.lock
        self._moves = moves
        self._release = release

    def lookup(self, tokens: Sequence[int] | np.ndarray, limit: int | None, namespace: str) -> Lookup:
        prompt = key_of(tokens)
        with self._lock:
            walk = self._catalogue.index.walk(prompt, namespace)
        return self._answer(walk, prompt, len(prompt) if limit is None else limit)

    def lookup_at_hand(self, tokens: Sequence[int] | np.ndarray, namespace: str) -> Lookup | None:
        prompt = key_of(tokens)
        with self._lock:
            walk = self._catalogue.index.walk(prompt, namespace)
            longest = next((entry for entry in walk.candidates if _serves(entry, len(prompt))), None)
            if longest is not None and self._catalogue.at_hand(longest) is None:
                return None
            return self._answer(walk, prompt, len(prompt))

    def lookup_held(self, tokens: Sequence[int] | np.ndarray, position: int, tier: str, namespace: str) -> Lookup:
        prompt = key_of(tokens)
        with self._lock:
            walk = self._catalogue.index.walk(prompt, namespace)
            self._count_lookup()
            for entry in walk.candidates:
                if entry.position == position:
                    self._note_use(entry, walk)
        if walk.depth < position:
            walk = Walk(walk.candidates, position, None)
        miss = _explain(position, None, walk, len(prompt))
        taken = partial(self._note_taken, tier, position, miss)
        return Lookup(None, walk.depth, _token_at(prompt, walk.depth), walk.seen, miss, taken, held=position)

    def record_bypass(self, reason: Miss) -> Lookup:
        return Lookup(None, 0, None, None, reason, partial(self._note_taken, None, 0, reason))

    def known_length(self, tokens: Sequence[int] | np.ndarray, namespace: str) -> int:
        prompt = key_of(tokens)
        with self._lock:
            candidates = self._catalogue.index.walk(prompt, namespace).candidates
            return max((entry.position for entry in candidates if _serves(entry, len(prompt))), default=0)

    def must_be_read(self, tokens: Sequence[int] | np.ndarray, beyond: int, namespace: str) -> bool:
        prompt = key_of(tokens)
        with self._lock:
            candidates = self._catalogue.index.walk(prompt, namespace).candidates
            longest = next((entry for entry in candidates if _serves(entry, len(prompt))), None)
            found = longest is not None and longest.position > beyond
            return found and longest is not None and self._catalogue.at_hand(longest) is None

    def continuations(self, tokens: Sequence[int] | np.ndarray, longest: int, namespace: str) -> list[list[int]]:
        prompt = key_of(tokens)
        with self._lock:
            return [run.tolist() for run in self._catalogue.index.below(prompt, longest, CONTINUATIONS, namespace)]

    def _answer(self, walk: Walk, prompt: np.ndarray, limit: int) -> Lookup:
        self._count_lookup()
        hit, hurdle = self._first_usable(walk, prompt, limit)
        tier, reached = (hit.tier, hit.position) if hit is not None else (None, 0)
        miss = _explain(reached, hurdle, walk, len(prompt))
        if hit is not None:
            self._note_use(hit.entry, walk)
        taken = partial(self._note_taken, tier, reached, miss)
        return Lookup(hit, walk.depth, _token_at(prompt, walk.depth), walk.seen, miss, taken)

    def _count_lookup(self) -> None:
        with self._lock:
            self.lookups += 1
            self._catalogue.conversations.looked_up()

    def _first_usable(self, walk: Walk, prompt: np.ndarray, limit: int) -> tuple[Hit | None, Miss | None]:
        """The longest candidate that can be used, and what stood in the way of a longer one."""
        hurdle: Miss | None = None
        for entry in walk.candidates:
            if entry.position > limit:
                continue
            if not _serves(entry, len(prompt)):
                hurdle = Miss.NO_LOGITS
                continue
            self._catalogue.acquire(entry)  # before it is loaded: what is being restored is no victim
            try:
                fetched = self._fetch(entry)
            except BaseException:
                self._release(entry)
                raise
            if isinstance(fetched, Miss):
                self._release(entry)
                hurdle = fetched
                continue
            snapshot, tier = fetched
            assert np.array_equal(snapshot.tokens, prompt[: entry.position]), "a hit is a prefix of its prompt"
            return Hit(snapshot, entry.position, tier.name, entry, partial(self._release, entry)), hurdle
        return None, hurdle

    def _fetch(self, entry: Entry) -> tuple[Snapshot, Tier] | Miss:
        """From memory, or from the fastest tier that can load it; a copy that is bad is quarantined."""
        with self._lock:
            found = self._catalogue.at_hand(entry)
            if found is not None:
                return found
            held = self._catalogue.held(entry)
        hurdle = Miss.EVICTED
        for tier, id in held:
            try:
                snapshot = tier.load(id)
            except TierUnavailable as error:
                log.warning("the %s tier cannot load a snapshot of %d tokens now: %s", tier.name, entry.position, error)
                hurdle = Miss.UNAVAILABLE
                continue
            except BadSnapshotFile as error:
                self._quarantine(entry, tier, id, str(error))
                hurdle = Miss.BAD_FILE
                continue
            self._moves.promote(entry, snapshot)
            return snapshot, tier
        return hurdle

    def _quarantine(self, entry: Entry, tier: Tier, id: str, reason: str) -> None:
        """One tier's copy only: another tier's may be sound."""
        tier.quarantine(id, reason)
        with self._lock:
            if tier.name in entry.copies:
                self._catalogue.drop(entry, tier, "bad_file")

    def _note_taken(self, tier: str | None, position: int, miss: Miss | None) -> None:
        with self._lock:
            if tier is None:
                self.misses[miss or Miss.EMPTY] += 1
                return
            self.hits[tier] += 1
            self.restored[tier] += position
            if miss is not None:
                self.short_hits[miss] += 1

    def _note_use(self, used: Entry, walk: Walk) -> None:
        """For retention: what a request asked for counts as used, however the request ends."""
        with self._lock:
            used.hits += 1
            self._catalogue.use(used)
            self._catalogue.conversations.came_back(used)
            # A conversation deep below its system prompt still stands on it.
            for entry in walk.candidates:
                if entry.kind is BoundaryKind.SYSTEM and entry.position <= used.position:
                    entry.hits += entry is not used
                    self._catalogue.use(entry)


def _token_at(prompt: np.ndarray, position: int) -> int | None:
    return int(prompt[position]) if position < len(prompt) else None


def _explain(reached: int, hurdle: Miss | None, walk: Walk, length: int) -> Miss | None:
    if reached == length:
        return None
    if hurdle is not None:
        return hurdle
    if walk.depth == 0 and walk.seen is None:
        return Miss.EMPTY
    return Miss.UNSEEN if reached == walk.depth else Miss.NO_BOUNDARY


def _serves(entry: Entry, length: int) -> bool:
    """Whether a prompt of `length` tokens, of which it is a prefix, can go on from it: sampling needs logits."""
    return entry.position < length or entry.has_logits

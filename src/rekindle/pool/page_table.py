"""The pages of one sequence, and what a page is.

A page is PAGE consecutive positions of one sequence, in all attention layers of the stage at once. An open page belongs
to one sequence, which appends to it. A sealed page is never written again, so sequences and snapshots share it; its
host copies (`Page`, one per layer) are made once. A page is resident while it has a place on the device:

    open                  a place, no copies
    sealed, resident      a place, and copies once a snapshot or an eviction has asked for them
    sealed, away          no place, copies
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from rekindle.pool.choice import NO_QUERIES, NotedQuery, Queries, Scores
from rekindle.snapshots.types import Page, Ready
from rekindle.spec import PAGE


@dataclass(slots=True, eq=False)
class HeldPage:
    """One page that live sequences hold."""

    place: int | None  # on the device; None: away
    copies: tuple[Page, ...] | None = None  # in host memory, one per layer …
    taken: Ready | None = None  # … and when they are complete, if this pool takes them
    holders: int = 1
    host_page_id: int | None = None  # by which a GPU finds the copies in `PageAddresses`, if all are pinned
    keys: torch.Tensor | None = None  # [layers, kv_heads, dim] float16: mean direction of its keys, once it was scored


@dataclass(frozen=True, slots=True, eq=False)
class Undo:
    """A sequence's choice of pages before a rewindable segment, and the queries noted in the segment: a rewind into it
    continues from there."""

    position: int
    queries: Queries
    chosen: tuple[int, ...] | None
    noted: tuple[NotedQuery, ...] = ()

    def queries_at(self, position: int) -> Queries:
        noted = [query for query in self.noted if query.position < position]
        return self.queries.after_rows(self.position, position, noted)


@dataclass(frozen=True, slots=True, eq=False)
class PageList:
    """Where a table's attended pages lie, kept with the values it was computed from: at a hundred thousand tokens
    listing them anew for every step would cost as much as the step."""

    places: np.ndarray  # int32: place, host_page_id, or the scratch page for copies that the device cannot read
    away: int  # of them
    unread: int  # of those away: copies that the device cannot read itself
    pages: int
    chosen: tuple[int, ...] | None
    moves: int

    def is_current(self, table: PageTable, moves: int) -> bool:
        return self.pages == len(table.pages) and self.chosen is table.chosen and self.moves == moves


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of one sequence: page i holds positions [i·PAGE, (i + 1)·PAGE); the last one may be open.

    chosen, queries, keys and scores matter in sparse mode only: the sealed pages that are attended (None: all, or not
    chosen yet), the queries that choose them, the page keys these are compared with, and the last result. chosen is a
    function of queries.now and position // PAGE, so it is never stored.
    """

    number: int = 0  # among the pool's tables
    pages: list[HeldPage] = field(default_factory=list)
    position: int = 0
    turn: int = 0  # the pool's clock when the sequence last ran
    chosen: tuple[int, ...] | None = None
    queries: Queries = NO_QUERIES
    keys: torch.Tensor | None = None  # [pages, layers, kv_heads, dim] float16: those of its first pages
    scores: Scores | None = None
    undo: Undo | None = None
    listed: PageList | None = None  # the last result of PagePool.list_pages

    @property
    def sealed(self) -> int:
        return self.position // PAGE

    def missing(self, end: int) -> int:
        """Pages still to be allocated before positions up to `end` can be stored."""
        return max(0, -(-end // PAGE) - len(self.pages))

    def attended(self) -> Sequence[int]:
        """The pages that count, ascending."""
        if self.chosen is None or len(self.chosen) >= self.sealed:
            return range(len(self.pages))
        return (*self.chosen, *range(self.sealed, len(self.pages)))

"""Which resident page leaves the device when a place is needed: the order, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from rekindle.buffers import SINK_PAGES
from rekindle.pool.choice import is_kept
from rekindle.pool.page_table import HeldPage, PageTable


class Worth(IntEnum):
    """How much a sequence needs a sealed page on the device; the page that is worth least leaves first."""

    SPARE = 0  # not attended
    WANTED = 1  # attended
    KEPT = 2  # sink or tail: leaves only where the pool cannot even hold the sinks and tails of all sequences
    WRITTEN = 3  # more than any sealed page is worth: rows are about to be stored


def rank_for_eviction(tables: Sequence[PageTable]) -> list[tuple[Worth, HeldPage]]:
    """Resident sealed pages, the first to leave at the end. A shared page's rank is the maximum over its sharers.

    Among pages of equal worth those of the sequence that ran longest ago leave first, and of a sequence the oldest; its
    sink leaves last.
    """
    ranks: dict[HeldPage, tuple[Worth, int, int]] = {}
    for table in tables:
        chosen = None if table.chosen is None else set(table.chosen)
        for i, page in enumerate(table.pages[: table.sealed]):
            if page.place is None:
                continue
            attended = Worth.WANTED if chosen is None or i in chosen else Worth.SPARE
            worth = Worth.KEPT if is_kept(i, table.sealed) else attended
            rank = (worth, table.turn, i if i >= SINK_PAGES else table.sealed)
            ranks[page] = max(rank, ranks.get(page, rank))
    ranked = sorted(ranks.items(), key=lambda item: item[1], reverse=True)
    return [(rank[0], page) for page, rank in ranked]

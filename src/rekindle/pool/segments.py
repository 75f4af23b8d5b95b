"""What the rows of one segment of a batch attend, and what the layout of the batch needs to know of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rekindle.pool.page_table import HeldPage, PageTable
from rekindle.spec import PAGE

LATER = 16  # decode rows after a page's last row, when the page is copied: then the host has time, at its end none


@dataclass(frozen=True, slots=True, eq=False)
class SegmentAttention:
    """What the rows of one segment attend. They are rows [first, first + count) of the batch."""

    table: PageTable
    first: int
    count: int
    position: int  # of the first row
    attended: Sequence[int]  # pages, ascending: by the rows of its first page, or by all if it is not striped
    deciding: tuple[int, ...] = ()  # rows of the segment whose queries choose the pages of later rows
    striped: bool = False  # its rows lie in several pages, and some of them leave pages out: they attend page by page

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.count)

    @property
    def end(self) -> int:
        return self.position + self.count

    def strips(self) -> list[tuple[int, slice]]:
        """Its rows page by page: the page they lie in, and which rows of the segment they are."""
        pages = range(self.position // PAGE, -(-self.end // PAGE))
        edges = [max(0, page * PAGE - self.position) for page in pages]
        return list(zip(pages, map(slice, edges, [*edges[1:], self.count]), strict=True))

    @property
    def to_copy(self) -> list[HeldPage]:
        """The pages that these rows fill up; in decode, those that the row LATER before filled up."""
        first = self.position if self.count > 1 else max(0, self.position - LATER)
        return self.table.pages[first // PAGE : (first + self.count) // PAGE]

    @property
    def skipped(self) -> int:
        return len(self.table.pages) - len(self.attended)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentPages:
    """What the layout of a batch needs to know of one segment's pages."""

    places: np.ndarray  # int32 [groups, pages], their numbers: places, or host_page_ids of those that are away
    skipped: int  # pages left out, all before the segment
    noted: int | None  # the row of the batch whose query is noted …
    table: int  # … for this table
    far: bool = False  # some of the batch's pages are away, and read where they lie
    coming: bool = False  # some page-ins are under way: every layer waits for its own

    @classmethod
    def joined(cls, groups: Sequence[SegmentPages]) -> SegmentPages:
        """Of one segment, from those of all groups of layers."""
        if len(groups) == 1:
            return groups[0]
        places = np.concatenate([its.places for its in groups])
        return replace(
            groups[0], places=places, far=any(its.far for its in groups), coming=any(its.coming for its in groups)
        )

"""The pages of one stage: pools, their readers, and a table for every slot.

In exact mode all paged layers share one pool: a page holds the same positions of every layer, so pages are counted,
sent away and brought back once for all of them. In sparse mode every layer has a pool of its own, since it attends
pages of its own choice. The layers that share a pool are a group. All groups of a slot hold the same positions, and
have as many pages here and away. Without paged layers the only pool is empty, and its tables still say where every slot
stands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rekindle.batch import Batch
from rekindle.buffers import STOCK
from rekindle.errors import SnapshotMismatch
from rekindle.kernels.device_memory import DeviceMemory
from rekindle.pool import HeldPage, KvMode, PagePool, PagingCounts, Policy, PoolReader, Recorder, SegmentPages
from rekindle.pool.choice import NO_QUERIES
from rekindle.pool.ready import Together
from rekindle.pool.streaming import SharedStaging
from rekindle.snapshots.types import Page, Part, Ready
from rekindle.spec import PAGE

# What a sparse run chooses its pages by, float32 [heads, dim]; or [2, heads, dim]: now, and from the next page on.
QUERY = "query"
# Pages of a restore that travel first; twice as many follow, and so on. To list the 516 of 33,000 tokens takes the host
# as long as to send half of them.
FIRST_PORTION = 64
NO_PAGES = SegmentPages(np.zeros((1, 0), dtype=np.int32), 0, None, 0)  # of a segment in a span without paged layers


@dataclass(frozen=True, slots=True)
class PageShape:
    """Of one layer's K and V in a page: [2, PAGE, kv_heads, row]."""

    kv_heads: int
    row: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        return 2 * PAGE * self.kv_heads * self.row * self.dtype.itemsize


class PageGroup:
    """Layers that share a pool."""

    def __init__(self, layers: Sequence[int], pool: PagePool, reader: PoolReader, slots: int) -> None:
        self.layers = tuple(layers)
        self.pool = pool
        self.reader = reader
        self.tables = [pool.new_table() for _ in range(slots)]
        self._stacked = (NO_QUERIES, NO_QUERIES.stacked())  # the queries that were stacked last, and how they look

    def open_page(self, slot: int) -> tuple[int, int]:
        """The place of the page that the slot appends to, and the rows that it holds; (0, 0) where it is at an edge."""
        table = self.tables[slot]
        sealed, rest = divmod(table.position, PAGE)
        if not rest:
            return 0, 0
        place = table.pages[sealed].place
        assert place is not None, "an open page has a place"
        return place, rest

    def queries(self, slot: int) -> Tensor | None:
        """[layers, heads, dim] or [layers, 2, heads, dim], as snapshots hold them; stacked once for all layers."""
        queries = self.tables[slot].queries
        if self._stacked[0] is not queries:
            self._stacked = queries, queries.stacked()
        return self._stacked[1]

    def prepare(self, batch: Batch) -> list[SegmentPages]:
        tables = [self.tables[segment.slot] for segment in batch.segments]
        self.reader.prepare(batch.segments, tables, batch.rewindable)
        return self.reader.segment_pages()

    def export(self, slot: int) -> dict[int, tuple[Page, ...]]:
        pages = self.pool.export(self.sealed(slot))
        return dict(zip(self.layers, zip(*pages, strict=True), strict=False))

    def sealed(self, slot: int) -> list[HeldPage]:
        table = self.tables[slot]
        return table.pages[: table.sealed]

    def adopt(self, slot: int, position: int, parts: Mapping[int, Part]) -> None:
        """Where all of them have room on the device, pages begin to travel while the next ones are listed."""
        table = self.tables[slot]
        self.pool.tick([table])
        columns = list(zip(*(parts[layer].pages for layer in self.layers), strict=True))
        roomy = self.reader.mode == "exact" and len(columns) < self.pool.free_places  # with an open one behind them
        listed, portion = 0, FIRST_PORTION if roomy else len(columns)
        while listed < len(columns):
            table.pages += map(self.pool.adopt, columns[listed : listed + portion])
            listed, portion = listed + portion, 2 * portion
            if roomy:
                table.position = len(table.pages) * PAGE
                self.pool.page_in(table)
        self.pool.extend(table, position)
        table.position = position

    def take_up(self, slot: int, parts: Mapping[int, Part]) -> None:
        queries = _queries([parts[layer] for layer in self.layers])
        stacked = torch.stack(queries) if len(queries) == len(self.layers) else None
        self.reader.take_up(self.tables[slot], stacked)


class PagedKv:
    def __init__(
        self,
        shapes: Mapping[int, PageShape],
        device: torch.device,
        slots: int,
        pages: int,
        host_pages: int = 0,
        slabs: int = STOCK,
        mode: KvMode = "exact",
        policy: Policy = "qk",
        attended: int | None = None,
        record: Recorder | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        """shapes: by layer, of the layers that are paged.
        memory: that pages share with expert slots, in exact mode; None: memory of their own.
        attended: pages that a row attends at most in sparse mode; None: as many as there are places."""
        self.layers = tuple(shapes)
        self.mode = mode
        shape, staging = _one_shape(shapes), SharedStaging()
        groups = [[layer] for layer in self.layers] if mode == "sparse" and shapes else [self.layers]
        self.groups = list[PageGroup]()
        for layers in groups:
            copies = self.groups[0].pool.copies if self.groups else None
            size = (pages, len(layers), shape.kv_heads, shape.row, shape.dtype)
            pool = PagePool(*size, device, host_pages, slabs, record, copies, memory)
            reader = PoolReader(pool, mode, policy, attended, staging)
            self.groups.append(PageGroup(layers, pool, reader, slots))
        # Of the first group: where slots stand, and how many pages they have, is the same in all of them.
        self.pool, self.tables = self.groups[0].pool, self.groups[0].tables

    def __bool__(self) -> bool:
        """Whether some layer of the stage is paged."""
        return bool(self.layers)

    def place_of(self, layer: int) -> tuple[PageGroup, int, int]:
        """The layer's group, the number of that group, and the layer's number in it."""
        number = next(i for i, group in enumerate(self.groups) if layer in group.layers)
        return self.groups[number], number, self.groups[number].layers.index(layer)

    # Running

    def prepare(self, batch: Batch) -> list[SegmentPages]:
        """Pages for every row; what each segment attends, in all groups."""
        if not self:
            return [NO_PAGES] * len(batch.segments)
        return [SegmentPages.joined(pages) for pages in zip(*(g.prepare(batch) for g in self.groups), strict=True)]

    def advance(self, batch: Batch) -> None:
        """The layers have run the batch."""
        for group in self.groups:
            group.reader.advance()
            for segment in batch.segments:
                group.tables[segment.slot].position = segment.end

    def clear(self, slot: int) -> None:
        for group in self.groups:
            group.pool.clear(group.tables[slot])

    def truncate(self, slot: int, position: int) -> None:
        for group in self.groups:
            if self:
                group.pool.truncate(group.tables[slot], position)
            group.tables[slot].position = position

    def replayable(self, rows: int) -> bool:
        return all(group.reader.replayable(rows) for group in self.groups)

    def far(self, rows: int) -> bool:
        return any(group.reader.far(rows) for group in self.groups)

    @property
    def skipping(self) -> frozenset[int]:
        """The slots of the last batch whose rows left out pages."""
        return self.groups[0].reader.skipping

    @property
    def counts(self) -> PagingCounts:
        """What paging did in all groups: in sparse mode a page is of one layer."""
        return sum((group.pool.counts for group in self.groups), PagingCounts())

    # Snapshots

    def export(self, slot: int) -> dict[int, tuple[Page, ...]]:
        """The sealed pages of the slot in host memory, by layer."""
        return {layer: pages for group in self.groups for layer, pages in group.export(slot).items()} if self else {}

    def ready(self, slot: int) -> Ready | None:
        """Of the slot's exported pages."""
        awaited = [ready for group in self.groups if (ready := group.pool.ready(group.sealed(slot))) is not None]
        return awaited[0] if len(awaited) == 1 else Together(tuple(awaited)) if awaited else None

    def check(self, slot: int, position: int, parts: Mapping[int, Part]) -> None:
        """What one layer's state cannot see: queries of the same number in all layers, and room in the pool."""
        mine = [parts[layer] for layer in self.layers]
        if len({query.ndim for query in _queries(mine)}) > 1:
            raise SnapshotMismatch("some layers of the snapshot bring one query, others two")
        for group in self.groups:
            copies = parts[group.layers[0]].pages if group.layers else ()
            group.pool.check_room(group.tables[slot], copies, position)

    def adopt(self, slot: int, position: int, parts: Mapping[int, Part]) -> None:
        """Give the slot, which is empty, the pages of the parts and an open page."""
        for group in self.groups if self else ():
            group.adopt(slot, position, parts)
        self.tables[slot].position = position

    def take_up(self, slot: int, parts: Mapping[int, Part]) -> None:
        """The slot's own tensors are on their way: bring back the pages that it attends."""
        for group in self.groups if self else ():
            group.take_up(slot, parts)

    def stop(self) -> None:
        """End the threads, which the pools share."""
        self.pool.stop()

    def leak_check(self) -> None:
        """Nothing leaked; called when idle."""
        for group in self.groups:
            group.pool.check()


def _one_shape(shapes: Mapping[int, PageShape]) -> PageShape:
    """The pool divides its memory evenly, so all paged layers of a stage must be alike."""
    different = set(shapes.values()) or {PageShape(1, 1, torch.float32)}
    assert len(different) == 1, f"a pool holds pages of one shape, the stage's layers have {different}"
    return different.pop()


def _queries(parts: Sequence[Part]) -> list[Tensor]:
    return [part.tensors[QUERY] for part in parts if QUERY in part.tensors]

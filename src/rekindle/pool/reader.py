"""How the layers read the pool: over resident pages on the device, over pages that are away where they lie.

exact    every page counts. Few rows read what is away where it lies: on a GPU one kernel reads every page by its
         address, over PCIe if it must. For many rows, which would read it many times, it is streamed through two
         small buffers (streaming.py) and merged by log-sum-exp. On a CPU the pages are attended in the very groups of
         `attend`, so the bits do not depend on where pages lie.
sparse   only chosen pages count; which those are is a function of the tokens and of the pool (choice.py), anew for
         every page of rows. The pool has one layer, which chooses for itself. Rows of a chunk that lie in several pages
         attend page by page (in *strips*): what chooses for the second is a query of the first. If several sequences
         choose more than the pool holds, the rest is read as in exact mode.

Tables list just the pages that count. A step of few rows can be recorded and replayed, whatever pages it skips and
wherever the others lie, unless some host copies are not pinned (pages that came from disk or from a shard).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rekindle.batch import Segment
from rekindle.buffers import SINK_PAGES, TAIL_PAGES
from rekindle.kernels.attention import (
    FAR_ROWS,
    GROUP,
    attend,
    attend_far,
    attend_gated,
    attend_partial,
    attend_whole,
    merge_partials,
    sigmoid_gate,
)
from rekindle.kernels.attention.naive import ROWS
from rekindle.kernels.paging import key_directions, score_pages
from rekindle.kernels.ragged import Ragged
from rekindle.pool.choice import (
    KvMode,
    NotedQuery,
    Policy,
    Queries,
    Scores,
    choose,
    deciding_rows,
)
from rekindle.pool.page_table import PageList, PageTable, Undo
from rekindle.pool.pages import PagePool
from rekindle.pool.segments import SegmentAttention, SegmentPages
from rekindle.pool.streaming import Route, SharedStaging, StagingBuffers
from rekindle.spec import PAGE

KEYED = 16  # pages whose keys are averaged at once, in all layers


class PoolReader:
    """Prepares the pool for a batch, then attends it layer by layer."""

    def __init__(
        self,
        pool: PagePool,
        mode: KvMode = "exact",
        policy: Policy = "qk",
        attended: int | None = None,
        staging: SharedStaging | None = None,
    ) -> None:
        """attended: pages that a row attends at most in sparse mode, its own included: the same in all stages, though
        their pools may differ. None: as many as the pool has places.
        staging: shared with the other pools of the stage."""
        assert mode == "exact" or len(pool.kv) <= 1, f"in sparse mode a layer chooses for itself, not {len(pool.kv)}"
        self.pool = pool
        self._room = (pool.places if attended is None else attended) - 1  # sealed pages beside a row's own
        self.mode = mode
        self.policy = policy
        self._segments: tuple[SegmentAttention, ...] = ()  # of the prepared batch
        self._routes: list[Route] = []  # of the segments, made when the first layer needs them
        self._away = 0  # pages that the prepared batch attends, but the device does not hold
        self._readable = False  # the device reads them where they lie
        self._rewindable = False
        self._queries: Tensor | None = None  # [layers, tables + 1, heads, dim]; the last place is for padding
        self._noting: Tensor | None = None  # int64 [2, notes]: rows, and the tables that keep their queries
        self._noted_in_strips: dict[int, tuple[NotedQuery, ...]] = {}  # by table: of striped segments
        self._staging = staging or SharedStaging()
        if mode == "sparse" and pool.kv and pool.device.type == "cuda":
            # Compiled now, not by the first request.
            keys = pool.kv[0].new_empty(len(pool.kv), 0, *pool.kv[0].shape[2:])
            directions = key_directions(keys)
            score_pages(directions, directions.new_empty(directions.shape[1:], dtype=torch.float32))

    def far(self, rows: int) -> bool:
        """Whether segments of at most `rows` rows, over what the prepared batch attends, read pages where they lie."""
        return self._away > 0 and self._readable and rows <= FAR_ROWS and not self._striped

    def replayable(self, rows: int) -> bool:
        """Whether a recorded step can serve such segments: the device reads all that they attend, and the host has no
        pages to choose meanwhile."""
        return not self._striped and (not self._away or self.far(rows))

    @property
    def _striped(self) -> bool:
        return any(segment.striped for segment in self._segments)

    @property
    def skipping(self) -> frozenset[int]:
        """The tables of the prepared batch that leave out pages: their results are approximations."""
        return frozenset(segment.table.number for segment in self._segments if segment.skipped or segment.striped)

    def segment_pages(self) -> list[SegmentPages]:
        """Of the prepared batch, segment by segment."""
        noting, far = self.policy == "qk", self.far(max(segment.count for segment in self._segments))
        return [
            SegmentPages(
                self.pool.list_pages(segment.table).places[None],
                segment.skipped,
                segment.first + segment.deciding[0] if noting and segment.deciding and not segment.striped else None,
                segment.table.number,
                far,
                self.pool.under_way,
            )
            for segment in self._segments
        ]

    # Before the layers run

    def prepare(self, segments: Sequence[Segment], tables: Sequence[PageTable], rewindable: bool) -> None:
        """Allocates pages for all rows, chooses the pages that are attended, and pages in as many as fit."""
        self.pool.tick(tables)
        if self.mode == "sparse":
            for table in tables:
                self._choose(table)
                if table.scores is not None:
                    table.scores.poll()
        for segment, table in zip(segments, tables, strict=True):
            self.pool.extend(table, segment.end)
        for table in tables:
            self.pool.page_in(table)
        first, prepared = 0, list[SegmentAttention]()
        for segment, table in zip(segments, tables, strict=True):
            prepared.append(self._attention_of(segment, table, first, rewindable))
            first += len(segment)
        self._segments = tuple(prepared)
        self._routes = []
        self._noted_in_strips = {}
        self._rewindable = rewindable
        self._note_away([self.pool.list_pages(table) for table in tables])
        skipped = sum(segment.skipped for segment in prepared)
        if skipped or self._away:
            self.pool.count(away_attended=self._away, skipped=skipped)

    def _note_away(self, lists: Sequence[PageList]) -> None:
        """How many attended pages the device does not hold, and whether it can read them itself."""
        addresses = self.pool.addresses
        self._away = sum(listed.away for listed in lists)
        self._readable = addresses is not None and not any(listed.unread for listed in lists)
        if addresses is not None and self._away:
            addresses.send()

    def _attention_of(self, segment: Segment, table: PageTable, first: int, rewindable: bool) -> SegmentAttention:
        table.undo = None
        prepared = SegmentAttention(table, first, len(segment), segment.position, table.attended())
        if self.mode == "exact":
            return prepared
        if rewindable:
            table.undo = Undo(segment.position, table.queries, table.chosen)
        last = (segment.end - 1) // PAGE
        return replace(
            prepared,
            deciding=tuple(deciding_rows(segment.position, segment.end, self._room)),
            striped=last > max(self._room, segment.position // PAGE),
        )

    def take_up(self, table: PageTable, queries: Tensor | None) -> None:
        """Continue a restored sequence: its pages are away, its queries are those of the run that was captured."""
        if self.mode == "sparse":
            table.queries = Queries.of(None if queries is None else queries.to(self.pool.device))
            self._choose(table)
        self.pool.page_in(table)
        self.pool.join()

    def _choose(self, table: PageTable) -> None:
        if table.chosen is not None:
            return
        sealed, (query, following) = table.sealed, (table.queries.now, table.queries.next)
        if table.scores is None or query is None or not table.scores.answers(query, sealed):
            table.scores = self._score(table, query, sealed)
        table.chosen = choose(sealed, self._room, None) if table.scores is None else table.scores.chosen()
        self.pool.count(choices=1)
        if following is not None:
            table.scores = self._score(table, following, sealed + 1)

    def _score(self, table: PageTable, query: Tensor | None, sealed: int) -> Scores | None:
        """Starts scoring pages by the query, for rows behind `sealed` pages; `Scores.chosen` waits for the result. None
        where nothing is left out, or the latest pages are the best.

        Pages of the tail are attended in any case. The same pages are scored together whenever that is: the same bits.
        """
        if query is None or sealed <= self._room:
            return None
        keys = self._keys(table, max(SINK_PAGES, sealed - TAIL_PAGES))
        return Scores(score_pages(keys, query), query, sealed, self._room)

    def _keys(self, table: PageTable, count: int) -> Tensor:
        """Key directions of its first pages; computed once per page."""
        known = 0 if table.keys is None else len(table.keys)
        fresh = table.pages[known:count]
        unknown = [page for page in fresh if page.keys is None]
        for at in range(0, len(unknown), KEYED):
            some = unknown[at : at + KEYED]
            for page, keys in zip(some, key_directions(self.pool.keys_of(some)), strict=True):
                page.keys = keys
        if fresh:
            more = torch.stack([page.keys for page in fresh if page.keys is not None])
            table.keys = more if table.keys is None else torch.cat((table.keys, more))
        assert table.keys is not None, "pages are chosen among sealed ones"
        return table.keys[:count]

    def advance(self) -> None:
        """The layers have run: sequences that reached another page, or the end of a chunk, choose pages anew before
        their next rows."""
        for segment in self._segments if self.mode == "sparse" else ():
            self._advance(segment)
        if self.pool.away and not self._rewindable:
            # The pool is short, so these pages will be paged out: copied now, while the layers run.
            self.pool.export([page for segment in self._segments for page in segment.to_copy])

    def _advance(self, segment: SegmentAttention) -> None:
        table, end, noted = segment.table, segment.end, self._noted(segment)
        table.queries = table.queries.after_rows(segment.position, end, noted)
        moved = end // PAGE > segment.position // PAGE
        if table.undo is not None:
            table.undo = replace(table.undo, noted=noted)
        if moved:
            table.chosen = None
        if moved and segment.count > 1:
            table.scores = self._score(table, table.queries.now, end // PAGE)
        elif noted and not moved:
            table.scores = self._score(table, table.queries.next, end // PAGE + 1)

    def _noted(self, segment: SegmentAttention) -> tuple[NotedQuery, ...]:
        if segment.striped:
            return self._noted_in_strips.get(segment.table.number, ())
        if not segment.deciding or self._queries is None:
            return ()
        # A copy: the table's next query is noted in the same place.
        query = self._queries[:, segment.table.number].to(torch.float32, copy=True)
        return (NotedQuery(segment.position + segment.deciding[0], query),)

    # In the layers

    def attend(self, layer: int, q: Tensor, rows: Ragged, scale: float, gate: Tensor | None = None) -> Tensor:
        """q [rows, heads, dim] over layer number `layer` of the pool, gated -> [rows, heads · dim]."""
        if rows.coming:
            self.pool.wait_for(layer)
        if rows.noted is not None:
            self._note(layer, q, rows.noted)
        if rows.far and (self._readable or not self._away):
            assert self.pool.addresses is not None, "only a GPU reads pages where they lie"
            return attend_far(q, self.pool.kv[layer], self.pool.addresses.table[layer], rows, scale, gate)
        if self._away or self._striped:
            out = self._attend_scattered(layer, q, rows, scale)
            return out.flatten(1) if gate is None else sigmoid_gate(out, gate)
        if gate is None:
            return attend(q, self.pool.kv[layer], rows, scale).flatten(1)
        return attend_gated(q, self.pool.kv[layer], rows, scale, gate)

    def _note(self, layer: int, q: Tensor, noted: Tensor) -> None:
        """Keep the queries by which later pages are chosen. On the device alone, so that it can be recorded."""
        if self._queries is None:
            layers, tables = len(self.pool.kv), len(self.pool.tables)
            self._queries = torch.zeros(layers, tables + 1, *q.shape[1:], dtype=q.dtype, device=q.device)
        if layer == 0 or self._noting is None:
            self._noting = noted.long()
        rows, places = self._noting
        self._queries[layer].index_copy_(0, places, q.index_select(0, rows))

    def _attend_scattered(self, layer: int, q: Tensor, rows: Ragged, scale: float) -> Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        if q.is_cuda and not self._routes:
            self._routes = [Route.of(s.table.pages, s.attended, self.pool) for s in self._segments]
            self._follow()
        for i, segment in enumerate(self._segments):
            part, positions = q[segment.rows], rows.row_positions[segment.rows]
            if segment.striped:
                self._attend_strips(layer, part, segment, positions, scale, out[segment.rows])
            elif q.is_cuda:
                out[segment.rows] = self._attend_streamed(layer, part, self._routes[i], positions, scale)
            else:
                pages, position = segment.attended, segment.position
                self._attend_grouped(layer, part, segment.table, pages, position, scale, out[segment.rows])
        return out

    def _attend_strips(
        self, layer: int, q: Tensor, segment: SegmentAttention, positions: Tensor, scale: float, out: Tensor
    ) -> None:
        """Page by page, since every page of rows attends other pages."""
        table, strips = segment.table, segment.strips()
        for (page, rows), chosen in zip(strips, self._choose_for_strips(q, segment), strict=True):
            attended = (*chosen, page)
            if q.is_cuda:
                route = Route.of(table.pages, attended, self.pool)
                self._follow()
                out[rows] = self._attend_streamed(layer, q[rows], route, positions[rows], scale)
            else:
                position = segment.position + rows.start
                self._attend_grouped(layer, q[rows], table, attended, position, scale, out[rows])

    def _choose_for_strips(self, q: Tensor, segment: SegmentAttention) -> list[tuple[int, ...]]:
        """The sealed pages that each strip attends. The keys of the segment's own pages are stored by now."""
        table, queries = segment.table, dict[int, Tensor | None]()
        if self.policy == "qk":
            asked = q[list(segment.deciding)].float()  # a copy, contiguous: [rows that decide, heads, dim]
            positions = (segment.position + row for row in segment.deciding)
            noted = tuple(NotedQuery(at, query[None]) for at, query in zip(positions, asked, strict=True))
            self._noted_in_strips[table.number] = noted
            queries = table.queries.by_page(segment.position // PAGE, noted)
        pages = [page for page, _ in segment.strips()]
        scores = [self._score(table, queries.get(page), page) for page in pages]  # all, before the host waits for one
        return [
            choose(page, self._room, None) if found is None else found.chosen()
            for page, found in zip(pages, scores, strict=True)
        ]

    def _attend_grouped(
        self, layer: int, q: Tensor, table: PageTable, attended: Sequence[int], position: int, scale: float, out: Tensor
    ) -> None:
        """In groups of GROUP pages and ROWS rows, as `kernels/attention/naive.py` does."""
        for first in range(0, len(q), ROWS):
            stop = min(first + ROWS, len(q))
            positions = torch.arange(position + first, position + stop)
            pages = [i for i in attended if i * PAGE < position + stop]
            parts = [
                self._attend_group(layer, q[first:stop], table, pages[at : at + GROUP], positions, scale)
                for at in range(0, len(pages), GROUP)
            ]
            out[first:stop] = merge_partials(*zip(*parts, strict=True)).to(out.dtype)

    def _attend_group(
        self, layer: int, q: Tensor, table: PageTable, group: list[int], row_positions: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        held = [table.pages[i] for i in group]
        places = [page.place for page in held if page.place is not None]
        kv, index = self.pool.kv[layer], torch.tensor(places)
        if len(places) < len(held):
            kv, index = torch.stack([self.pool.data(page, layer) for page in held]), torch.arange(len(held))
        return attend_partial(q, kv, index, torch.tensor(group) * PAGE, row_positions, scale)

    def _follow(self) -> None:
        """What is staged is read behind what the current stream has by now: addresses, and the copies of pages that
        have just been paged out, which that stream has joined. In exact mode once for all layers, so that they overlap
        with the transfers."""
        self._buffers.follow(torch.cuda.current_stream(self.pool.device))

    @property
    def _buffers(self) -> StagingBuffers:
        return self._staging.of(self.pool.kv[0])

    def _attend_streamed(self, layer: int, q: Tensor, route: Route, row_positions: Tensor, scale: float) -> Tensor:
        """Resident pages at once, then those away in groups: the next group travels while one is attended."""
        # Every row sees its own page, which is resident, so its log-sum-exp is finite from the start.
        out, lse = attend_partial(q, self.pool.kv[layer], route.places, route.positions, row_positions, scale)
        for group in route.away:
            with self._buffers.staged(group, layer) as (kv, index):
                more, more_lse = attend_whole(q, kv, index, scale)  # pages that are away are sealed: before all rows
            both = torch.logaddexp(lse, more_lse)
            out.mul_((lse - both).exp_()[..., None]).addcmul_(more, (more_lse - both).exp_()[..., None])
            lse = both
        return out.to(q.dtype)

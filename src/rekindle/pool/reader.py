"""How the layers read the pool: over resident pages on the device, over pages that are away where they lie.

exact    every page counts. Few rows read what is away where it lies: on a GPU one kernel reads every page by its
         address, over the link if it must. For many rows, which would read it many times, it is streamed through two
         small buffers on a stream of its own and merged by log-sum-exp. On a CPU the pages are attended in the very
         groups of `attend`, so the bits do not depend on where pages lie.
sparse   only chosen pages count; which those are is a function of the sequence's state alone (choice.py). If several
         sequences choose more than the pool holds, the rest is read as in exact mode.

Tables list just the pages that count. A step of few rows can be recorded and replayed, whatever it leaves out and
wherever the rest lies, unless host memory is not pinned (pages that came from disk or over a link).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from rekindle.batch import Segment
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
from rekindle.kernels.paging import fetch_pages, key_directions, score_pages
from rekindle.kernels.ragged import Ragged
from rekindle.pool.choice import (
    SINK,
    TAIL,
    KvMode,
    Noted,
    Policy,
    Queries,
    Scores,
    choose,
    deciding_row,
)
from rekindle.pool.homes import sent
from rekindle.pool.pages import HeldPage, Laid, PagePool, PageTable, Undo
from rekindle.spec import PAGE

STAGED = 64  # pages of one layer in each of the two buffers between host and device
KEYED = 16  # pages whose keys are averaged at once, in all layers
LATER = 16  # rows behind the end of a page, in decode: there the host has time to copy it, at the end it has none


@dataclass(frozen=True, slots=True, eq=False)
class Reach:
    """What the rows of one segment attend. They are rows [first, first + count) of the batch."""

    table: PageTable
    first: int
    count: int
    position: int  # of the first row
    attended: Sequence[int]  # pages, ascending
    decides: int | None  # the row of the batch whose query chooses pages from here on

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.count)

    def away(self) -> list[int]:
        return [i for i in self.attended if self.table.pages[i].place is None]

    @property
    def to_copy(self) -> list[HeldPage]:
        """The pages that these rows fill up; in decode, that the row LATER before filled up."""
        first = self.position if self.count > 1 else max(0, self.position - LATER)
        return self.table.pages[first // PAGE : (first + self.count) // PAGE]

    @property
    def skipped(self) -> int:
        return len(self.table.pages) - len(self.attended)


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """What the layout of a batch needs to know of one segment's pages."""

    places: np.ndarray  # int32, the numbers of the attended pages: places, or berths of those that are away
    skipped: int  # pages left out, all before the segment
    noted: int | None  # the row of the batch whose query is noted …
    table: int  # … for this table
    far: bool = False  # some of the batch's pages are away, and read where they lie
    coming: bool = False  # some are on their way back: every layer waits for its own


class PoolReader:
    """Prepares the pool for a batch, then attends it layer by layer."""

    def __init__(self, pool: PagePool, mode: KvMode = "exact", policy: Policy = "qk", open_pages: int = 1) -> None:
        """open_pages: that the rows of one step beside others lie in: two for blocks, which may lie across an edge."""
        self.pool = pool
        self._open_pages = open_pages
        self.mode = mode
        self.policy = policy
        self._reaches: tuple[Reach, ...] = ()
        self._routes: list[_Route] = []  # of the reaches, made when the first layer needs them
        self._away = 0  # pages that the prepared batch attends, but the device does not hold
        self._readable = False  # the device reads them where they lie
        self._rewindable = False
        self._queries: Tensor | None = None  # [layers, tables + 1, heads, dim]; the last place is for padding
        self._noting: Tensor | None = None  # what the rows of the forward under way note, as its first layer read it
        self._staging: _Staging | None = None
        if mode == "sparse" and pool.kv and pool.device.type == "cuda":
            # Compiled now, not amid a request.
            keys = pool.kv[0].new_empty(len(pool.kv), 0, *pool.kv[0].shape[2:])
            directions = key_directions(keys)
            score_pages(directions, directions.new_empty(directions.shape[1:], dtype=torch.float32))

    def far(self, rows: int) -> bool:
        """Whether segments of so many rows, over what the prepared batch attends, read some pages where they lie."""
        return self._away > 0 and self._readable and rows <= FAR_ROWS

    def replayable(self, rows: int) -> bool:
        """Whether a recorded step of such segments can: the device reads all that they attend."""
        return not self._away or self.far(rows)

    @property
    def skipping(self) -> frozenset[int]:
        """The tables of the prepared batch that leave out pages: their results are approximations."""
        return frozenset(reach.table.number for reach in self._reaches if reach.skipped)

    def seats(self) -> list[Seat]:
        """Of the prepared batch, segment by segment."""
        noting, far = self.policy == "qk", self.far(max(reach.count for reach in self._reaches))
        return [
            Seat(
                self.pool.lay(reach.table).places,
                reach.skipped,
                reach.decides if noting else None,
                reach.table.number,
                far,
                self.pool.under_way,
            )
            for reach in self._reaches
        ]

    # Before the layers run

    def prepare(self, segments: Sequence[Segment], tables: Sequence[PageTable], rewindable: bool) -> None:
        """Places for all rows, the pages that are attended, and as many of these on the device as fit."""
        self.pool.tick(tables)
        if self.mode == "sparse":
            for table in tables:
                self._choose(table)
                if table.scores is not None:
                    table.scores.look()
        for segment, table in zip(segments, tables, strict=True):
            self.pool.extend(table, segment.end)
        for table in tables:
            self.pool.bring_back(table)
        first, reaches = 0, list[Reach]()
        for segment, table in zip(segments, tables, strict=True):
            reaches.append(self._reach(segment, table, first, rewindable))
            first += len(segment)
        self._reaches = tuple(reaches)
        self._routes = []
        self._rewindable = rewindable
        self._look_where([self.pool.lay(table) for table in tables])
        skipped = sum(reach.skipped for reach in reaches)
        if skipped or self._away:
            self.pool.count(away_attended=self._away, skipped=skipped)

    def _look_where(self, laid: Sequence[Laid]) -> None:
        """What the device does not hold, and whether it can read that itself."""
        homes = self.pool.homes
        self._away = sum(table.away for table in laid)
        self._readable = homes is not None and not any(table.unread for table in laid)
        if homes is not None and self._away:
            homes.send()

    def _reach(self, segment: Segment, table: PageTable, first: int, rewindable: bool) -> Reach:
        row = deciding_row(segment.position, segment.end, rewindable) if self.mode == "sparse" else None
        table.undo = None
        if rewindable and self.mode == "sparse":
            table.undo = Undo(segment.position, table.queries, table.chosen)
        decides = None if row is None else first + row
        return Reach(table, first, len(segment), segment.position, table.attended(), decides)

    def take_up(self, table: PageTable, queries: Tensor | None) -> None:
        """A restored sequence: its pages are away, its queries are what the straight run had at this position."""
        if self.mode == "sparse":
            table.queries = Queries.of(None if queries is None else queries.to(self.pool.device))
            self._choose(table)
            if table.queries.next is not None:
                self._score(table, table.queries.next, table.sealed + 1)
        self.pool.bring_back(table)
        self.pool.join()

    def _choose(self, table: PageTable) -> None:
        if table.chosen is not None:
            return
        sealed, query = table.sealed, table.queries.now
        if query is not None and not (table.scores is not None and table.scores.serve(query, sealed)):
            self._score(table, query, sealed)
        if query is None or table.scores is None:
            table.chosen = choose(sealed, self._room(sealed), None)
        else:
            table.chosen = table.scores.chosen()
        self.pool.count(choices=1)

    def _room(self, sealed: int) -> int:
        """Pages that a sequence of so many sealed ones may attend beside the open ones."""
        room = self.pool.places - 1
        return room if sealed <= room else self.pool.places - self._open_pages

    def _score(self, table: PageTable, query: Tensor, sealed: int) -> None:
        """Let the device say which pages answer the query, for when so many are sealed. Nobody waits for it here.

        Pages of the tail are chosen in any case. The same pages are scored together whenever that is: the same bits.
        """
        table.scores = None
        room = self._room(sealed)
        if sealed > room:
            keys = self._keys(table, max(SINK, sealed - TAIL))
            table.scores = Scores(score_pages(keys, query), query, sealed, room)

    def _keys(self, table: PageTable, count: int) -> Tensor:
        """Of its first pages; only those that nobody asked for before are new."""
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
        """The layers have run: whoever is on another page now, or behind a chunk, chooses anew before its next rows."""
        for reach in self._reaches if self.mode == "sparse" else ():
            self._pass(reach)
        if self.pool.away and not self._rewindable:
            # The pool is short, so these will leave one day: copied while the layers run, nobody waits for it then.
            self.pool.export([page for reach in self._reaches for page in reach.to_copy])

    def _pass(self, reach: Reach) -> None:
        table, end, noted = reach.table, reach.position + reach.count, self._noted(reach)
        if reach.count > 1 and not self._rewindable:
            table.chosen, table.queries = None, Queries(None if noted is None else noted.query)
            if noted is not None:
                self._score(table, noted.query, end // PAGE)
            return
        table.queries = table.queries.behind_rows(reach.position, end, noted)
        if end // PAGE > reach.position // PAGE:
            table.chosen = None
        if table.undo is not None:
            table.undo = replace(table.undo, noted=noted)
        if noted is not None and table.queries.next is noted.query:
            self._score(table, noted.query, noted.position // PAGE + 1)

    def _noted(self, reach: Reach) -> Noted | None:
        if reach.decides is None or self._queries is None:
            return None
        # A copy: the next one is noted in the same place.
        query = self._queries[:, reach.table.number].to(torch.float32, copy=True)
        return Noted(reach.position + reach.decides - reach.first, query)

    # In the layers

    def attend(self, layer: int, q: Tensor, rows: Ragged, scale: float, gate: Tensor | None = None) -> Tensor:
        """q [rows, heads, dim] over layer number `layer` of the pool, gated -> [rows, heads · dim]."""
        if rows.coming:
            self.pool.wait_for(layer)
        if rows.noted is not None:
            self._note(layer, q, rows.noted)
        if rows.far:
            assert self.pool.homes is not None, "only a GPU reads pages where they lie"
            return attend_far(q, self.pool.kv[layer], self.pool.homes.table[layer], rows, scale, gate)
        if self._away:
            out = self._attend_scattered(layer, q, rows, scale)
            return out.flatten(1) if gate is None else sigmoid_gate(out, gate)
        if gate is None:
            return attend(q, self.pool.kv[layer], rows, scale).flatten(1)
        return attend_gated(q, self.pool.kv[layer], rows, scale, gate)

    def _note(self, layer: int, q: Tensor, noted: Tensor) -> None:
        """Queries that choose pages from here on. Without a word from the host, so that it can be recorded."""
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
            self._make_routes()
        for i, reach in enumerate(self._reaches):
            part = q[reach.rows]
            if q.is_cuda:
                positions = rows.row_positions[reach.rows]
                out[reach.rows] = self._attend_streamed(layer, part, self._routes[i], positions, scale)
            else:
                self._attend_grouped(layer, part, reach, scale, out[reach.rows])
        return out

    def _attend_grouped(self, layer: int, q: Tensor, reach: Reach, scale: float, out: Tensor) -> None:
        """In groups of GROUP pages and ROWS rows, as the definition does."""
        for first in range(0, reach.count, ROWS):
            stop = min(first + ROWS, reach.count)
            positions = torch.arange(reach.position + first, reach.position + stop)
            pages = [i for i in reach.attended if i * PAGE < reach.position + stop]
            parts = [
                self._attend_group(layer, q[first:stop], reach.table, pages[at : at + GROUP], positions, scale)
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

    def _make_routes(self) -> None:
        self._routes = [_Route.of(reach, self.pool) for reach in self._reaches]
        if self._staging is None:
            self._staging = _Staging(self.pool.kv[0])
        # What it reads comes from the current stream: the addresses above, and the copies of pages that were sent away
        # a moment ago, which that stream has joined. Once for all layers, so that they still overlap with the link.
        self._staging.follow(torch.cuda.current_stream(self.pool.device))

    def _attend_streamed(self, layer: int, q: Tensor, route: _Route, row_positions: Tensor, scale: float) -> Tensor:
        """Resident pages at once, then what is away in turns: the next pages travel while these are attended."""
        # Every row sees its own page, which is resident, so its log-sum-exp is finite from the start.
        out, lse = attend_partial(q, self.pool.kv[layer], route.places, route.positions, row_positions, scale)
        for turn in route.away:
            assert self._staging is not None, "made with the routes"
            with self._staging.staged(turn, layer) as (kv, index):
                more, more_lse = attend_whole(q, kv, index, scale)  # what is away is sealed, and lies before all rows
            both = torch.logaddexp(lse, more_lse)
            out.mul_((lse - both).exp_()[..., None]).addcmul_(more, (more_lse - both).exp_()[..., None])
            lse = both
        return out.to(q.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """Up to STAGED pages that are away."""

    pages: list[HeldPage]
    addresses: Tensor | None  # int64 [layers, pages], if the device reads all of them itself

    def data(self, layer: int) -> list[Tensor]:
        copies = [page.copies for page in self.pages if page.copies is not None]
        assert len(copies) == len(self.pages), "a page that is away has copies"
        return [copy[layer].data for copy in copies]


@dataclass(frozen=True, slots=True, eq=False)
class _Route:
    """Where the pages of a reach lie, as tensors on the device; the same for all layers."""

    places: Tensor  # int32, of resident pages
    positions: Tensor  # int32, the first position in each
    away: list[_Turn]

    @classmethod
    def of(cls, reach: Reach, pool: PagePool) -> _Route:
        def int32(values: Sequence[int]) -> Tensor:
            return sent(torch.tensor(values, dtype=torch.int32), pool.device)

        pages, away = reach.table.pages, reach.away()
        resident = {i: place for i in reach.attended if (place := pages[i].place) is not None}
        turns = []
        for at in range(0, len(away), STAGED):
            numbers = away[at : at + STAGED]
            turn = [pages[i] for i in numbers]
            turns.append(_Turn(turn, pool.addresses_of(turn)))
        return cls(int32(list(resident.values())), int32([i * PAGE for i in resident]), turns)


class _Staging:
    """Two buffers on the device, filled in turn on a stream of their own."""

    def __init__(self, kv: Tensor) -> None:
        self._buffers = [torch.empty((STAGED, *kv.shape[1:]), dtype=kv.dtype, device=kv.device) for _ in range(2)]
        self._stream = torch.cuda.Stream(kv.device)
        self._index = torch.arange(STAGED, dtype=torch.int32, device=kv.device)
        # Where the pages of each buffer lie, [1, STAGED].
        steps = torch.arange(STAGED, device=kv.device) * self._buffers[0][0].nbytes
        self._places = [(steps + buffer.data_ptr())[None] for buffer in self._buffers]
        self._read = [torch.cuda.Event() for _ in range(2)]  # the buffer's last reader is done
        self._turn = 0

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Read nothing before all that was handed to the stream so far is done."""
        self._stream.wait_stream(stream)

    @contextmanager
    def staged(self, turn: _Turn, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A buffer and the places of these pages in it; it is filled again once the readers in the block are done."""
        self._turn = 1 - self._turn
        buffer, read = self._buffers[self._turn], self._read[self._turn]
        current = torch.cuda.current_stream(buffer.device)
        self._stream.wait_event(read)
        count = len(turn.pages)
        with torch.cuda.stream(self._stream):
            if turn.addresses is not None:
                targets = self._places[self._turn][:, :count]
                fetch_pages(targets, turn.addresses[layer : layer + 1], buffer[0].nbytes)
            else:
                for place, data in zip(buffer, turn.data(layer), strict=False):
                    place.copy_(data, non_blocking=True)
        current.wait_stream(self._stream)
        try:
            yield buffer, self._index[:count]
        finally:
            read.record(current)

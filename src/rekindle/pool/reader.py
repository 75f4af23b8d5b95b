"""How the layers read the pool: over resident pages on the device, over pages that are away where they lie.

exact    every page counts. What is away is attended from host memory (CPU) or streamed through two small buffers on a
         stream of its own (GPU), and merged by log-sum-exp. On a CPU the pages are attended in the very groups of
         `attend`, so the bits do not depend on where pages lie.
sparse   only chosen pages count; which those are is a function of the sequence's state alone (choice.py). If several
         sequences choose more than the pool holds, the rest is streamed as in exact mode.

Where nothing that counts is away, tables list just the pages that count, and the plain kernel reads those: a step over
such tables can be recorded and replayed, whatever it leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rekindle.batch import Segment
from rekindle.kernels.attention import GROUP, attend, attend_gated, attend_partial, merge_partials, sigmoid_gate
from rekindle.kernels.attention.naive import ROWS
from rekindle.kernels.paging import fetch_pages
from rekindle.kernels.ragged import Ragged
from rekindle.pool.choice import KvMode, Policy, choose, deciding_row, key_directions, score_pages
from rekindle.pool.pages import HeldPage, PagePool, PageTable, Undo, addresses_of
from rekindle.spec import PAGE

STAGED = 64  # pages of one layer in each of the two buffers between host and device
PARTS = 8  # results over staged pages that wait to be merged together …
FEW_ROWS = 64  # … where rows are few; a chunk's results are large and merged one by one


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
    def skipped(self) -> int:
        return len(self.table.pages) - len(self.attended)


@dataclass(frozen=True, slots=True, eq=False)
class Seat:
    """What the layout of a batch needs to know of one segment's pages."""

    places: np.ndarray  # int32, where the attended pages lie
    skipped: int  # pages left out, all before the segment
    noted: int | None  # the row of the batch whose query is noted …
    table: int  # … for this table


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
        self._away = False
        self._queries: Tensor | None = None  # [layers, tables + 1, heads, dim] float32; the last place is for padding
        self._staging: _Staging | None = None

    @property
    def replayable(self) -> bool:
        """All that the prepared batch attends lies in the pool: a recorded step reads the same."""
        return not self._away

    @property
    def skipping(self) -> frozenset[int]:
        """The tables of the prepared batch that leave out pages: their results are approximations."""
        return frozenset(reach.table.number for reach in self._reaches if reach.skipped)

    def seats(self) -> list[Seat]:
        """Of the prepared batch, segment by segment."""
        noting = self.policy == "qk"
        return [
            Seat(self.pool.places_of(reach.table), reach.skipped, reach.decides if noting else None, reach.table.number)
            for reach in self._reaches
        ]

    # Before the layers run

    def prepare(self, segments: Sequence[Segment], tables: Sequence[PageTable], rewindable: bool) -> None:
        """Places for all rows, the pages that are attended, and as many of these on the device as fit."""
        self.pool.tick(tables)
        if self.mode == "sparse":
            for table in tables:
                self._choose(table)
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
        skipped = sum(reach.skipped for reach in reaches)
        away = sum(len(reach.away()) for reach in reaches) if self.pool.away else 0
        self._away = away > 0
        if skipped or away:
            self.pool.count(away_attended=away, skipped=skipped)

    def _reach(self, segment: Segment, table: PageTable, first: int, rewindable: bool) -> Reach:
        row = deciding_row(segment.position, segment.end, rewindable) if self.mode == "sparse" else None
        table.undo = None
        if row is not None and rewindable:
            table.undo = Undo(segment.position, None if table.query is None else table.query.clone())
        decides = None if row is None else first + row
        return Reach(table, first, len(segment), segment.position, table.attended(), decides)

    def take_up(self, table: PageTable, query: Tensor | None) -> None:
        """A restored sequence: its pages are away, its query is what the straight run had at this position."""
        if self.mode == "sparse":
            table.query = None if query is None else query.to(self.pool.device)
            self._choose(table)
        self.pool.bring_back(table)

    def _choose(self, table: PageTable) -> None:
        if table.chosen is not None:
            return
        room = self.pool.places - 1  # one for the open page
        if table.sealed > room:
            room = self.pool.places - self._open_pages
        scores = None
        if self.policy == "qk" and table.query is not None and table.sealed > room:
            scores = score_pages(self._all_keys(table), table.query).cpu().numpy()
        table.chosen = choose(table.sealed, room, scores)
        self.pool.count(choices=1)

    def _all_keys(self, table: PageTable) -> Tensor:
        """Of the sealed pages; only those that were sealed since the last time are new."""
        known = 0 if table.keys is None else len(table.keys)
        fresh = [self._keys(page) for page in table.pages[known : table.sealed]]
        if fresh:
            more = torch.stack(fresh)
            table.keys = more if table.keys is None else torch.cat((table.keys, more))
        assert table.keys is not None, "pages are chosen among sealed ones"
        return table.keys

    def _keys(self, page: HeldPage) -> Tensor:
        if page.keys is None:
            page.keys = key_directions([data.to(self.pool.device) for data in self.pool.all_data(page)])
        return page.keys

    def advance(self) -> None:
        """The layers have run: whoever got a new deciding query chooses anew before its next rows."""
        for reach in self._reaches:
            if reach.decides is not None:
                reach.table.chosen = None
                if self._queries is not None:
                    reach.table.query = self._queries[:, reach.table.number]

    # In the layers

    def attend(self, layer: int, q: Tensor, rows: Ragged, scale: float, gate: Tensor | None = None) -> Tensor:
        """q [rows, heads, dim] over layer number `layer` of the pool, gated -> [rows, heads · dim]."""
        if rows.noted is not None:
            self._note(layer, q, rows.noted)
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
            self._queries = torch.zeros(layers, tables + 1, *q.shape[1:], device=q.device)
        rows, places = noted.long()
        self._queries[layer].index_copy_(0, places, q.index_select(0, rows).float())

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
        self._routes = [_Route.of(reach, self.pool.device) for reach in self._reaches]
        if self._staging is None:
            self._staging = _Staging(self.pool.kv[0])
        # What it reads comes from the current stream: the addresses above, and the copies of pages that were sent away
        # a moment ago, which that stream has joined. Once for all layers, so that they still overlap with the link.
        self._staging.follow(torch.cuda.current_stream(self.pool.device))

    def _attend_streamed(self, layer: int, q: Tensor, route: _Route, row_positions: Tensor, scale: float) -> Tensor:
        """Resident pages at once, then what is away in turns: the next pages travel while these are attended."""
        # Every row sees its own page, which is resident, so its log-sum-exp is finite from the start.
        parts = [attend_partial(q, self.pool.kv[layer], route.places, route.positions, row_positions, scale)]
        for turn in route.away:
            assert self._staging is not None, "made with the routes"
            with self._staging.staged(turn, layer) as (kv, index):
                more, more_lse = attend_partial(q, kv, index, turn.positions, row_positions, scale)
            parts.append((more, more_lse))
            if len(parts) > (PARTS if len(q) <= FEW_ROWS else 1):
                parts = [_merge(parts)]
        return _merge(parts)[0].to(q.dtype)


def _merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The attention over the union of the parts and its log-sum-exp, which is finite in the first of them."""
    if len(parts) == 1:
        return parts[0]
    outs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
    lse = lses.logsumexp(0)
    return (outs * (lses - lse).exp()[..., None]).sum(0), lse


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """Up to STAGED pages that are away."""

    pages: list[HeldPage]
    positions: Tensor  # int32, the first position in each
    addresses: Tensor | None  # int64 [layers, pages], if all lie in pinned memory

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
    def of(cls, reach: Reach, device: torch.device) -> _Route:
        def int32(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32).to(device, non_blocking=True)

        pages, away = reach.table.pages, reach.away()
        resident = {i: place for i in reach.attended if (place := pages[i].place) is not None}
        turns = []
        for at in range(0, len(away), STAGED):
            numbers = away[at : at + STAGED]
            turn = [pages[i] for i in numbers]
            turns.append(_Turn(turn, int32([i * PAGE for i in numbers]), addresses_of(turn, device)))
        return cls(int32(list(resident.values())), int32([i * PAGE for i in resident]), turns)


class _Staging:
    """Two buffers on the device, filled in turn on a stream of their own."""

    def __init__(self, kv: Tensor) -> None:
        self._buffers = [torch.empty((STAGED, *kv.shape[1:]), dtype=kv.dtype, device=kv.device) for _ in range(2)]
        self._stream = torch.cuda.Stream(kv.device)
        self._index = torch.arange(STAGED, dtype=torch.int32, device=kv.device)
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
        index = self._index[: len(turn.pages)]
        with torch.cuda.stream(self._stream):
            fetch_pages(buffer, turn.data(layer), index, None if turn.addresses is None else turn.addresses[layer])
        current.wait_stream(self._stream)
        yield buffer, index
        read.record(current)

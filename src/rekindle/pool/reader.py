"""How the layers read the pool: over resident pages on the device, over pages that are away where they lie.

exact    every page counts. What is away is attended from host memory (CPU) or streamed through two small buffers on a
         stream of its own (GPU), and merged by log-sum-exp. On a CPU the pages are attended in the very groups of
         `attend`, so the bits do not depend on where pages lie.
sparse   only chosen pages count; which those are is a function of the sequence's state alone (choice.py). If several
         sequences choose more than the pool holds, the rest is streamed as in exact mode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from rekindle.batch import Segment
from rekindle.kernels.attention import GROUP, attend, attend_partial, merge_partials
from rekindle.kernels.attention.naive import ROWS
from rekindle.kernels.paging import fetch_pages
from rekindle.kernels.ragged import Ragged
from rekindle.pool.choice import KvMode, Policy, choose, deciding_row, key_directions, score_pages
from rekindle.pool.pages import HeldPage, PagePool, PageTable, Undo
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


class PoolReader:
    """Prepares the pool for a batch, then attends it layer by layer."""

    def __init__(self, pool: PagePool, mode: KvMode = "exact", policy: Policy = "qk") -> None:
        self.pool = pool
        self.mode = mode
        self.policy = policy
        self._reaches: tuple[Reach, ...] = ()
        self._routes: list[_Route | None] = []  # of the reaches, made when the first layer needs them
        self._gaps = False
        self._staging: _Staging | None = None

    @property
    def replayable(self) -> bool:
        """The prepared batch attends whole tables and nothing is noted: a recorded graph does the same."""
        return not self._gaps and not any(reach.decides is not None for reach in self._reaches)

    @property
    def skips(self) -> bool:
        """The prepared batch leaves out pages: its result is an approximation."""
        return any(reach.skipped for reach in self._reaches)

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
        self._routes = [None] * len(reaches)
        skipped = sum(reach.skipped for reach in reaches)
        away = sum(len(reach.away()) for reach in reaches) if self.pool.away else 0
        self._gaps = bool(skipped or away)
        if self._gaps:
            self.pool.count(away_attended=away, skipped=skipped)

    def _reach(self, segment: Segment, table: PageTable, first: int, rewindable: bool) -> Reach:
        attended: Sequence[int] = range(len(table.pages))
        if table.chosen is not None and len(table.chosen) < table.sealed:
            attended = (*table.chosen, *range(table.sealed, len(table.pages)))
        row = deciding_row(segment.position, segment.end, rewindable) if self.mode == "sparse" else None
        table.undo = None
        if row is not None and rewindable:
            table.undo = Undo(segment.position, None if table.query is None else table.query.clone())
        decides = None if row is None else first + row
        return Reach(table, first, len(segment), segment.position, attended, decides)

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
        scores = None
        if self.policy == "qk" and table.query is not None and table.sealed > room:
            keys = torch.stack([self._keys(page) for page in table.pages[: table.sealed]])
            scores = score_pages(keys, table.query).tolist()
        table.chosen = choose(table.sealed, room, scores)
        self.pool.count(choices=1)

    def _keys(self, page: HeldPage) -> Tensor:
        if page.keys is None:
            page.keys = key_directions([data.to(self.pool.device) for data in self.pool.all_data(page)])
        return page.keys

    def advance(self) -> None:
        """The layers have run: whoever got a new deciding query chooses anew before its next rows."""
        for reach in self._reaches:
            if reach.decides is not None:
                reach.table.chosen = None

    # In the layers

    def attend(self, layer: int, q: Tensor, rows: Ragged, scale: float) -> Tensor:
        """q [rows, heads, dim] over layer number `layer` of the pool -> [rows, heads, dim]."""
        for reach in self._reaches:
            if reach.decides is not None and self.policy == "qk":
                self._note(reach.table, layer, q[reach.decides])
        if not self._gaps:
            return attend(q, self.pool.kv[layer], rows, scale)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for i, reach in enumerate(self._reaches):
            part = q[reach.rows]
            if q.is_cuda:
                positions = rows.row_positions[reach.rows]
                out[reach.rows] = self._attend_streamed(layer, part, self._route(i), positions, scale)
            else:
                self._attend_grouped(layer, part, reach, scale, out[reach.rows])
        return out

    def _note(self, table: PageTable, layer: int, query: Tensor) -> None:
        if table.query is None:
            table.query = torch.zeros(len(self.pool.kv), *query.shape, device=query.device)
        table.query[layer].copy_(query)

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

    def _route(self, i: int) -> _Route:
        route = self._routes[i]
        if route is None:
            route = self._routes[i] = _Route.of(self._reaches[i], self.pool.device)
        return route

    def _attend_streamed(self, layer: int, q: Tensor, route: _Route, row_positions: Tensor, scale: float) -> Tensor:
        """Resident pages at once, then what is away in turns: the next pages travel while these are attended."""
        # Every row sees its own page, which is resident, so its log-sum-exp is finite from the start.
        parts = [attend_partial(q, self.pool.kv[layer], route.places, route.positions, row_positions, scale)]
        if route.away and self._staging is None:
            self._staging = _Staging(self.pool.kv[layer])
        for turn in route.away:
            assert self._staging is not None, "made above"
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
            turns.append(_Turn(turn, int32([i * PAGE for i in numbers]), _addresses(turn, device)))
        return cls(int32(list(resident.values())), int32([i * PAGE for i in resident]), turns)


def _addresses(pages: Sequence[HeldPage], device: torch.device) -> Tensor | None:
    known = [page.addresses for page in pages if page.addresses is not None]
    if len(known) < len(pages):
        return None
    return torch.tensor(known).T.contiguous().to(device, non_blocking=True)


class _Staging:
    """Two buffers on the device, filled in turn on a stream of their own."""

    def __init__(self, kv: Tensor) -> None:
        self._buffers = [torch.empty((STAGED, *kv.shape[1:]), dtype=kv.dtype, device=kv.device) for _ in range(2)]
        self._stream = torch.cuda.Stream(kv.device)
        self._index = torch.arange(STAGED, dtype=torch.int32, device=kv.device)
        self._read = [torch.cuda.Event() for _ in range(2)]  # the buffer's last reader is done
        self._turn = 0

    @contextmanager
    def staged(self, turn: _Turn, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """A buffer and the places of these pages in it; it is filled again once the readers in the block are done."""
        self._turn = 1 - self._turn
        buffer, read = self._buffers[self._turn], self._read[self._turn]
        current = torch.cuda.current_stream(buffer.device)
        self._stream.wait_event(read)
        with torch.cuda.stream(self._stream):
            fetch_pages(buffer, turn.data(layer), None if turn.addresses is None else turn.addresses[layer])
        current.wait_stream(self._stream)
        yield buffer, self._index[: len(turn.pages)]
        read.record(current)

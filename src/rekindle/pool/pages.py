"""Pages of KV for the attention layers of one stage: at most `places` of them on the device, the rest in host memory.

A page is PAGE consecutive positions of one sequence, in all attention layers of the stage at once. An open page
belongs to one sequence, which appends to it. A sealed page is never written again, so sequences and snapshots share
it; its host copies (`Page`, one per layer) are made once. A page is resident while it has a place on the device. When
places are short, sealed pages go away: only their host copies are left, they are attended where they lie, and they
come back bit-exact when there is room. So where a page lies never changes an answer.

    open                  a place, no copies
    sealed, resident      a place, and copies once somebody asked for them
    sealed, away          no place, copies
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from math import prod

import numpy as np
import torch

from rekindle.errors import CopyFailed, PoolFull
from rekindle.kernels.paging import fetch_pages
from rekindle.pool.choice import NOBODY, SINK, TAIL, Noted, Queries, Scores, is_kept
from rekindle.pool.copies import STOCK, HostCopies, Together, has_failed, in_one_piece
from rekindle.pool.homes import Homes, sent
from rekindle.pool.returns import Recorder, Returns
from rekindle.snapshots.types import Page, Ready
from rekindle.spec import PAGE


class Worth(IntEnum):
    """How much a sequence wants a sealed page on the device; the least wanted goes away first."""

    SPARE = 0  # not attended
    WANTED = 1  # attended
    KEPT = 2  # sink or tail: goes only where the pool cannot even hold the sinks and tails of all sequences
    WRITTEN = 3  # more than any sealed page is worth: rows are about to be stored


@dataclass(slots=True, eq=False)
class HeldPage:
    """One page that live sequences hold."""

    place: int | None  # on the device; None: away
    copies: tuple[Page, ...] | None = None  # in host memory, one per layer …
    taken: Ready | None = None  # … and when they are complete, if they are taken here
    holders: int = 1
    berth: int | None = None  # the number by which a GPU finds the copies, if all are pinned
    keys: torch.Tensor | None = None  # [layers, kv_heads, dim] float16: mean direction of its keys, if pages are chosen


@dataclass(frozen=True, slots=True, eq=False)
class Undo:
    """What a rewindable segment found, and the query that it noted: rewinding into it goes on from there."""

    position: int
    queries: Queries
    chosen: tuple[int, ...] | None
    noted: Noted | None = None

    def queries_at(self, position: int) -> Queries:
        noted = self.noted if self.noted is not None and self.noted.position < position else None
        return self.queries.behind_rows(self.position, position, noted)


@dataclass(frozen=True, slots=True, eq=False)
class Laid:
    """Where a table's attended pages lie, and what it was asked of: at a hundred thousand tokens listing them anew for
    every step would cost as much as the step."""

    places: np.ndarray  # int32
    away: int  # of them
    unread: int  # of these: copies that the device cannot read itself
    pages: int
    chosen: tuple[int, ...] | None
    moves: int

    def holds(self, table: PageTable, moves: int) -> bool:
        return self.pages == len(table.pages) and self.chosen is table.chosen and self.moves == moves


@dataclass(slots=True, eq=False)
class PageTable:
    """The pages of one sequence: page i holds positions [i·PAGE, (i + 1)·PAGE); the last one may be open.

    chosen, queries, keys and scores matter in sparse mode only: the sealed pages that are attended (None: all, or not
    chosen yet), what they are chosen by, what that is compared with, and the last result. chosen is a function of
    queries.now and position // PAGE, so it is never stored.
    """

    number: int = 0  # among the pool's tables
    pages: list[HeldPage] = field(default_factory=list)
    position: int = 0
    turn: int = 0  # the pool's clock when the sequence last ran
    chosen: tuple[int, ...] | None = None
    queries: Queries = NOBODY
    keys: torch.Tensor | None = None  # [pages, layers, kv_heads, dim] float16: those of its first pages
    scores: Scores | None = None
    undo: Undo | None = None
    laid: Laid | None = None  # the last answer of PagePool.lay

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


@dataclass(frozen=True, slots=True)
class PagingCounts:
    """What paging did so far."""

    page_outs: int = 0
    page_ins: int = 0
    away_attended: int = 0  # pages attended where they lie, once per forward
    choices: int = 0  # times that the pages of a sequence were chosen
    skipped: int = 0  # pages that were not attended because they were not chosen, once per forward


class PagePool:
    """The pages of one stage. A place holds one page of all its attention layers alike."""

    def __init__(
        self,
        places: int,
        layers: int,
        kv_heads: int,
        row: int,
        dtype: torch.dtype,
        device: torch.device,
        host_pages: int = 0,
        slabs: int = STOCK,
        record: Recorder | None = None,
    ) -> None:
        """slabs: of pinned memory that wait for captures.
        record: who records how pages come back, which is a launch for every layer; None: nobody does."""
        self.places = places
        self.total = places + host_pages
        # One place more than the pool has: padded rows of a replayed graph write there and nobody reads it.
        self.scratch_page = places
        self.kv = [_zeros((places + 1, 2, PAGE, kv_heads, row), dtype, device) for _ in range(layers)]
        self.device = device
        self.counts = PagingCounts()
        self.clock = 0
        self.tables: list[PageTable] = []
        self._moves = 0  # times that a page which some table lists changed its place
        self._held = 0  # pages that tables hold, each counted once
        self._free = list(range(places - 1, -1, -1))  # popped from the end: ascending, so runs are contiguous
        self._live: dict[Page, HeldPage] = {}  # first layer's host copy -> the page that has it
        self._leaving: list[tuple[Worth, HeldPage]] | None = None  # who may go away, the first to go at the end
        self.returns = Returns(layers, device) if device.type == "cuda" else None
        self.copies = HostCopies(device, slabs)
        # While a table is restored all its pages are away, whatever places are free.
        self.homes = Homes(self.kv, self.total) if self.copies.pinned and layers else None
        self._record = record
        self._fetch_all: Callable[[], None] | None = None  # recorded, or not, when it is needed first

    @property
    def free(self) -> int:
        """Pages that sequences can still get, on the device or, by sending others away, in host memory."""
        return self.total - self._held

    @property
    def away(self) -> int:
        return self._held - (self.places - len(self._free))

    def count(self, **more: int) -> None:
        self.counts = replace(self.counts, **{name: getattr(self.counts, name) + n for name, n in more.items()})

    # Tables

    def new_table(self) -> PageTable:
        table = PageTable(len(self.tables))
        self.tables.append(table)
        return table

    def lay(self, table: PageTable) -> Laid:
        """Where the attended pages lie: their places, the berths of those that are away, or the scratch page."""
        laid = table.laid
        if laid is None or not laid.holds(table, self._moves):
            held = [table.pages[i] for i in table.attended()]
            away = [page for page in held if page.place is None]
            places = np.fromiter((self._number(page) for page in held), np.int32)
            unread = sum(page.berth is None for page in away)
            laid = table.laid = Laid(places, len(away), unread, len(table.pages), table.chosen, self._moves)
        return laid

    def _number(self, page: HeldPage) -> int:
        """What the page is called in tables."""
        number = page.berth if page.place is None else page.place
        return self.scratch_page if number is None else number

    def tick(self, tables: Sequence[PageTable]) -> None:
        """These sequences run now."""
        self.join()
        self.copies.let_go()
        self.clock += 1
        for table in tables:
            table.turn = self.clock
        self._leaving = None

    def extend(self, table: PageTable, end: int) -> None:
        """Give the table the pages for positions up to `end`."""
        missing = table.missing(end)
        if missing > self.free:
            raise PoolFull(f"{missing} pages are needed, {self.free} of {self.total} are free")
        table.pages += [HeldPage(place) for place in self._places_to_write(missing)]
        self._held += missing

    def truncate(self, table: PageTable, position: int) -> None:
        """Forget the positions from `position` on. A page that others share is not cut into but copied."""
        assert position <= table.position, f"cannot cut {table.position} positions to {position}"
        self._leaving = None
        keep = -(-position // PAGE)
        self._moves += keep < len(table.pages)
        self._release(table.pages[keep:])
        del table.pages[keep:]
        if position % PAGE:
            self._open_last_page(table)
        undo, table.chosen, table.undo = table.undo, None, None
        if undo is not None:
            table.queries = undo.queries_at(position)
            if position // PAGE == undo.position // PAGE:
                table.chosen = undo.chosen
        table.position = position
        if table.keys is not None:
            table.keys = table.keys[: table.sealed]

    def clear(self, table: PageTable) -> None:
        self.join()  # after a forward that failed pages may be under way, out of memory that is given back here
        self._leaving = None
        self._moves += 1
        self._release(table.pages)
        self.copies.let_go()
        table.pages.clear()
        table.position = 0
        table.chosen = table.keys = table.scores = table.undo = None
        table.queries = NOBODY

    def _open_last_page(self, table: PageTable) -> None:
        page = table.pages[-1]
        if page.holders > 1:
            if self.free < 1:
                raise PoolFull(f"a page of its own is needed, 0 of {self.total} are free")
            (place,) = self._places_to_write(1)
            own = HeldPage(place)
            self._held += 1
            data = self.all_data(page)
            self._aside(lambda: self._write(own, data))
            self.join()
            self._release([page])
            table.pages[-1] = own
            self._moves += 1
            return
        if page.place is None:
            self._moves += 1
            data, (page.place,) = self.all_data(page), self._places_to_write(1)
            self._aside(lambda: self._write(page, data))
            self.join()
        self._forget_copies([page])
        page.keys = None

    def data(self, page: HeldPage, layer: int) -> torch.Tensor:
        """[2, PAGE, kv_heads, row] on the device or, of a page that is away, in host memory."""
        if page.place is not None:
            return self.kv[layer][page.place]
        assert page.copies is not None, "a page that is away has copies"
        return page.copies[layer].data

    def all_data(self, page: HeldPage) -> list[torch.Tensor]:
        return [self.data(page, layer) for layer in range(len(self.kv))]

    def addresses_of(self, pages: Sequence[HeldPage]) -> torch.Tensor | None:
        """Where the pages lie, int64 [layers, pages] on the device; None where it cannot read all of them itself."""
        if self.homes is None or any(page.place is None and page.berth is None for page in pages):
            return None
        return self.homes.of([self._number(page) for page in pages])

    def keys_of(self, pages: Sequence[HeldPage]) -> torch.Tensor:
        """The keys of all their positions, on the device: [layers, pages, PAGE, kv_heads, row]."""
        sources = self.addresses_of(pages)
        if sources is None:
            by_layer = ([self.data(page, i)[0].to(self.device) for page in pages] for i in range(len(self.kv)))
            return torch.stack([torch.stack(layer) for layer in by_layer])
        kv = self.kv[0]
        keys = torch.empty(len(self.kv), len(pages), *kv.shape[2:], dtype=kv.dtype, device=self.device)
        nbytes = keys[0, 0].nbytes  # a page begins with its keys
        places = torch.arange(sources.numel(), device=self.device) * nbytes + keys.data_ptr()
        fetch_pages(places.view(sources.shape), sources, nbytes)
        return keys

    # Snapshots

    def export(self, pages: Sequence[HeldPage]) -> list[tuple[Page, ...]]:
        """Host copies of sealed pages, one per layer; made once, then shared by every snapshot that has them. They
        are complete once `ready` says so."""
        self._forget_copies([page for page in pages if has_failed(page.taken)])
        fresh = [page for page in pages if page.copies is None]
        if fresh:
            places = [page.place for page in fresh if page.place is not None]
            assert len(places) == len(fresh), "a page without copies has a place"
            for page, copies in zip(fresh, self.copies.take_pages(self.kv, places), strict=True):
                page.copies, page.taken = copies, self.copies.ready()
                self._live[copies[0]] = page
        return [page.copies or () for page in pages]

    def ready(self, pages: Sequence[HeldPage]) -> Ready | None:
        """Of the copies of these pages, and of what was taken last; None where nothing is waited for."""
        takings = {page.taken for page in pages} | {self.copies.ready()}
        # First whether it is done, then whether it failed: a thread may say so between the two.
        awaited = [taken for taken in takings if taken is not None and (not taken.done or has_failed(taken))]
        return Together(tuple(awaited)) if awaited else None

    def adopt(self, copies: tuple[Page, ...]) -> HeldPage:
        """The page with these bytes: the one that live sequences hold, or a new one, away."""
        live = self._live.get(copies[0])
        if live is not None:
            live.holders += 1
            return live
        if self.free < 1:
            raise PoolFull(f"a page is needed, 0 of {self.total} are free")
        page = HeldPage(None, copies)
        self._moor(page)
        self._held += 1
        self._live[copies[0]] = page
        return page

    def _moor(self, page: HeldPage) -> None:
        """Let a GPU find the copies of a page that is away. What came from disk or over a link is not pinned."""
        copies = page.copies or ()
        if self.homes is not None and page.berth is None and all(copy.pinned for copy in copies):
            page.berth = self.homes.take(tuple(copy.address for copy in copies))

    def check_room(self, table: PageTable, copies: Sequence[Page], position: int) -> None:
        """Refuse where the table, once cleared, could not adopt these pages (by first layer) and reach `position`."""
        if not self.kv:
            return
        own = {page for page in table.pages if page.holders == 1}  # given back when the table is cleared
        shared = sum(1 for copy in copies if (live := self._live.get(copy)) is not None and live not in own)
        missing, free = -(-position // PAGE) - shared, self.free + len(own)
        if missing > free:
            raise PoolFull(f"{missing} pages are needed, {free} of {self.total} are free")

    def _release(self, pages: Sequence[HeldPage]) -> None:
        for page in pages:
            assert page.holders > 0, "a page is released more often than it was taken"
            page.holders -= 1
        gone = [page for page in pages if not page.holders]
        self._held -= len(gone)
        self._forget_copies(gone)
        for page in gone:
            if page.place is not None:
                self._free.append(page.place)
                page.place = None

    def _forget_copies(self, pages: Sequence[HeldPage]) -> None:
        copied = [page for page in pages if page.copies]
        if not copied:
            return
        self.copies.hold([page.copies for page in copied])
        if any(page.place is not None for page in copied):  # whoever writes there waits until it has been copied
            self.copies.join()
        for page in copied:
            if page.copies:
                self._live.pop(page.copies[0], None)
            if page.berth is not None and self.homes is not None:
                self.homes.give_back(page.berth)
            page.copies = page.berth = page.taken = None

    def stop(self) -> None:
        """End the threads. Copies that snapshots hold stay good."""
        self.copies.stop()

    # Paging

    def bring_back(self, table: PageTable) -> None:
        """Give places to the attended pages that are away: sink and tail first, then the latest. On a GPU they may be
        under way for a while: whoever reads them waits, for its layer or, by `join`, for all."""
        if not self.away:
            return
        away = [i for i in self._hopeful(table) if table.pages[i].place is None]
        away.sort(key=lambda i: (not is_kept(i, table.sealed), -i))
        worths = [Worth.KEPT if is_kept(i, table.sealed) else Worth.WANTED for i in away]
        coming = [table.pages[i] for i in away]
        places = self._take_places(worths)
        if not places:
            return
        del coming[len(places) :]
        for page, place in zip(coming, places, strict=True):
            page.place = place
        self._moves += 1
        try:
            self._aside(lambda: self._fetch(coming))
        except BaseException:
            self.join()
            self._go_back(coming)
            raise
        self.count(page_ins=len(coming))

    def _hopeful(self, table: PageTable) -> Sequence[int]:
        """Attended sealed pages that may get a place: where none is free and nobody skips any, sink and tail alone."""
        if table.chosen is not None:
            return table.chosen
        everyone = range(table.sealed)
        return everyone if self._free or self._some_skip() else [*everyone[:SINK], *everyone[SINK:][-TAIL:]]

    def _some_skip(self) -> bool:
        return any(table.chosen is not None for table in self.tables)

    def _go_back(self, pages: Sequence[HeldPage]) -> None:
        """What did not arrive stays away. Places may be written again at once: the current stream has joined."""
        self._moves += 1
        for page in pages:
            assert page.place is not None, "it was given one to come to"
            self._free.append(page.place)
            page.place = None

    def _places_to_write(self, count: int) -> list[int]:
        places = self._take_places([Worth.WRITTEN] * count)
        if len(places) < count:
            self._free += places
            raise PoolFull(f"all {self.places} places on the device hold open pages")
        return places

    def _take_places(self, worths: Sequence[Worth]) -> list[int]:
        """Places for the first of these, as many as can be had: free ones, and those of pages that are worth less,
        which go away together. The most wanted come first."""
        leaving = list[HeldPage]()
        for worth in worths[len(self._free) :]:
            page = self._least_wanted(worth)
            if page is None:
                break
            leaving.append(page)
        self._send_away(leaving)
        return [self._free.pop() for _ in range(min(len(worths), len(self._free)))]

    def _least_wanted(self, worth: Worth) -> HeldPage | None:
        """The page that goes away for one of this worth."""
        if worth is Worth.WANTED and not self._some_skip():
            return None  # none is spare
        if self._leaving is None:
            self._leaving = self._line_up()
        if not self._leaving or self._leaving[-1][0] >= worth:
            return None
        return self._leaving.pop()[1]

    def _line_up(self) -> list[tuple[Worth, HeldPage]]:
        """Resident sealed pages, most wanted first. A shared page is worth what its keenest holder gives."""
        if self.total == self.places:
            return []  # nobody may go away
        worths: dict[HeldPage, tuple[Worth, int, int]] = {}
        for table in self.tables:
            chosen = None if table.chosen is None else set(table.chosen)
            for i, page in enumerate(table.pages[: table.sealed]):
                if page.place is None:
                    continue
                attended = Worth.WANTED if chosen is None or i in chosen else Worth.SPARE
                worth = Worth.KEPT if is_kept(i, table.sealed) else attended
                # Among equals whoever ran longest ago gives first, and of a sequence the oldest page; the sink is last.
                rank = (worth, table.turn, i if i >= SINK else table.sealed)
                worths[page] = max(rank, worths.get(page, rank))
        ranked = sorted(worths.items(), key=lambda item: item[1], reverse=True)
        return [(rank[0], page) for page, rank in ranked]

    def _send_away(self, pages: Sequence[HeldPage]) -> None:
        if not pages:
            return
        self.export(pages)
        self.copies.join()
        if any(has_failed(page.taken) for page in pages):
            raise CopyFailed(f"{len(pages)} pages cannot leave the device: their copies did not reach host memory")
        for page in pages:
            assert page.place is not None, "only a resident page can be sent away"
            self._free.append(page.place)
            page.place = None
            self._moor(page)
        self._moves += 1
        self.count(page_outs=len(pages))

    def _aside(self, move: Callable[[], None]) -> None:
        """On a stream of its own, so that the host and the layers before go on."""
        if self.returns is None:
            move()
            return
        with self.returns.handing_over():
            move()

    @property
    def under_way(self) -> bool:
        """Some pages are on their way back, and not yet waited for."""
        return self.returns is not None and self.returns.under_way

    def wait_for(self, layer: int) -> None:
        """What is handed to the device from now on finds the pages of this layer in their places."""
        if self.returns is not None:
            self.returns.wait_for(layer)

    def join(self) -> None:
        """The same of all layers."""
        if self.returns is not None:
            self.returns.join()

    def _write(self, page: HeldPage, data: Sequence[torch.Tensor]) -> None:
        """data, one [2, PAGE, kv_heads, row] per layer, to the place of the page."""
        for layer, tensor in zip(self.kv, data, strict=True):
            layer[page.place].copy_(tensor, non_blocking=True)

    def _fetch(self, pages: Sequence[HeldPage]) -> None:
        """Copies in host memory to the places of the pages; a GPU reads those that are pinned itself."""
        pinned = {page.berth: page.place for page in pages if page.berth is not None and page.place is not None}
        others = [page for page in pages if page.berth is None]
        if self.copies.pinned and others:
            self._upload(others)
        elif others:
            for page in others:
                self._write(page, [copy.data for copy in page.copies or ()])
        if self.homes is not None:
            self.homes.list_returns(pinned)
        if self._fetch_all is None:
            self._fetch_all = self._fetch_layers if self._record is None else self._record(self._fetch_layers)
        self._fetch_all()

    def _fetch_layers(self) -> None:
        """What is listed, layer by layer."""
        for layer in range(len(self.kv)):
            if self.homes is not None:
                self.homes.fetch(layer)
            if self.returns is not None:
                self.returns.all_handed_over(layer)

    def _upload(self, pages: Sequence[HeldPage]) -> None:
        """Pages that are not pinned, as many at a time as a slab holds, with all their layers."""
        places = sent(torch.tensor([page.place for page in pages]), self.device)
        columns = (in_one_piece([copy.data for copy in page.copies]) for page in pages if page.copies is not None)
        for group in self.copies.through(columns):
            arrived = in_one_piece(group).to(self.device, non_blocking=True)  # [pages, layers, 2, PAGE, kv_heads, row]
            for i, layer in enumerate(self.kv):
                layer[places[: len(group)]] = arrived[:, i]
            places = places[len(group) :]

    def check(self) -> None:
        """free + used = total, and every page belongs to the tables that hold it. Called when idle."""
        holders: dict[HeldPage, int] = {}
        for table in self.tables:
            for page in table.pages:
                holders[page] = holders.get(page, 0) + 1
        assert all(page.holders == count for page, count in holders.items()), "a page counts other holders than it has"
        assert len(holders) == self._held, f"tables hold {len(holders)} pages, {self._held} are counted"
        places = [page.place for page in holders if page.place is not None]
        assert sorted(places + self._free) == list(range(self.places)), "a place is lost or given twice"
        away = len(holders) - len(places)
        assert away <= self.total - self.places, f"{away} pages are away, {self.total - self.places} may be"
        live = {page.copies[0] for page in holders if page.copies}
        assert live == self._live.keys(), "a page is known by copies that nobody holds"


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """In host memory, zeros that the system hands out page by page as they are written: a pool for every sequence at
    the context limit costs what is used of it."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)

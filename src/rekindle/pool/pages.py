"""Pages of KV for attention layers of one stage: at most `places` of them on the device, the rest in host memory.

A place is a number, by which all layers find their page; places beyond the pool's own may be lent to it for a while.

When places are short, sealed pages are paged out: only their host copies are left, the layers attend them where they
lie, and they come back bit-exact when there is room. So where a page lies never changes an answer. page_table.py says
what a page is, page_memory.py how its bytes travel, eviction.py which page leaves first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np
import torch

from rekindle.buffers import SINK_PAGES, STOCK, TAIL_PAGES
from rekindle.errors import CopyFailed, PoolFull
from rekindle.kernels.device_memory import DeviceMemory
from rekindle.pool.choice import NO_QUERIES, is_kept
from rekindle.pool.copies import HostCopies
from rekindle.pool.eviction import Worth, rank_for_eviction
from rekindle.pool.page_ins import Recorder
from rekindle.pool.page_memory import PageMemory
from rekindle.pool.page_table import HeldPage, PageList, PageTable
from rekindle.pool.ready import Together, has_failed
from rekindle.snapshots.types import Page, Ready
from rekindle.spec import PAGE


@dataclass(frozen=True, slots=True)
class PagingCounts:
    """What paging did so far."""

    page_outs: int = 0
    page_ins: int = 0
    away_attended: int = 0  # pages attended where they lie, once per forward
    choices: int = 0  # times that the pages of a sequence were chosen
    skipped: int = 0  # pages that were not attended because they were not chosen, once per forward

    def __add__(self, other: PagingCounts) -> PagingCounts:
        return PagingCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


class PagePool(PageMemory):
    """The pages of a stage, or of one of its layers: who holds them, and which of them are resident."""

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
        copies: HostCopies | None = None,
        memory: DeviceMemory | None = None,
    ) -> None:
        super().__init__(places, layers, kv_heads, row, dtype, device, host_pages, slabs, record, copies, memory)
        self.counts = PagingCounts()
        self.clock = 0
        self.tables: list[PageTable] = []
        self._moves = 0  # times that a page which some table lists changed its place
        self._held = 0  # pages that tables hold, each counted once
        self._lent: set[int] = set()  # places that others lend for a while
        # Popped from the end: ascending, so runs are contiguous; lent ones come last, since they may have to go back.
        self._free = deque(reversed(self._first_places))
        self._live: dict[Page, HeldPage] = {}  # first layer's host copy -> the page that has it
        self._evictable: list[tuple[Worth, HeldPage]] | None = None  # the first to leave at the end; None: not ranked

    @property
    def free(self) -> int:
        """Pages that sequences can still get, on the device or, by paging out others, in host memory."""
        return self.total - self._held

    @property
    def free_places(self) -> int:
        """Of them, those that no other page has to leave for."""
        return len(self._free)

    def are_free(self, places: Sequence[int]) -> bool:
        """Whether no page lies in any of them."""
        return set(places) <= set(self._free)

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

    def list_pages(self, table: PageTable) -> PageList:
        """The attended pages by number."""
        listed = table.listed
        if listed is None or not listed.is_current(table, self._moves):
            held = [table.pages[i] for i in table.attended()]
            away = [page for page in held if page.place is None]
            places = np.fromiter((self.number_of(page) for page in held), np.int32)
            unread = sum(page.host_page_id is None for page in away)
            listed = table.listed = PageList(
                places, len(away), unread, len(table.pages), table.chosen, self._moves
            )  # fmt: skip
        return listed

    def tick(self, tables: Sequence[PageTable]) -> None:
        """These sequences run now."""
        self.join()
        self.copies.let_go()
        self.clock += 1
        for table in tables:
            table.turn = self.clock
        self._evictable = None

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
        self._evictable = None
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
        self.join()  # a forward that failed may have left page-ins under way, out of memory that is given back here
        self._evictable = None
        self._moves += 1
        self._release(table.pages)
        self.copies.let_go()
        table.pages.clear()
        table.position = 0
        table.chosen = table.keys = table.scores = table.undo = None
        table.queries = NO_QUERIES

    def _open_last_page(self, table: PageTable) -> None:
        page = table.pages[-1]
        if page.holders > 1:
            table.pages[-1] = self._copy_to_own(page)
            self._moves += 1
            return
        if page.place is None:
            self._moves += 1
            data, (page.place,) = self.all_data(page), self._places_to_write(1)
            self._on_page_in_stream(lambda: self._write(page, data))
            self.join()
        self._forget_copies([page])
        page.keys = None

    def _copy_to_own(self, page: HeldPage) -> HeldPage:
        """An open copy of a shared page, in a place of its own; the share is given up."""
        if self.free < 1:
            raise PoolFull(f"a page of its own is needed, 0 of {self.total} are free")
        (place,) = self._places_to_write(1)
        own = HeldPage(place)
        self._held += 1
        data = self.all_data(page)
        self._on_page_in_stream(lambda: self._write(own, data))
        self.join()
        self._release([page])
        return own

    def _release(self, pages: Sequence[HeldPage]) -> None:
        for page in pages:
            assert page.holders > 0, "a page is released more often than it was taken"
            page.holders -= 1
        gone = [page for page in pages if not page.holders]
        self._held -= len(gone)
        self._forget_copies(gone)
        for page in gone:
            if page.place is not None:
                self._free_place(page)

    def _free_place(self, page: HeldPage) -> None:
        assert page.place is not None, "only a resident page has a place to give back"
        if page.place in self._lent:
            self._free.appendleft(page.place)
        else:
            self._free.append(page.place)
        page.place = None

    # Snapshots

    def export(self, pages: Sequence[HeldPage]) -> list[tuple[Page, ...]]:
        """Host copies of sealed pages, one per layer; made once, then shared by every snapshot that has them. They
        are complete once `ready` is done."""
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
        """Of the copies of these pages; None where nothing is waited for."""
        copies = {page.taken for page in pages}
        # Asked in this order: the copy thread may fail between the two questions.
        awaited = [ready for ready in copies if ready is not None and (not ready.done or has_failed(ready))]
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
        self._register(page)
        self._held += 1
        self._live[copies[0]] = page
        return page

    def check_room(self, table: PageTable, copies: Sequence[Page], position: int) -> None:
        """Refuse where the table, once cleared, could not adopt these pages (by first layer) and reach `position`."""
        if not self.kv:
            return
        own = {page for page in table.pages if page.holders == 1}  # given back when the table is cleared
        shared = sum(1 for copy in copies if (live := self._live.get(copy)) is not None and live not in own)
        missing, free = -(-position // PAGE) - shared, self.free + len(own)
        if missing > free:
            raise PoolFull(f"{missing} pages are needed, {free} of {self.total} are free")

    def _forget_copies(self, pages: Sequence[HeldPage]) -> None:
        copied = [page for page in pages if page.copies]
        if not copied:
            return
        self.copies.hold([page.copies for page in copied])
        if any(page.place is not None for page in copied):  # writes to the place wait until it has been copied
            self.copies.join()
        for page in copied:
            if page.copies:
                self._live.pop(page.copies[0], None)
            self._unregister(page)
            page.copies = page.taken = None

    # Paging

    def page_in(self, table: PageTable) -> None:
        """Give places to the attended pages that are away: sink and tail first, then the latest. On a GPU they may be
        under way for a while: a layer waits for its own by `wait_for`, other readers for all by `join`."""
        if not self.away or (table.listed is not None and self._is_all_here(table, table.listed)):
            return
        away = [i for i in self._page_in_candidates(table) if table.pages[i].place is None]
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
            self._on_page_in_stream(lambda: self._fetch(coming))
        except BaseException:
            self.join()  # the places may be written again at once
            self._moves += 1
            for page in coming:
                self._free_place(page)
            raise
        self.count(page_ins=len(coming))

    def _is_all_here(self, table: PageTable, listed: PageList) -> bool:
        """Whether the last list of its pages still holds, and none of them is away."""
        return not listed.away and listed.is_current(table, self._moves)

    def _page_in_candidates(self, table: PageTable) -> Sequence[int]:
        """Attended sealed pages that may get a place: sink and tail alone, where no place is free and no sequence
        skips pages."""
        if table.chosen is not None:
            return table.chosen
        sealed = range(table.sealed)
        return sealed if self._free or self._some_skip() else [*sealed[:SINK_PAGES], *sealed[SINK_PAGES:][-TAIL_PAGES:]]

    def _some_skip(self) -> bool:
        return any(table.chosen is not None for table in self.tables)

    def _places_to_write(self, count: int) -> list[int]:
        places = self._take_places([Worth.WRITTEN] * count)
        if len(places) < count:
            self._free += places
            raise PoolFull(f"all {self.places} places on the device hold open pages")
        return places

    def _take_places(self, worths: Sequence[Worth]) -> list[int]:
        """Places for the first of these, as many as can be had: free ones, and those of pages that are worth less,
        which are paged out together. The highest worths come first."""
        leaving = list[HeldPage]()
        for worth in worths[len(self._free) :]:
            page = self._evict_for(worth)
            if page is None:
                break
            leaving.append(page)
        self._page_out(leaving)
        return [self._free.pop() for _ in range(min(len(worths), len(self._free)))]

    def _evict_for(self, worth: Worth) -> HeldPage | None:
        """The page that leaves for one of this worth."""
        if worth is Worth.WANTED and not self._some_skip():
            return None  # none is spare
        if self._evictable is None:  # without host pages no page may leave
            self._evictable = [] if self.total <= self.places else rank_for_eviction(self.tables)
        if not self._evictable or self._evictable[-1][0] >= worth:
            return None
        return self._evictable.pop()[1]

    def _page_out(self, pages: Sequence[HeldPage]) -> None:
        if not pages:
            return
        self.export(pages)
        self.copies.join()
        if any(has_failed(page.taken) for page in pages):
            raise CopyFailed(f"{len(pages)} pages cannot leave the device: their copies did not reach host memory")
        for page in pages:
            self._free_place(page)
            self._register(page)
        self._moves += 1
        self.count(page_outs=len(pages))

    # Memory that others lend

    def live_pages(self, turns: int, running: Sequence[PageTable]) -> int:
        """About how many pages the sequences hold that run now or ran in the last `turns` turns: what they share may
        count twice. Asked before every step, so nothing is listed."""
        recent = (table for table in self.tables if table.turn + turns > self.clock or table in running)
        return min(sum(len(table.pages) for table in recent), self._held)

    def borrow(self, places: Sequence[int]) -> None:
        """More places, whose memory is the pool's from now on, in the order of the current stream."""
        assert self._lent.isdisjoint(places), "a place is lent twice"
        self._lent.update(places)
        self._free.extendleft(places)
        self.places += len(places)

    def give_back(self, places: Sequence[int]) -> None:
        """The lender may write there, in the order of the current stream: pages that lie there move to free places,
        and leave the device where none is free. Between forwards. If some cannot, all places stay the pool's."""
        going = set(places)
        assert going <= self._lent, "a place is given back that was not lent"
        if sum(len(table.pages) - table.sealed for table in self.tables) > self.places - len(going):
            raise PoolFull(f"{len(going)} of {self.places} places cannot be given back: the others hold open pages")
        self.join()
        self._evictable = None
        self._lent -= going
        self.places -= len(going)
        free = len(self._free)
        self._free = deque(place for place in self._free if place not in going)
        if free - len(self._free) == len(going):
            return  # no page lies there, and no copy reads it
        try:
            self._vacate(going)
        except BaseException:
            self._evictable = None
            self._lent |= going
            self.places += len(going)
            held = {page.place for table in self.tables for page in table.pages}
            known = (*self._first_places, *self._lent)
            self._free = deque(place for place in reversed(known) if place not in held)
            raise

    def _vacate(self, going: set[int]) -> None:
        self.copies.join()  # no copy reads an old place any more
        open_pages = self._pages_in(going, sealed=False)
        self._move(open_pages, [self._place_apart_from(going) for _ in open_pages])
        sealed = self._pages_in(going, sealed=True)
        self._move(sealed, [self._free.pop() for _ in range(min(len(sealed), len(self._free)))])
        self._page_out([page for page in sealed if page.place in going])
        self._free = deque(place for place in self._free if place not in going)

    def _pages_in(self, places: set[int], sealed: bool) -> list[HeldPage]:
        """The pages that lie there, each once, the latest of their sequences first."""
        parts = (table.pages[: table.sealed] if sealed else table.pages[table.sealed :] for table in self.tables)
        found = {page: i for part in parts for i, page in enumerate(part) if page.place in places}
        return sorted(found, key=lambda page: -found[page])

    def _place_apart_from(self, places: set[int]) -> int:
        """For a page that is written. Those that were left for it are not free any more either."""
        while (place := self._places_to_write(1)[0]) in places:
            pass
        return place

    def _move(self, pages: Sequence[HeldPage], places: Sequence[int]) -> None:
        """As many as there are places, on the device, in the order of the current stream."""
        moving = pages[: len(places)]
        if moving:
            self._copy_places([page.place for page in moving if page.place is not None], places)
            self._moves += 1
        for page, place in zip(moving, places, strict=True):
            page.place = place

    def check(self) -> None:
        """free + used = total, and every page belongs to the tables that hold it. Called when idle."""
        holders: dict[HeldPage, int] = {}
        for table in self.tables:
            for page in table.pages:
                holders[page] = holders.get(page, 0) + 1
        assert all(page.holders == count for page, count in holders.items()), "a page counts other holders than it has"
        assert len(holders) == self._held, f"tables hold {len(holders)} pages, {self._held} are counted"
        places = [page.place for page in holders if page.place is not None]
        known = sorted({*self._first_places, *self._lent})
        assert sorted([*places, *self._free]) == known, "a place is lost or given twice"
        assert len(known) == self.places, f"{len(known)} places are known, {self.places} are counted"
        away = len(holders) - len(places)
        most = self.total - len(self._first_places)
        assert away <= most, f"{away} pages are away, {most} may be"
        live = {page.copies[0] for page in holders if page.copies}
        assert live == self._live.keys(), "a page is known by copies that no table holds"

"""At most N pages of KV for the attention layers of one stage.

A page is PAGE consecutive positions of one sequence, in all attention layers of the stage at once. An open page
belongs to one sequence, which appends to it. A sealed page is never written again, so sequences and snapshots share
it: live sequences by reference count here, snapshots as host copies (`Page`) that are made once per page.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rekindle.snapshots.types import Page
from rekindle.spec import PAGE


class PoolFull(Exception):
    """No page is free. The engine answers it by setting a sequence aside, so it never reaches a client."""


@dataclass(slots=True)
class PageTable:
    """The pages of one sequence: page i holds positions [i·PAGE, (i + 1)·PAGE); the last one may be open."""

    pages: list[int] = field(default_factory=list)
    position: int = 0

    def missing(self, end: int) -> int:
        """Pages still to be allocated before positions up to `end` can be stored."""
        return max(0, -(-end // PAGE) - len(self.pages))


class PagePool:
    """The pages of one stage. Page ids run over all its attention layers alike."""

    def __init__(
        self, pages: int, layers: int, kv_heads: int, row: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.total = pages
        # One page more than the pool has: padded rows of a replayed graph write there and nobody reads it.
        self.scratch_page = pages
        self.kv = [torch.zeros(pages + 1, 2, PAGE, kv_heads, row, dtype=dtype, device=device) for _ in range(layers)]
        self._free = list(range(pages - 1, -1, -1))  # popped from the end: ascending ids, so runs are contiguous
        self._references = [0] * pages
        self._exported: dict[int, tuple[Page, ...]] = {}
        self._resident: dict[Page, int] = {}  # first layer's host page -> the page here that holds the same bytes

    @property
    def free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        if not self._free:
            raise PoolFull(f"all {self.total} pages are in use")
        page = self._free.pop()
        self._references[page] = 1
        return page

    def share(self, page: int) -> int:
        self._references[page] += 1
        return page

    def release(self, page: int) -> None:
        assert self._references[page] > 0, f"page {page} is released more often than it was taken"
        self._references[page] -= 1
        if self._references[page] == 0:
            exported = self._exported.pop(page, ())
            if exported:
                self._resident.pop(exported[0], None)
            self._free.append(page)

    def extend(self, table: PageTable, end: int) -> None:
        """Give the table the pages for positions up to `end`; all or nothing."""
        missing = table.missing(end)
        if missing > self.free:
            raise PoolFull(f"{missing} pages are needed, {self.free} of {self.total} are free")
        table.pages.extend(self.allocate() for _ in range(missing))

    def truncate(self, table: PageTable, position: int) -> None:
        """Forget the positions from `position` on. Only pages that no snapshot has seen can be cut into."""
        assert position <= table.position, f"cannot cut {table.position} positions to {position}"
        keep = -(-position // PAGE)
        for page in table.pages[keep:]:
            self.release(page)
        del table.pages[keep:]
        if position % PAGE and self._references[table.pages[-1]] > 1:
            self._own_last_page(table)
        elif position % PAGE:
            self._forget_export(table.pages[-1])
        table.position = position

    def clear(self, table: PageTable) -> None:
        for page in table.pages:
            self.release(page)
        table.pages.clear()
        table.position = 0

    def export(self, page: int) -> tuple[Page, ...]:
        """Host copies of a sealed page, one per layer; made once, then shared by every snapshot that has it."""
        if page not in self._exported:
            # Non-blocking copies to pinned memory would race with the reader; the copy is small and off the decode path.
            copies = tuple(Page(layer[page].detach().to("cpu", copy=True)) for layer in self.kv)
            self._exported[page] = copies
            if copies:
                self._resident[copies[0]] = page
        return self._exported[page]

    def adopt(self, copies: tuple[Page, ...]) -> int:
        """A page with these bytes: the one that is still here, or a fresh one filled from the host."""
        resident = self._resident.get(copies[0]) if copies else None
        if resident is not None:
            return self.share(resident)
        page = self.allocate()
        for layer, copy in zip(self.kv, copies, strict=True):
            layer[page].copy_(copy.data)
        self._exported[page] = copies
        if copies:
            self._resident[copies[0]] = page
        return page

    def _own_last_page(self, table: PageTable) -> None:
        shared, own = table.pages[-1], self.allocate()
        for layer in self.kv:
            layer[own].copy_(layer[shared])
        self.release(shared)
        table.pages[-1] = own

    def _forget_export(self, page: int) -> None:
        exported = self._exported.pop(page, ())
        if exported:
            self._resident.pop(exported[0], None)

    def check(self, tables: list[PageTable]) -> None:
        """free + used = total, and every reference belongs to a table. Called when idle."""
        held = [0] * self.total
        for table in tables:
            for page in table.pages:
                held[page] += 1
        assert held == self._references, "a page's references differ from the tables that hold it"
        used = sum(count > 0 for count in held)
        assert used + self.free == self.total, f"{used} pages used + {self.free} free != {self.total}"

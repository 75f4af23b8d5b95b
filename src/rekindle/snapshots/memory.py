"""The RAM store: snapshots by reference, each sealed page counted once."""

from __future__ import annotations

from collections.abc import Iterator

from rekindle.snapshots.types import Page, Snapshot


class MemoryStore:
    """Holds snapshots and knows their bytes. Not locked: the tier that owns it is."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.bytes = 0
        self._held: set[Snapshot] = set()
        self._pages: dict[Page, int] = {}  # how many held snapshots share a page

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, snapshot: Snapshot) -> bool:
        return snapshot in self._held

    def add(self, snapshot: Snapshot) -> None:
        assert snapshot not in self._held, "a snapshot is held once"
        self._held.add(snapshot)
        self.bytes += snapshot.own_bytes
        for page in _pages_of(snapshot):
            shared = self._pages.get(page, 0)
            self._pages[page] = shared + 1
            if not shared:
                self.bytes += page.nbytes

    def remove(self, snapshot: Snapshot) -> None:
        assert snapshot in self._held, "only what is held can be removed"
        self._held.remove(snapshot)
        self.bytes -= snapshot.own_bytes
        for page in _pages_of(snapshot):
            if (shared := self._pages.pop(page)) > 1:
                self._pages[page] = shared - 1
            else:
                self.bytes -= page.nbytes


def _pages_of(snapshot: Snapshot) -> Iterator[Page]:
    for part in snapshot.parts:
        yield from part.pages

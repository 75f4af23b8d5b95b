"""Pages that are both in this process and on disk."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping

import numpy as np

from rekindle.snapshots.layout import Pages
from rekindle.snapshots.types import Page


class LivePage:
    """A page object whose pages are alive in this process."""

    __slots__ = ("_pages", "tokens")

    def __init__(self, column: Pages, tokens: np.ndarray) -> None:
        """tokens: int32 [PAGE]."""
        self._pages = tuple(map(weakref.ref, column))
        self.tokens = tokens

    def first(self) -> Page | None:
        """None where nothing is alive: a model without paged layers has empty columns."""
        return self._pages[0]() if self._pages else None

    def column(self) -> Pages | None:
        alive = tuple([page for page in [ref() for ref in self._pages] if page is not None])
        return alive if len(alive) == len(self._pages) else None


class LivePages:
    """Names of the page objects of living pages, so that a page is hashed once and read once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: weakref.WeakKeyDictionary[Page, str] = weakref.WeakKeyDictionary()
        self._live: dict[str, LivePage] = {}

    def name_of(self, column: Pages) -> str | None:
        with self._lock:
            name = self._names.get(column[0]) if column else None
            if name is None:
                return None
            known = self._live[name].column() if name in self._live else None
            same = known is not None and all(a is b for a, b in zip(known, column, strict=True))
            return name if same else None

    def find(self, names: Iterable[str]) -> dict[str, tuple[Pages, np.ndarray]]:
        """Those of the page objects that are alive: their pages and their token ids."""
        found = dict[str, tuple[Pages, np.ndarray]]()
        with self._lock:
            for name in names:
                known = self._live.get(name)
                column = known.column() if known is not None else None
                if known is not None and column:
                    found[name] = column, known.tokens
        return found

    def remember(self, pages: Mapping[str, LivePage]) -> None:
        with self._lock:
            for name, page in pages.items():
                if (first := page.first()) is not None:
                    self._names[first] = name
                    self._live[name] = page

    def forget(self, name: str) -> None:
        with self._lock:
            self._live.pop(name, None)

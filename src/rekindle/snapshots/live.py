"""Pages that are both in this process and on disk."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass

import numpy as np

from rekindle.snapshots.layout import Pages
from rekindle.snapshots.types import Page


@dataclass(frozen=True, slots=True)
class _LivePage:
    """A page object whose pages are alive in this process."""

    pages: tuple[weakref.ref[Page], ...]
    tokens: np.ndarray

    def column(self) -> Pages | None:
        alive = tuple(page for page in (ref() for ref in self.pages) if page is not None)
        return alive if len(alive) == len(self.pages) else None


class LivePages:
    """Names of the page objects of living pages, so that a page is hashed once and read once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: weakref.WeakKeyDictionary[Page, str] = weakref.WeakKeyDictionary()
        self._live: dict[str, _LivePage] = {}

    def name_of(self, column: Pages) -> str | None:
        with self._lock:
            name = self._names.get(column[0]) if column else None
            if name is None:
                return None
            known = self._live[name].column() if name in self._live else None
            same = known is not None and all(a is b for a, b in zip(known, column, strict=True))
            return name if same else None

    def find(self, name: str) -> tuple[Pages, np.ndarray] | None:
        with self._lock:
            known = self._live.get(name)
            column = known.column() if known is not None else None
            return (column, known.tokens) if known is not None and column else None

    def remember(self, name: str, column: Pages, tokens: np.ndarray) -> None:
        if not column:
            return
        with self._lock:
            self._names[column[0]] = name
            self._live[name] = _LivePage(tuple(map(weakref.ref, column)), tokens)

    def forget(self, name: str) -> None:
        with self._lock:
            self._live.pop(name, None)

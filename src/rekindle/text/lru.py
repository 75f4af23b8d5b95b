"""A bounded memory: what was not used for longest is forgotten first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lru(Generic[K, V]):
    """Values with sizes. Not locked: its owner is."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._values: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.size = 0

    def get(self, key: K) -> V | None:
        found = self._values.get(key)
        if found is None:
            return None
        self._values.move_to_end(key)
        return found[0]

    def put(self, key: K, value: V, size: int) -> None:
        self.size += size - self._values.pop(key, (None, 0))[1]
        self._values[key] = (value, size)
        while self.size > self._budget:
            _, (_, freed) = self._values.popitem(last=False)
            self.size -= freed

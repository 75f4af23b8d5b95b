"""A neighbour that fails when a test wants it to."""

from __future__ import annotations

from typing import Any


class Faulty:
    """A stage whose chosen verb fails once, at its n-th call."""

    def __init__(self, stage: Any, verb: str, at: int, error: Exception) -> None:
        self._stage, self._verb, self._left, self._error = stage, verb, at, error

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stage, name)
        if name != self._verb:
            return value

        def call(*arguments: Any) -> Any:
            self._left -= 1
            if self._left == 0:
                raise self._error
            return value(*arguments)

        return call

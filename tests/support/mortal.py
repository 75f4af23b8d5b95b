"""A stage that is lost at a chosen call."""

from __future__ import annotations

from typing import Any

from rekindle.errors import StageLost
from rekindle.stages import LocalStage


class Mortal:
    """A local stage that dies at a chosen call and, if it may, comes back with every slot empty."""

    def __init__(self, stage: LocalStage, dies_at: dict[str, int], returns: bool = True) -> None:
        self._stage = stage
        self._dies_at = dies_at
        self._returns = returns
        self.lost: str | None = None
        self.deaths = 0

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stage, name)
        if name not in ("forward", "open", "close", "capture", "prepare_restore", "commit_restore", "rewind"):
            return value

        def call(*arguments: Any) -> Any:
            if self._dies_at.get(name) is not None:
                self._dies_at[name] -= 1
                if self._dies_at[name] < 0:
                    del self._dies_at[name]
                    self.lost = f"died in {name}"
                    self.deaths += 1
            if self.lost:
                raise StageLost(f"shard {self._stage.span}: {self.lost}")
            return value(*arguments)

        return call

    def recover(self) -> None:
        if not self._returns:
            raise StageLost("it does not come back")
        for slot in range(self._stage.slots):
            self._stage.close(slot)
        self.lost = None

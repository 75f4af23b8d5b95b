"""Restoring on several stages at once: all of them or none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rekindle.snapshots.types import Part


@runtime_checkable
class TwoPhaseRestore(Protocol):
    """A stage that can check a restore completely before it changes anything.

    `prepare_restore` raises if the parts do not fit, and leaves the slot as it is either way. `commit_restore` adopts
    what was prepared and has no reason left to fail but the loss of the stage. `abort_restore` drops it; without a
    prepared restore it does nothing, so whoever aborts need not know how far each stage came.
    """

    def prepare_restore(self, slot: int, position: int, parts: Sequence[Part]) -> None: ...
    def commit_restore(self, slot: int) -> None: ...
    def abort_restore(self, slot: int) -> None: ...

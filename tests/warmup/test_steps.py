"""The step shapes that a stage is asked to run."""

from __future__ import annotations

from typing import cast

import pytest

from rekindle.batch import Batch
from rekindle.stages.local import LocalStage
from rekindle.warmup.steps import run_step_shapes


class PaperStage:
    """Knows only its slots, and runs those that are open: the others' memory may be lent."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.rows: set[int] = set()
        self.opened: set[int] = set()

    def forward(self, batch: Batch, _: None) -> None:
        assert all(segment.slot < self.slots for segment in batch.segments), "a slot that the stage does not have"
        assert all(segment.slot in self.opened for segment in batch.segments), "a slot that is not open"
        self.rows.add(len(batch.segments))

    def blank(self, rows: int) -> None:
        """It is the first."""

    def open(self, slot: int) -> None:
        self.opened.add(slot)

    def close(self, slot: int) -> None:
        assert slot < self.slots
        self.opened.discard(slot)

    def rewind(self, slot: int, position: int) -> None:
        assert slot < self.slots and position >= 0


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
def test_the_step_shapes_fill_every_slot_and_no_other(slots: int) -> None:
    stage = PaperStage(slots)
    said = list(run_step_shapes(cast(LocalStage, stage)))
    assert max(stage.rows) == slots and len(said) == len(set(said))
    assert not stage.opened

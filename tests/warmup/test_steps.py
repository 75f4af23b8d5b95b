"""The step shapes that a stage is asked to run."""

from __future__ import annotations

from typing import Any, cast

import pytest
from torch import Tensor

from rekindle.batch import PENDING, Batch
from rekindle.spec import Span
from rekindle.stages.local import LocalStage
from rekindle.stages.types import PendingTokens
from rekindle.warmup.steps import run_step_shapes, warm_up


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


@pytest.mark.parametrize("span", [None, Span(4, 8)], ids=["the first stage", "a later one"])
def test_before_the_first_request_a_stage_has_run_a_step_ahead_of_the_host(
    make_tiny: Any, span: Span | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose token the host does not know; a later stage is sent activations instead. No slot is left in use."""
    stage, forwards = make_tiny("dense").stage(span, slots=2, pages=8), list[tuple[Batch, PendingTokens | None]]()
    forward = stage.forward

    def note(batch: Batch, hidden: Tensor | None, pending: PendingTokens | None = None) -> Any:
        forwards.append((batch, pending))
        return forward(batch, hidden, pending)

    monkeypatch.setattr(stage, "forward", note)
    warm_up(stage, 64)
    batch, pending = forwards[-1]
    assert batch.rows == 1 and batch.segments[0].tokens == (PENDING,)
    assert (pending is not None) == (span is None)
    stage.check()
    assert stage.pages().used == 0

"""Random lives of slots, on two stages at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from rekindle.batch import Batch, Segment, Wanted
from rekindle.stages import LocalStage

SLOTS, LONGEST = 3, 640
TOKENS = np.random.default_rng(5).integers(0, 320, LONGEST + 1).tolist()


class StageLife:
    """The same moves on two stages, of which the second is plain: whatever comes of them is the same, to the bit."""

    def __init__(self, stages: Sequence[LocalStage]) -> None:
        self.stages = stages
        self.positions: dict[int, int] = {}  # of open slots
        for slot in range(SLOTS):
            self.close(slot)

    def open(self, slot: int, count: int = 0) -> None:
        if slot not in self.positions:
            for stage in self.stages:
                stage.open(slot)
            self.positions[slot] = 0

    def close(self, slot: int, count: int = 0) -> None:
        """Also where it is closed already."""
        self.positions.pop(slot, None)
        for stage in self.stages:
            stage.close(slot)

    def run(self, slot: int, count: int, rewindable: bool = False) -> None:
        self.open(slot)
        at = self.positions[slot]
        count = min(count, LONGEST - at)
        if count < 1:
            return
        segment = Segment(slot, at, tuple(TOKENS[at : at + count]), Wanted.LAST)
        outs = [stage.forward(Batch((segment,), rewindable=rewindable), None).logits for stage in self.stages]
        assert torch.equal(outs[0], outs[1]), f"slot {slot} at {at}, {count} rows"  # type: ignore[arg-type]
        self.positions[slot] = at + count

    def decode(self, slot: int, count: int) -> None:
        """A row of every open slot in one step."""
        rows = [Segment(slot, at, (TOKENS[at],), Wanted.LAST) for slot, at in sorted(self.positions.items())]
        rows = [row for row in rows if row.end <= LONGEST]
        if rows:
            outs = [stage.forward(Batch(tuple(rows)), None).logits for stage in self.stages]
            assert torch.equal(outs[0], outs[1])  # type: ignore[arg-type]
            self.positions.update((row.slot, row.end) for row in rows)

    def restore(self, slot: int, count: int) -> None:
        """What one sequence holds goes on in another slot, and from one kind of stage to the other."""
        to, position = count % SLOTS, self.positions.get(slot)
        if position:
            parts = [stage.capture(slot) for stage in self.stages]
            for stage, those in zip(self.stages, reversed(parts), strict=True):
                stage.restore(to, position, those)
            self.positions[to] = position

    def rewind(self, slot: int, count: int) -> None:
        before = self.positions.get(slot)
        if before is not None and before < LONGEST:
            self.run(slot, min(count, 12), rewindable=True)
            self.positions[slot] = before + (self.positions[slot] - before) // 2
            for stage in self.stages:
                stage.rewind(slot, self.positions[slot])

    def compare(self) -> None:
        for slot in self.positions:
            for ours, theirs in zip(*(stage.capture(slot) for stage in self.stages), strict=True):
                assert all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in theirs.tensors)
                pairs = zip(ours.pages, theirs.pages, strict=True)
                assert all(torch.equal(page.data, other.data) for page, other in pairs)

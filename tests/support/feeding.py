"""Tokens through a stage, in segments."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rekindle.batch import Batch, Segment, Wanted
from rekindle.stages import LocalStage


def logits_after(
    stage: LocalStage, tokens: Sequence[int], slot: int, start: int, stop: int, step: int
) -> list[torch.Tensor]:
    """Runs tokens[start:stop] in segments of `step`; the logits of the last row of each."""
    seen = []
    for at in range(start, stop, step):
        segment = Segment(slot, at, tuple(tokens[at : min(at + step, stop)]), Wanted.LAST)
        logits = stage.forward(Batch((segment,)), None).logits
        assert logits is not None
        seen.append(logits[-1])
    return seen

"""A batch whose pages do not fit the device at once, run a few segments at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from rekindle.batch import Batch, Segment
from rekindle.layers import PagedKv
from rekindle.spec import PAGE
from rekindle.stages.scores import join_scores
from rekindle.stages.types import PendingTokens, StageOutput

Forward = Callable[[Batch, torch.Tensor | None, PendingTokens | None], StageOutput]


def portions_of(batch: Batch, paged: PagedKv) -> list[Batch]:
    """The batch; or its segments in turns, where the pages they write do not fit the device at once."""
    places = paged.pool.places
    open_pages = sum(table.position % PAGE > 0 for table in paged.tables)
    turns, left = [list[Segment]()], places - open_pages
    for segment in batch.segments if paged else ():
        missing = paged.tables[segment.slot].missing(segment.end)
        if missing > left and turns[-1]:
            open_pages += sum((s.end % PAGE > 0) - (s.position % PAGE > 0) for s in turns[-1])
            turns.append([])
            left = places - open_pages
        turns[-1].append(segment)
        left -= missing
    return [batch] if len(turns) == 1 else [replace(batch, segments=tuple(turn)) for turn in turns]


def run_portions(
    portions: Sequence[Batch], hidden: torch.Tensor | None, pending: PendingTokens | None, forward: Forward
) -> StageOutput:
    if len(portions) == 1:
        return forward(portions[0], hidden, pending)
    outputs, start = list[StageOutput](), 0
    for portion in portions:
        rows = range(start, start + portion.rows)
        part = None if hidden is None else hidden[rows.start : rows.stop]
        outputs.append(forward(portion, part, None if pending is None else pending.of_rows(rows)))
        start = rows.stop
    return _join(outputs)


def _join(outputs: Sequence[StageOutput]) -> StageOutput:
    """The outputs of a batch's portions, as that of the batch."""

    def rows(tensors: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
        present = [tensor for tensor in tensors if tensor is not None]
        return torch.cat(present) if present else None

    return StageOutput(
        rows([output.hidden for output in outputs]),
        rows([output.logits for output in outputs]),
        frozenset[int]().union(*(output.skipping for output in outputs)),
        join_scores([output.scores for output in outputs if output.scores is not None]),
        tuple(map(torch.cat, zip(*(output.features for output in outputs), strict=True))),
    )

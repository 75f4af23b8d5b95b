"""A batch on its way through the pipeline, and the tokens that are drawn from what it brings back."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import NamedTuple

import torch

from rekindle.batch import Batch, Segment
from rekindle.engine.sampler import draw
from rekindle.engine.sequence import Phase, Sequence
from rekindle.stages import StageOutput


class OnHost:
    """A tensor on its way to host memory, copied behind what the device has in line now and before what comes next."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._tensor = tensor
        if tensor.is_cuda:
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            # The copy runs on the tensor's device, which need not be the current one.
            self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def done(self) -> bool:
        return self._event is None or self._event.query()

    def get(self) -> torch.Tensor:
        """The tensor, waited for."""
        if self._event is not None:
            self._event.synchronize()
        return self._tensor


class Drawn:
    """Tokens on the device, and on their way to the host."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self.tokens = tokens  # int64 [rows]
        self._host = OnHost(tokens)

    def on_host(self) -> list[int]:
        return [int(token) for token in self._host.get().tolist()]


class Result(NamedTuple):
    """What a flight brings one of its owners."""

    segment: Segment
    owner: Sequence
    rows: torch.Tensor  # of logits; none where none were wanted
    scores: torch.Tensor  # [segment.scored_rows, …]


class Flight:
    """One batch, whose segments belong to `owners`. Those whose prompt it completes, or who decode, draw a token."""

    def __init__(self, batch: Batch, owners: tuple[Sequence, ...], output: Future[StageOutput]) -> None:
        self.batch = batch
        self.owners = owners
        self.output = output
        self.drawing = [owner for segment, owner in zip(batch.segments, owners, strict=True) if _draws(segment, owner)]
        self.drawn: Drawn | None = None

    @property
    def failed(self) -> bool:
        return self.output.done() and self.output.exception() is not None

    def draw(self) -> None:
        """Draw from the logits, once."""
        if self.drawn is None and self.drawing:
            drawing = set(map(id, self.drawing))
            last = [(each.segment.end, each.rows[-1]) for each in self.results() if id(each.owner) in drawing]
            logits = self.output.result().logits
            assert logits is not None, "a flight that draws brings logits"
            whole = len(last) == logits.shape[0]
            rows = logits if whole else torch.stack([row for _, row in last])
            self.drawn = Drawn(draw(rows, self.drawing, [end for end, _ in last]))

    def results(self) -> Iterator[Result]:
        """Every segment with its owner and what it wanted."""
        output = self.output.result()
        logits, scores = (torch.empty(0) if rows is None else rows for rows in (output.logits, output.scores))
        row = scored = 0
        for segment, owner in zip(self.batch.segments, self.owners, strict=True):
            next_row, next_scored = row + segment.logit_rows, scored + segment.scored_rows
            yield Result(segment, owner, logits[row:next_row], scores[scored:next_scored])
            row, scored = next_row, next_scored


def _draws(segment: Segment, owner: Sequence) -> bool:
    completes = owner.phase is Phase.PREFILL and segment.end == owner.prefill_end
    return owner.max_tokens > 0 and (completes or owner.phase is Phase.DECODE)

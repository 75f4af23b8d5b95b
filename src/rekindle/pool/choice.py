"""Which pages a row attends in sparse mode: a function of the tokens before it and of the pool alone.

Rows of one page attend the same pages, chosen by the query of one row in the page before. Every layer chooses for
itself, from its own queries and keys. So it does not matter how a prompt was cut into chunks, who shared the batch,
whether the rows were prefilled, decoded or verified, where the model is split, or whether a snapshot was restored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rekindle.buffers import SINK_PAGES, TAIL_PAGES
from rekindle.spec import PAGE

KvMode = Literal["exact", "sparse"]
Policy = Literal["qk", "lru"]

LEAD = 8  # rows before the end of a page: the query of that row chooses for the next page, early enough to be scored


def is_kept(page: int, sealed: int) -> bool:
    """Sink or tail of a sequence with `sealed` sealed pages."""
    return page < SINK_PAGES or page >= sealed - TAIL_PAGES


def choose(sealed: int, room: int, scores: Sequence[float] | np.ndarray | None) -> tuple[int, ...]:
    """The sealed pages that are attended, ascending: all that fit in `room`, else sink, tail and the best of the rest.

    scores: of the pages before the tail. Without them the latest are the best.
    """
    if sealed <= room:
        return tuple(range(sealed))
    tail = max(SINK_PAGES, sealed - TAIL_PAGES)
    left = max(0, room - SINK_PAGES - (sealed - tail))
    rest = np.arange(SINK_PAGES, tail)
    if scores is not None:
        rest = rest[np.argsort(np.asarray(scores)[SINK_PAGES:tail], kind="stable")]  # of equals the latest are the best
    return (*range(SINK_PAGES), *np.sort(rest[len(rest) - left :]).tolist(), *range(tail, sealed))


def deciding_rows(position: int, end: int, room: int) -> list[int]:
    """The rows of a segment [position, end) whose queries choose pages: those LEAD before the last one of a page, for
    the next page, if that one leaves any out. A function of position, however the rows are cut into segments; and so
    early that in decode pages are scored while the rows between run: no step waits for scores."""
    first = max(position // PAGE, room) * PAGE + PAGE - 1 - LEAD
    return [at - position for at in range(first, end, PAGE) if at >= position]


@dataclass(frozen=True, slots=True, eq=False)
class NotedQuery:
    """The query [layers, heads, dim] of the row at a position, float32."""

    position: int
    query: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """The queries by which a sequence chooses its pages: on this page, and from the next one on if known already. None
    where nothing is left out."""

    now: Tensor | None = None  # [layers, heads, dim] float32
    next: Tensor | None = None

    def by_page(self, page: int, noted: Sequence[NotedQuery]) -> dict[int, Tensor | None]:
        """The query that chooses for each page: these, of a sequence in `page`, and those noted since."""
        return {page: self.now, page + 1: self.next, **{query.position // PAGE + 1: query.query for query in noted}}

    def after_rows(self, position: int, end: int, noted: Sequence[NotedQuery]) -> Queries:
        """After the rows [position, end), among which these queries were noted."""
        known = self.by_page(position // PAGE, noted)
        return Queries(known.get(end // PAGE), known.get(end // PAGE + 1))

    def stacked(self) -> Tensor | None:
        """As snapshots hold them: None, [layers, heads, dim], or [layers, 2, heads, dim]."""
        if self.next is None:
            return self.now
        return torch.stack((torch.zeros_like(self.next) if self.now is None else self.now, self.next), dim=1)

    @classmethod
    def of(cls, stacked: Tensor | None) -> Queries:
        if stacked is None or stacked.ndim == 3:
            return cls(stacked)
        return cls(*(query.contiguous() for query in stacked.unbind(1)))


NO_QUERIES = Queries()


class Scores:
    """How well pages answer a query, for a sequence of `sealed` pages; on their way to the host."""

    def __init__(self, scores: Tensor, query: Tensor, sealed: int, room: int) -> None:
        self._query = query
        self._sealed = sealed
        self._room = room
        self._chosen: tuple[int, ...] | None = None
        self._scores = scores
        self._arrived: torch.cuda.Event | None = None
        if scores.is_cuda:
            self._scores = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=True)
            self._scores.copy_(scores, non_blocking=True)
            self._arrived = torch.cuda.current_stream(scores.device).record_event()

    def answers(self, query: Tensor, sealed: int) -> bool:
        return self._query is query and self._sealed == sealed

    def poll(self) -> None:
        """Choose now if the scores have arrived: at the end of the page the device would wait for the host."""
        if self._chosen is None and (self._arrived is None or self._arrived.query()):
            self.chosen()

    def chosen(self) -> tuple[int, ...]:
        """The pages with the best scores; waits for these."""
        if self._chosen is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._chosen = choose(self._sealed, self._room, self._scores.numpy())
        return self._chosen

"""Which pages a sequence attends in sparse mode. Pure functions: the same state chooses the same pages, hit or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rekindle.spec import PAGE

KvMode = Literal["exact", "sparse"]
Policy = Literal["qk", "lru"]

SINK = 1  # pages at the beginning that never leave …
TAIL = 4  # … and sealed pages at the end
LEAD = 8  # rows before the end of a page: the query of that row chooses for the next page, and is there in time


def is_kept(page: int, sealed: int) -> bool:
    """Sink or tail of a sequence with so many sealed pages."""
    return page < SINK or page >= sealed - TAIL


def choose(sealed: int, room: int, scores: Sequence[float] | np.ndarray | None) -> tuple[int, ...]:
    """The sealed pages that are attended, ascending: all that fit in `room`, else sink, tail and the best of the rest.

    scores: of the pages before the tail. Without them the latest are the best.
    """
    if sealed <= room:
        return tuple(range(sealed))
    tail = max(SINK, sealed - TAIL)
    left = max(0, room - SINK - (sealed - tail))
    rest = np.arange(SINK, tail)
    if scores is not None:
        rest = rest[np.argsort(np.asarray(scores)[SINK:tail], kind="stable")]  # of equals the latest are the best
    return (*range(SINK), *np.sort(rest[len(rest) - left :]).tolist(), *range(tail, sealed))


def deciding_row(position: int, end: int, rewindable: bool) -> int | None:
    """The row of a segment whose query chooses pages, if there is one: a function of position, so that a restored run
    chooses where the straight run does.

    The last row of a prefill chunk, for the rows behind it. In decode and verify the row that lies LEAD before the last
    one of a page, for the next page: while those rows run, the pages are scored, and nobody waits for that.
    """
    if end - position > 1 and not rewindable:
        return end - position - 1
    within = PAGE - 1 - LEAD
    row = (end - 1 - within) // PAGE * PAGE + within  # the last one before the end
    return row - position if row >= position else None


@dataclass(frozen=True, slots=True, eq=False)
class Noted:
    """The query [layers, heads, dim] of the row at a position, float32."""

    position: int
    query: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Queries:
    """What a sequence chooses its pages by: on this page, and from the next one on if that is known already."""

    now: Tensor | None = None  # [layers, heads, dim] float32
    next: Tensor | None = None

    def behind_rows(self, position: int, end: int, noted: Noted | None) -> Queries:
        """After the rows [position, end) of decode or verify, no more than a page; one of them may have been noted."""
        now, next = self.now, self.next
        edge = end // PAGE * PAGE
        if edge > position:
            now, next = now if next is None else next, None
        if noted is not None:
            now, next = (noted.query, None) if noted.position < edge or now is None else (now, noted.query)
        return Queries(now, next)

    def stacked(self) -> Tensor | None:
        """As snapshots hold them: None, [layers, heads, dim], or [layers, 2, heads, dim]."""
        if self.now is None or self.next is None:
            return self.now
        return torch.stack((self.now, self.next), dim=1)

    @classmethod
    def of(cls, stacked: Tensor | None) -> Queries:
        if stacked is None or stacked.ndim == 3:
            return cls(stacked)
        return cls(*(query.contiguous() for query in stacked.unbind(1)))


NOBODY = Queries()


class Scores:
    """Of the pages that a query chooses among, for a sequence of so many sealed pages; on their way to the host."""

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

    def serve(self, query: Tensor, sealed: int) -> bool:
        return self._query is query and self._sealed == sealed

    def look(self) -> None:
        """Choose now if they are here: at the edge of the page the device would wait for the host meanwhile."""
        if self._chosen is None and (self._arrived is None or self._arrived.query()):
            self.chosen()

    def chosen(self) -> tuple[int, ...]:
        """The pages that they choose; waits for them."""
        if self._chosen is None:
            if self._arrived is not None:
                self._arrived.synchronize()
            self._chosen = choose(self._sealed, self._room, self._scores.numpy())
        return self._chosen

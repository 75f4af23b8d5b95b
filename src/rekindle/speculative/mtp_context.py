"""A next-token-prediction (MTP) block with what it keeps of every slot.

The row of position q is made of the token at q and of what left the target's last layer at q - 1. So what left it at
the last position waits for a token: the next one, or the one that a block begins with. It is a part of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rekindle.batch import Ask, Batch, Segment
from rekindle.snapshots.types import Part
from rekindle.speculative.context import KV_TYPE, CopiesToHost, Known, PendingFeatures, RingContext, Shaped
from rekindle.speculative.dflash import Keys
from rekindle.speculative.mtp import Chain, Mtp

LAST = "last"  # tensor of the part: what left the last layer at the position before, float32 [1, hidden]


class Last(NamedTuple):
    position: int  # of the row that it is needed for
    hidden: Tensor  # [1, hidden]


class MtpContext(RingContext):
    chained = True

    def __init__(
        self,
        model: Mtp,
        identity: str,
        slots: int,
        context: int,
        kv_type: torch.dtype = KV_TYPE,
        copies: CopiesToHost | None = None,
    ) -> None:
        super().__init__(model.spec, model.device, identity, slots, context, kv_type, copies)
        self.model = model
        self._last: list[Last | None] = [None] * slots

    @property
    def reach(self) -> int:
        """The first row needs what stands before it."""
        return super().reach + 1

    def context(self, slot: int) -> range:
        known = super().context(slot)
        return range(max(0, known.start - 1), known.stop) if known else known

    def _read_rows(
        self, batch: Batch, features: Sequence[Tensor], pending: PendingFeatures | None
    ) -> Iterator[tuple[Segment, int, tuple[Tensor, ...]]]:
        tokens = self._tokens(batch, pending) if batch.feature_rows else None
        first = 0
        for row, segment in batch.row_starts():
            if segment.features and tokens is not None:
                start, end = segment.end - segment.features, row + len(segment)
                hidden = features[0][first : first + segment.features]
                first += segment.features
                before = self._before(segment.slot, start, hidden)
                self._last[segment.slot] = Last(segment.end, hidden[-1:].clone())
                rows = torch.cat((before, hidden[:-1]))
                if len(rows):
                    yield segment, segment.end - len(rows), (rows, tokens[end - len(rows) : end])

    def _before(self, slot: int, position: int, like: Tensor) -> Tensor:
        """What the row at `position` needs: [1, hidden], or nothing where it is not known."""
        if position == 0:
            return torch.zeros_like(like[:1])
        last = self._last[slot]
        return last.hidden.to(like) if last is not None and last.position == position else like[:0]

    def _tokens(self, batch: Batch, pending: PendingFeatures | None) -> Tensor:
        """Of all rows; where none could be drawn any will do, since what comes of it is thrown away."""
        known = [max(token, 0) for segment in batch.segments for token in segment.tokens]
        tokens = torch.tensor(known, device=self._device)
        if pending is not None:
            sources = torch.tensor(pending.sources, device=pending.tokens.device)
            drawn = pending.tokens[sources].clamp(min=0)
            tokens[torch.tensor(pending.rows, device=self._device)] = drawn.to(self._device, tokens.dtype)
        return tokens

    def _keys_of(self, rows: Sequence[Tensor], positions: Tensor) -> list[Keys]:
        return self.model.context(rows, positions)

    def _draft(self, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        """Nothing for a slot of which it knows nothing: a snapshot without the drafter's part was restored there."""
        chains = {ask.slot: chain for ask in asks if (chain := self._chain(ask)) is not None}
        most = [min(ask.most, self.longest) for ask in asks if ask.slot in chains]
        found = dict(zip(chains, self.model.propose(list(chains.values()), most), strict=True)) if chains else {}
        return [found.get(ask.slot, ()) for ask in asks]

    def _chain(self, ask: Ask) -> Chain | None:
        last = self._last[ask.slot]
        hidden = last.hidden if last is not None and last.position == ask.position else None
        if hidden is None and ask.position:
            return None
        if hidden is None:
            hidden = torch.zeros((1, self.model.spec.hidden), dtype=self.model.dtype, device=self._device)
        return Chain(ask.position, ask.token, hidden, self._contexts(ask.slot)[0])

    # State

    def close(self, slot: int) -> None:
        super().close(slot)
        self._last[slot] = None

    def rewind(self, slot: int, position: int) -> None:
        known = self._known[slot]
        if position != known.position:
            known_all = known.stop == known.position
            self._last[slot] = Last(position, _row_at(known, position)) if known_all else None
        super().rewind(slot, position)

    def begin_capture(self, slot: int) -> Callable[[], Sequence[Part]]:
        last = self._last[slot]
        if last is None or last.position != self._known[slot].position:
            return tuple
        return super().begin_capture(slot)

    def _beside(self, slot: int) -> dict[str, Tensor]:
        last = self._last[slot]
        assert last is not None, "a capture has looked"
        return {LAST: last.hidden.float()}

    def _shapes_beside(self) -> Shaped:
        return {LAST: ((1, self.model.spec.hidden), torch.float32)}

    def commit_restore(self, slot: int) -> None:
        position, part = self._prepared[slot]
        super().commit_restore(slot)
        hidden = None if part is None else part.tensors[LAST].to(self._device, self.model.dtype)
        self._last[slot] = None if hidden is None else Last(position, hidden)


def _row_at(known: Known, position: int) -> Tensor:
    """What the waiting row of `position` was made of: [1, hidden]."""
    hidden = torch.cat([rows[0] for rows in known.waiting])
    at = position - known.settled
    return hidden[at : at + 1]

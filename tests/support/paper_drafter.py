"""Drafters that know the answer, and are right always, never or sometimes."""

from __future__ import annotations

import random
from collections.abc import Sequence

from torch import Tensor

from rekindle.batch import Ask, Batch
from rekindle.engine.drafting import Drafts
from rekindle.snapshots.types import Part
from rekindle.speculative.width import MOST
from rekindle.stages.types import PendingTokens, Unseen

VOCAB = 320


class PaperDrafter:
    """Knows how texts go on, and gets each token right with a given probability."""

    def __init__(self, texts: Sequence[Sequence[int]], right: float, vocab: int = VOCAB) -> None:
        self._texts = [list(text) for text in texts]
        self._right = right
        self._vocab = vocab
        self._random = random.Random(7)
        self._tokens: list[int] = []

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens

    def propose(self, most: int) -> tuple[int, ...]:
        here = len(self._tokens)
        text = next(text for text in self._texts if text[:here] == self._tokens)
        return tuple(map(self.spoil, text[here : here + most]))

    def spoil(self, token: int) -> int:
        return token if self._random.random() < self._right else (token + 1) % self._vocab


def paper_drafts(right: float, *texts: Sequence[int]) -> Drafts:
    """texts: prompts with the answers to them, as a run without drafts gave them."""
    return Drafts("paper", lambda: PaperDrafter(texts, right), None)


class PaperReader:
    """The same in the place of a pipeline's drafter: it reads no features and has no state."""

    taps: tuple[int, ...] = ()
    reach = 0
    longest = MOST
    chained = False
    drafts_ahead = False

    def __init__(self, right: float, text: Sequence[int], vocab: int) -> None:
        self._text = list(text)
        self._drafter = PaperDrafter((), right, vocab)

    def propose(self, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        spoil = self._drafter.spoil
        return [tuple(map(spoil, self._text[ask.position + 1 : ask.position + 1 + ask.most])) for ask in asks]

    def propose_ahead(self, asks: Sequence[Ask]) -> Tensor:
        raise NotImplementedError

    def propose_behind(self, block: Unseen) -> Tensor | None:
        return None

    def note_behind(self, slot: int, position: int | None) -> None: ...
    def read(self, batch: Batch, features: Sequence[Tensor], pending: PendingTokens | None) -> None: ...
    def context(self, slot: int) -> range:
        return range(0)

    def open(self, slot: int) -> None: ...
    def close(self, slot: int) -> None: ...
    def capture(self, slot: int) -> Sequence[Part]:
        return ()

    def restore(self, slot: int, position: int, parts: Sequence[Part]) -> None: ...
    def rewind(self, slot: int, position: int) -> None: ...
    def prepare_restore(self, slot: int, position: int, parts: Sequence[Part]) -> None: ...
    def commit_restore(self, slot: int) -> None: ...
    def abort_restore(self, slot: int) -> None: ...

"""The device as the first tier: slots whose sequence has ended stay as they are while nobody else needs them.

A kept slot goes by the tokens that its state has consumed, all of them and no others (law 1), and by their name space.
The next turn of its conversation takes it over: nothing is restored or copied, the sequence goes on. What was captured
is in the slower tiers as ever, so a slot that is given up loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Sequential
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from rekindle.engine.sequence import Sequence
from rekindle.prefix import HeldStates
from rekindle.prompt import common_length
from rekindle.snapshots.types import Stretch
from rekindle.spec import PAGE

NO_TOKENS = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A slot, and what the stages do not know about the state in it."""

    slot: int
    tokens: np.ndarray  # int32 [position]
    namespace: str
    stretches: tuple[Stretch, ...]
    logits: Future[torch.Tensor]  # [vocab] after the last token, in host memory; raises if they are no numbers

    @property
    def position(self) -> int:
        return len(self.tokens)

    def serves(self, tokens: np.ndarray, namespace: str) -> bool:
        return self.namespace == namespace and np.array_equal(self.tokens, tokens[: self.position])

    def may_serve(self, sequence: Sequence) -> bool:
        """Most likely, that is: a few tokens are compared, since many sequences may wait in line."""
        if self.namespace != sequence.namespace or self.position > len(sequence.tokens):
            return False
        places = (0, self.position // 2, self.position - 1)
        return all(self.tokens[place] == sequence.tokens[place] for place in places)

    def shares_pages(self, tokens: np.ndarray, namespace: str) -> int:
        """Full pages of its own that a sequence of these tokens can have too."""
        return common_length(self.tokens, tokens) // PAGE if self.namespace == namespace else 0


class KeptSlots:
    """Lives on the engine's thread; `known_length` may be asked from any."""

    def __init__(self, held: HeldStates | None) -> None:
        """held: counts what is kept; None: the cache has no such tier, and nothing is."""
        self._held = held
        self._kept: tuple[Kept, ...] = ()  # the least recently used first; replaced, never changed

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def is_on(self) -> bool:
        return self._held is not None

    @property
    def too_many(self) -> bool:
        """Whether they take more than they may. One is kept in any case."""
        return self._held is not None and self._held.over_budget and len(self) > 1

    def add(self, kept: Kept) -> None:
        assert self._held is not None, "nothing is kept without a tier"
        self._kept = (*self._kept, kept)
        self._held.add(kept.position)

    def longest(self, tokens: Sequential[int] | np.ndarray, namespace: str) -> Kept | None:
        """The one that has consumed most of a prompt, and nothing else."""
        if not self._kept:
            return None
        prompt = np.asarray(tokens, dtype=np.int32)
        serving = (kept for kept in reversed(self._kept) if kept.serves(prompt, namespace))
        return max(serving, key=lambda kept: kept.position, default=None)

    def known_length(self, tokens: Sequential[int] | np.ndarray, namespace: str) -> int:
        kept = self.longest(tokens, namespace)
        return kept.position if kept is not None else 0

    def shared_pages(self, tokens: Sequential[int] | np.ndarray, namespace: str) -> int:
        """Pages of a prompt that lie in a kept slot; a restore of the same snapshots finds them there."""
        if not self._kept:
            return 0
        prompt = np.asarray(tokens, dtype=np.int32)
        return max((kept.shares_pages(prompt, namespace) for kept in self._kept), default=0)

    def take(self, kept: Kept) -> None:
        """A sequence goes on in it."""
        self._drop(kept).take(kept.position)

    def victim(self, sequence: Sequence | None, line: Iterable[Sequence]) -> Kept | None:
        """The least recently used one. Those that share pages with the sequence in need come after others, and those
        that somebody else in line is about to take over come last."""
        prompt, namespace = (sequence.key, sequence.namespace) if sequence is not None else (NO_TOKENS, "")
        others = [other for other in line if other is not sequence]

        def worth(kept: Kept) -> tuple[bool, int]:
            return any(map(kept.may_serve, others)), kept.shares_pages(prompt, namespace)

        return min(self._kept, key=worth, default=None)

    def give_up(self, kept: Kept) -> None:
        """Somebody else needs its slot or its pages."""
        self._drop(kept).give_up(kept.position)

    def _drop(self, kept: Kept) -> HeldStates:
        assert self._held is not None and kept in self._kept, f"slot {kept.slot} is not kept"
        self._kept = tuple(other for other in self._kept if other is not kept)
        return self._held

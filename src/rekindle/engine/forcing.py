"""Tokens that an answer must go on with, whatever the logits say: thinking that has used up its budget is closed.

Forced tokens are drawn like others and are tokens of the sequence like others: they run through a forward, count, and
are in snapshots and in the client's answer. Only what the draw returns is decided beforehand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from rekindle.engine.types import ThinkingLimit


class Forcing:
    """Of one sequence: counts its thinking and says which tokens must follow."""

    def __init__(self, limit: ThinkingLimit | None = None) -> None:
        self._limit = limit
        self._spent: int | None = None  # tokens of the thinking that is open
        self._queue: deque[int] = deque()
        if limit is not None and limit.is_open:
            self._begin(limit)

    def at(self, ahead: int) -> int | None:
        """What must come behind `ahead` tokens that are drawn and not noted yet; None where anything may."""
        return self._queue[ahead] if 0 <= ahead < len(self._queue) else None

    def is_known(self, ahead: int) -> bool:
        """Whether `at` can say so already: it cannot where one of those tokens may use up the budget."""
        left = self._left
        return ahead == 0 or left is None or left > ahead

    @property
    def room(self) -> int | None:
        """How many tokens may come before one is forced; None without end."""
        return 0 if self._queue else self._left

    @property
    def _left(self) -> int | None:
        """Tokens before the budget is used up, at the soonest: thinking that is not open may begin with the next."""
        if self._limit is None:
            return None
        return self._limit.budget + 1 if self._spent is None else self._limit.budget - self._spent

    def force(self, tokens: Iterable[int]) -> None:
        """The answer goes on with these."""
        self._queue.extend(tokens)

    def note(self, token: int) -> None:
        """The answer has this token now."""
        if self._queue:
            forced = self._queue.popleft()
            assert token == forced, f"token {forced} was forced, and {token} was drawn"
        elif self._limit is not None:
            self._count(self._limit, token)

    def _count(self, limit: ThinkingLimit, token: int) -> None:
        if self._spent is None:
            if token == limit.begin:
                self._begin(limit)
        elif token == limit.end:
            self._spent = None
        else:
            self._spend(limit, self._spent + 1)

    def _begin(self, limit: ThinkingLimit) -> None:
        self._spend(limit, 0)

    def _spend(self, limit: ThinkingLimit, tokens: int) -> None:
        self._spent = tokens
        if tokens >= limit.budget:
            self.force(limit.close)
            self._spent = self._limit = None


def impose(drawn: torch.Tensor, forced: Sequence[int | None]) -> torch.Tensor:
    """The drawn tokens [rows], with those that are forced in their rows. -1 stays: a row whose logits are no numbers
    has no token."""
    rows = [row for row, token in enumerate(forced) if token is not None]
    if not rows:
        return drawn
    tokens = torch.tensor([forced[row] for row in rows], dtype=drawn.dtype, device=drawn.device)
    imposed = drawn.clone()
    imposed[rows] = torch.where(drawn[rows] < 0, drawn[rows], tokens)
    return imposed

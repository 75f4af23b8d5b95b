"""How many tokens the next block of a sequence drafts: more while the target agrees, fewer and later when it does not.

A block costs a row for every drafted token and, of a drafter with weights, a pass of it: `extra`, counted in tokens
that plain steps would give in that time (cost.py measures it). It pays where more is accepted than it costs. After a
block that did not pay the sequence rests: for 1 token, then for 2, 4, … MOST_REST, until a block pays again. All
sequences of an engine draft out of one purse, so that what never works costs at most a share of all steps, however many
sequences find that out.

What is drafted from the text itself comes in runs: a block that is accepted whole doubles the next one, and one of
which some is refused halves it, down to one token more than was accepted. A drafter with weights is right more or less
often at each place of a block, whatever became of the last one: its blocks are as wide as gives the most tokens in a
time.
"""

from __future__ import annotations

from collections.abc import Callable

FIRST = 4  # tokens of a sequence's first block
MOST = 15  # with the token before them 16 rows, which is what stages have room for
MOST_REST = 32  # tokens of the answer
ROW = 0.25  # cost of one more row to verify, in decode steps of a CPU; a GPU's is less
GRACE = 2.5  # tokens' worth of time that may be lost before anything is gained …
SHARE = 0.006  # … and of every token after that
WEALTH = 16.0  # tokens' worth that a purse holds at most: past gains pay for so much
FIRST_RATE = 0.7  # how often a drafter is thought to be right until it was seen …
TRIED = 0.93  # … what older blocks count, at a place that a new one has tried …
NOT_TRIED = 0.97  # … and at places that it has not: texts change, and what was right seldom may be right now


def by_rows(width: int) -> float:
    """What blocks cost where nothing was measured."""
    return ROW * width


class Purse:
    """What may still be lost, in tokens' worth of time."""

    def __init__(self) -> None:
        self._left = GRACE

    def allows(self, cost: float) -> bool:
        return cost <= self._left

    def earn(self, tokens: int) -> None:
        """So many tokens were answered."""
        self._add(SHARE * tokens)

    def settle(self, cost: float, accepted: int) -> None:
        self._add(accepted - cost)

    def _add(self, worth: float) -> None:
        self._left = min(WEALTH, self._left + worth)


class Width:
    """Of one sequence. Lengths are tokens of its prompt and answer."""

    def __init__(
        self,
        extra: Callable[[int], float] = by_rows,
        purse: Purse | None = None,
        filled: Callable[[int], int] | None = None,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        """purse: shared by the sequences of an engine; without one nothing is counted. filled: the width that is taken
        where this one is affordable. ready: whether it is known what blocks have to be better than."""
        self._extra = extra
        self._purse = purse
        self._filled = filled
        self._ready = ready
        self._width = FIRST
        self.pays = False  # the last block was worth it
        self._rest = 1  # tokens, after the next block that does not pay
        self._until = 0  # length at which the rest ends
        self._seen: int | None = None  # length when the purse was filled last

    def at(self, length: int) -> int:
        """Tokens to draft at most; 0 while the sequence rests."""
        self._earn(length)
        width = 0 if length < self._until or not self._ready() else self._affordable()
        filled = width if self._filled is None else self._filled(width)
        return filled if filled <= width or self._can_afford(filled) else width

    def _affordable(self) -> int:
        if self._purse is None:
            return self._width
        return next((width for width in range(self._width, 0, -1) if self._can_afford(width)), 0)

    def _can_afford(self, width: int) -> bool:
        return self._affords(width, self._extra(width))

    def _affords(self, width: int, cost: float) -> bool:
        return self._purse is None or (cost < width and self._purse.allows(cost))

    def _earn(self, length: int) -> None:
        if self._purse is not None and self._seen is not None:
            self._purse.earn(length - self._seen)
        self._seen = length

    def note(self, length: int, proposed: int, accepted: int) -> None:
        """A block was verified, and the sequence has `length` tokens now; or there was none after a pass: nothing was
        proposed. A block that was cut short, because little of the answer was left, does not shrink the next one."""
        cost = self._extra(proposed)
        if self._purse is not None:
            self._purse.settle(cost, accepted)
        self._learn(proposed, accepted)
        self.pays = accepted > cost or self._will_pay()
        if self.pays:
            self._rest = 1
        else:
            self.rest(length)

    def _learn(self, proposed: int, accepted: int) -> None:
        if accepted == proposed:
            self._width = min(max(self._width, 2 * proposed), MOST)
        else:
            self._width = max(1, self._width // 2, min(accepted + 1, MOST))

    @property
    def goes_on(self) -> bool:
        return self.pays

    def _will_pay(self) -> bool:
        """Whether the next block is worth it, though the last one was not."""
        return False

    def rest(self, length: int) -> None:
        """No drafts for a while; the next rest is twice as long."""
        self._until = length + self._rest
        self._rest = min(2 * self._rest, MOST_REST)


class PlaceRates:
    """How often the target agrees with the token at each place of a block, where it has agreed with all before it."""

    def __init__(self, places: int) -> None:
        self._tried, self._right = [0.0] * places, [0.0] * places  # blocks, older ones counting less

    def note(self, proposed: int, accepted: int) -> None:
        for place in range(len(self._tried)):
            tried = place < min(proposed, accepted + 1)
            fade = TRIED if tried else NOT_TRIED
            self._tried[place] = fade * self._tried[place] + tried
            self._right[place] = fade * self._right[place] + (place < accepted)

    def accepted(self) -> list[float]:
        """Tokens that blocks of 0, 1, 2, … tokens bring on average. A place is thought to be like the one before it, as
        if one block had said so."""
        rate, reached, sums = FIRST_RATE, 1.0, [0.0]
        for tried, right in zip(self._tried, self._right, strict=True):
            rate = (right + rate) / (tried + 1)
            reached *= rate
            sums.append(sums[-1] + reached)
        return sums


class DrafterWidth(Width):
    """Of blocks that a drafter with weights proposes."""

    def __init__(
        self,
        extra: Callable[[int], float],
        purse: Purse,
        ready: Callable[[], bool],
        longest: int = MOST,
        sequences: Callable[[], int] = lambda: 1,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> None:
        """longest: tokens that the drafter proposes at most; sequences: that share a step; goes_on: whether another
        block may follow the next one."""
        super().__init__(extra, purse, ready=ready)
        self._goes_on = goes_on
        self._rates = PlaceRates(min(longest, MOST))
        self._sequences = sequences

    def _affordable(self) -> int:
        """The width at which a step gives the most tokens in a time, of those that can be paid for."""
        together, best, fastest = self._sequences(), 0, 0.0
        for width, accepted in enumerate(self._rates.accepted()[1:], 1):
            cost = self._extra(width)  # once: this runs before every step
            rate = (together + accepted) / (together + cost)
            if rate > fastest and self._affords(width, cost):
                best, fastest = width, rate
        return best

    @property
    def goes_on(self) -> bool:
        """Whether a block will likely follow the next one."""
        return self.pays and self._goes_on()

    def _learn(self, proposed: int, accepted: int) -> None:
        self._rates.note(proposed, accepted)

    def _will_pay(self) -> bool:
        return any(tokens > self._extra(width) for width, tokens in enumerate(self._rates.accepted()) if width)

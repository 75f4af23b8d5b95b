"""What one forward runs: a ragged batch of segments; and what a drafter is asked for. Crosses every border, so it holds
no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

PENDING = -1  # a token on the device that the host does not know yet: the step before draws it, or the drafter does


class Wanted(StrEnum):
    """Which rows of a segment need logits."""

    NONE = "none"
    LAST = "last"
    ALL = "all"
    SCORED = "scored"  # the last; for each row before it log-probabilities of the token after it and of the likeliest


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one sequence: a prefill chunk, a decode row, or a block to verify."""

    slot: int
    position: int  # tokens the slot's state has consumed before this segment
    tokens: tuple[int, ...]
    wanted: Wanted = Wanted.NONE
    top: int = 0  # how many of the likeliest tokens each scored row reports
    features: int = 0  # last rows of which a drafter reads the outputs of the batch's taps

    def __post_init__(self) -> None:
        assert self.tokens, "a segment holds at least one token"

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def end(self) -> int:
        return self.position + len(self.tokens)

    @property
    def logit_rows(self) -> int:
        return len(self) if self.wanted is Wanted.ALL else int(self.wanted is not Wanted.NONE)

    @property
    def scored_rows(self) -> int:
        return len(self) - 1 if self.wanted is Wanted.SCORED else 0


@dataclass(frozen=True, slots=True)
class Batch:
    """The segments of one forward, at most one per slot."""

    segments: tuple[Segment, ...]
    rewindable: bool = False  # blocks to verify: keep their rows so that rewind() may go back into them
    taps: tuple[int, ...] = ()  # layers whose outputs are the features, ascending; none if no drafter reads them

    def __post_init__(self) -> None:
        slots = [segment.slot for segment in self.segments]
        assert len(slots) == len(set(slots)), f"a slot appears twice in one batch: {slots}"

    @property
    def rows(self) -> int:
        return sum(len(segment) for segment in self.segments)

    def row_starts(self) -> Iterator[tuple[int, Segment]]:
        """Every segment with the row it begins at."""
        row = 0
        for segment in self.segments:
            yield row, segment
            row += len(segment)

    @property
    def logit_rows(self) -> int:
        """Rows of logits that the last stage returns, segment by segment in order."""
        return sum(s.logit_rows for s in self.segments)

    @property
    def scored_rows(self) -> int:
        """Rows of scores that the last stage returns beside the logits."""
        return sum(s.scored_rows for s in self.segments)

    @property
    def feature_rows(self) -> int:
        """Rows of features that every tap gives, segment by segment in order."""
        return sum(s.features for s in self.segments)


@dataclass(frozen=True, slots=True)
class Ask:
    """For a block of one sequence."""

    slot: int
    position: int  # of `token`: as many tokens are in the state
    token: int  # the last known one
    most: int  # tokens to propose

"""What the text package hands to the engine: tokens, and the positions worth remembering."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from rekindle.errors import BadRequest


class BoundaryKind(StrEnum):
    """Why a boundary lies where it lies; retention treats the kinds differently."""

    SYSTEM = "system"  # end of system + tools: every conversation under the same prompt starts here
    MESSAGE = "message"  # start of a message
    LATTICE = "lattice"  # a point between two boundaries that lie far apart
    MARK = "mark"  # the client asked for it (cache_control)
    TOOL = "tool"  # the opening of a tool call
    END = "end"  # end of the prompt
    ANSWER = "answer"  # end of a finished answer
    BRANCH = "branch"  # where a prompt departed from what the index had seen


@dataclass(frozen=True, slots=True)
class Boundary:
    """A position where a snapshot may be taken."""

    position: int
    kind: BoundaryKind


@dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of one request, with its boundaries in ascending order."""

    tokens: tuple[int, ...]
    boundaries: tuple[Boundary, ...] = ()
    marks: tuple[int, ...] = ()  # those among them that the client asked for, whatever else they are
    _key: np.ndarray | None = field(default=None, repr=False, compare=False)

    @property
    def key(self) -> np.ndarray:
        """Its tokens as the index has them, int32 and not to be written to. Made once, where a worker thread reads the
        prompt, if it can: neither the event loop nor the engine's thread is to walk through a hundred thousand."""
        if self._key is None:
            object.__setattr__(self, "_key", ids_of(self.tokens))
        assert self._key is not None
        return self._key


class TokenIds(list[int]):
    """Ids that a client wrote, none below 0, and the array that they become: both are made where its body is read."""

    def __init__(self, ids: Sequence[int]) -> None:
        super().__init__(ids)
        self.key = ids_of(ids)


def ids_of(tokens: Sequence[int]) -> np.ndarray:
    """int32 [tokens], read-only. numpy itself takes three times as long over a list."""
    if isinstance(tokens, TokenIds):
        return tokens.key
    try:
        return np.frombuffer(struct.pack(f"{len(tokens)}i", *tokens), dtype=np.int32)
    except struct.error:
        wrong = next(token for token in tokens if not isinstance(token, int) or not -(1 << 31) <= token < 1 << 31)
        raise BadRequest(f"{wrong!r} is no token id, which have 31 bits") from None


MOST_OF_A_KIND = 256  # boundaries of one prompt at which state is captured: a client may write thousands


def newest(boundaries: Sequence[Boundary]) -> list[Boundary]:
    """Of each kind the last ones, in ascending order. What follows a prompt leaves it near its end."""
    counts: Counter[BoundaryKind] = Counter()
    kept = []
    for boundary in reversed(boundaries):
        counts[boundary.kind] += 1
        if counts[boundary.kind] <= MOST_OF_A_KIND:
            kept.append(boundary)
    return kept[::-1]


def common_length(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """How many leading tokens two runs share."""
    n = min(len(a), len(b))
    if n == 0:
        return 0
    differs = np.asarray(a[:n]) != np.asarray(b[:n])
    first = int(differs.argmax())
    return first if differs[first] else n

"""What the text room hands to the engine: tokens, and the positions worth remembering."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class BoundaryKind(StrEnum):
    """Why a boundary lies where it lies; retention treats the kinds differently."""

    SYSTEM = "system"  # end of system + tools: every conversation under the same prompt starts here
    MESSAGE = "message"  # start of a message
    LATTICE = "lattice"  # an even point inside a very long message
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

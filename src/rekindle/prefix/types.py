"""What the index answers with, and the entry it keeps per published prefix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum

import numpy as np

from rekindle.prompt import BoundaryKind
from rekindle.snapshots.types import Snapshot


class Standing(IntEnum):
    """Whether an active conversation will need an entry next."""

    IDLE = 0
    FRESH = 1  # newest of a conversation that has not come back yet; a side call never does
    RETURNING = 2  # newest of a conversation that has


class Miss(StrEnum):
    """Why not more of a prompt was restored."""

    EMPTY = "empty"  # nothing is published
    UNSEEN = "unseen"  # past the hit, the index has seen nothing like it
    NO_BOUNDARY = "no_boundary"  # more was seen, but no snapshot lies between the hit and the divergence
    NO_LOGITS = "no_logits"  # a snapshot as long as the prompt has no logits to sample from
    BAD_FILE = "bad_file"  # a longer snapshot could not be read back
    UNAVAILABLE = "unavailable"  # a longer snapshot lies in a tier that does not answer
    EVICTED = "evicted"  # a longer snapshot was evicted while it was looked up
    PROMPT_LOGPROBS = "prompt_logprobs"  # every token's logits were asked for, and a snapshot has none but the last


class Node:
    """A run of tokens in the tree of one tier; `entry` is what was published at its end."""

    __slots__ = ("children", "depth", "edge", "entry", "parent")

    def __init__(self, edge: np.ndarray, parent: Node | None, depth: int) -> None:
        self.edge = edge  # int32, the tokens [depth - len(edge), depth)
        self.parent = parent
        self.depth = depth
        self.children: dict[int, Node] = {}  # by the first token of their edge
        self.entry: Entry | None = None


@dataclass(slots=True, eq=False)
class Copy:
    """An entry in one tier."""

    id: str  # the tier's
    node: Node  # in the tier's tree
    leaving: Snapshot | None = None  # the tier has let go of it; it is found here until a slower tier has it


@dataclass(slots=True, eq=False)
class Entry:
    """One published prefix, in one tier or several. Its fields belong to the cache and its lock."""

    position: int
    kind: BoundaryKind
    conversation: str
    own_bytes: int
    has_logits: bool
    namespace: str = ""  # only prompts of the same name space find it
    copies: dict[str, Copy] = field(default_factory=dict)  # by tier
    adding: set[str] = field(default_factory=set)  # tiers that took it and are not done
    pins: int = 0
    kept_until: float = 0.0  # seconds of a monotonic clock; a client asked for it
    inherited: bool = False  # from an earlier process
    gone: bool = False  # evicted from every tier, or quarantined
    used: int = 0  # the cache's count of operations at its last use
    hits: int = 0
    standing: Standing = Standing.IDLE


@dataclass(frozen=True, slots=True)
class Hit:
    """A published prefix of the prompt, ready to be restored, and no victim of eviction until it is released."""

    snapshot: Snapshot
    position: int
    tier: str
    entry: Entry
    release: Callable[[], None]  # once, when the state has been restored or is not wanted


@dataclass(frozen=True, slots=True)
class Lookup:
    """What the index knows of a prompt."""

    hit: Hit | None
    divergence: int  # where the prompt leaves everything the index has seen; a boundary is worth cutting there
    ours: int | None  # the prompt's token there, None at its end
    seen: int | None  # the token the index has there, None past the end of what it has seen
    miss: Miss | None  # None when the hit is as long as the prompt
    taken: Callable[[], None]  # once, when a sequence starts with it: then it counts as a hit or a miss
    held: int = 0  # tokens whose state the caller holds itself: there is no hit then, and nothing to restore

    @property
    def reached(self) -> int:
        """Tokens that need not be computed."""
        return self.hit.position if self.hit is not None else self.held

    @property
    def reason(self) -> str | None:
        """Why not more was restored, in words."""
        match self.miss:
            case None:
                return None
            case Miss.EMPTY:
                return "nothing has been published yet"
            case Miss.UNSEEN:
                return f"the prompt is new from position {self.divergence} on"
            case Miss.NO_BOUNDARY:
                seen = f"the prompt was seen up to position {self.divergence}"
                return f"{seen}, the last snapshot before lies at {self.reached}"
            case Miss.NO_LOGITS:
                return "the snapshot at the prompt's end has no logits"
            case Miss.BAD_FILE:
                return "a longer snapshot on disk could not be used and was quarantined"
            case Miss.UNAVAILABLE:
                return "a longer snapshot lies in a tier that does not answer now"
            case Miss.EVICTED:
                return "a longer snapshot was evicted while it was looked up"
            case Miss.PROMPT_LOGPROBS:
                return "prompt log-probabilities were asked for"

"""The snapshot: all state of one sequence at one position, in a layout that knows no split, device or pool.

A chain of snapshots shares its sealed pages by reference, so n boundaries of one conversation hold every page
once and only the recurrent parts anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from rekindle.errors import SnapshotMismatch
from rekindle.snapshots.slabs import Slab
from rekindle.spec import PAGE


class Ready(Protocol):
    """Copies to host memory that may still be under way. A published snapshot is complete; whoever captures for
    another purpose waits before the host reads."""

    @property
    def done(self) -> bool:
        """There is nothing to wait for any more: `wait` says at once whether the copies came."""

    def wait(self) -> None:
        """Until they are complete. Raises where they never will be."""


class Page:
    """One layer's K and V of PAGE consecutive positions, sealed: nobody writes it again.

    Compared by identity: two pages are the same page only if they are the same object (or, on disk, the same
    content address).
    """

    __slots__ = ("__weakref__", "_number", "_run", "slab")

    def __init__(self, data: torch.Tensor, slab: Slab | None = None) -> None:
        """data: [2, PAGE, kv_heads, row] in host memory, contiguous; row is head_dim for float types.
        slab: that it lies in."""
        self._run, self._number, self.slab = data, -1, slab

    @classmethod
    def all_of(cls, run: torch.Tensor, slab: Slab | None) -> list[Page]:
        """The pages [pages, 2, PAGE, kv_heads, row] that lie behind each other. A tensor for each is made when it is
        asked for: to make them all would cost a capture more than its copies."""
        pages = [cls(run, slab) for _ in range(len(run))]
        for number, page in enumerate(pages):
            page._number = number
        return pages

    @property
    def data(self) -> torch.Tensor:
        return self._run if self._number < 0 else self._run[self._number]

    @property
    def nbytes(self) -> int:
        return self._run.nbytes if self._number < 0 else self._run.nbytes // len(self._run)

    @property
    def address(self) -> int:
        return self._run.data_ptr() if self._number < 0 else self._run.data_ptr() + self._number * self.nbytes

    @property
    def pinned(self) -> bool:
        """A GPU of this process can read it where it lies."""
        return self.slab is not None and self.slab.pinned


@dataclass(frozen=True, slots=True, eq=False)
class KvPart:
    """What one attention layer holds: sealed pages, then the rows of the page that is still open."""

    layer: int
    pages: tuple[Page, ...]
    tail: torch.Tensor  # [2, rows, kv_heads, row], 0 <= rows < PAGE
    # What a sparse run chooses its pages by, float32 [heads, dim]; or [2, heads, dim]: now, and from the next page on.
    query: torch.Tensor | None = None
    ready: Ready | None = None  # of all the part holds, pages too; None: complete

    @property
    def position(self) -> int:
        return len(self.pages) * PAGE + self.tail.shape[1]

    @property
    def own_bytes(self) -> int:
        """Beside the sealed pages, which others may share."""
        return self.tail.nbytes + (0 if self.query is None else self.query.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class DeltaPart:
    """What one DeltaNet layer holds: a fixed size, whatever the position."""

    layer: int
    state: torch.Tensor  # [value_heads, key_dim, value_dim] float32, value heads in tiled order
    window: torch.Tensor  # [conv_width - 1, conv_channels] float32, oldest row first
    ready: Ready | None = None

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.window.nbytes


Part = KvPart | DeltaPart


def are_settled(parts: Iterable[Part]) -> bool:
    """Whether `wait_for` says at once how it went."""
    return all(ready.done for ready in _readies(parts))


def wait_for(parts: Iterable[Part]) -> None:
    """Return when every copy the parts hold is complete; raises where one never will be."""
    for ready in _readies(parts):
        ready.wait()


def _readies(parts: Iterable[Part]) -> set[Ready]:
    return {part.ready for part in parts if part.ready is not None}


@dataclass(frozen=True, slots=True)
class Stretch:
    """How the tokens up to `stop` were computed, so that audits know which bound to apply."""

    stop: int
    how: str  # prefill (alone in its batch), batched (prefill beside others), decode or verify
    cuts: tuple[int, ...] = ()  # prefill: chunk edges inside the stretch that do not lie on the grid


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """All state after `tokens`. Its key is its tokens, so a key is exactly as long as its state (law 1)."""

    tokens: np.ndarray  # int32 [position]
    parts: tuple[Part, ...]  # one per layer, ascending
    logits: torch.Tensor | None  # [vocab] float32 after the last token; None where no logits were computed
    grid: int  # chunk grid of the prefill that made it
    stretches: tuple[Stretch, ...]  # tile [0, position)
    drafter: tuple[torch.Tensor, ...] = ()  # the drafter's context; empty without one

    def __post_init__(self) -> None:
        for part in self.parts:
            if isinstance(part, KvPart) and part.position != self.position:
                raise SnapshotMismatch(
                    f"layer {part.layer} holds {part.position} positions, the snapshot's key is {self.position} long"
                )

    @property
    def position(self) -> int:
        return len(self.tokens)

    @property
    def own_bytes(self) -> int:
        """Bytes that no other snapshot of the chain can share: recurrent parts, tails, logits, drafter."""
        fixed = sum(p.own_bytes if isinstance(p, KvPart) else p.nbytes for p in self.parts)
        logits = self.logits.nbytes if self.logits is not None else 0
        return fixed + logits + sum(t.nbytes for t in self.drafter) + self.tokens.nbytes


class StateHolder(Protocol):
    """Whoever holds sequence state answers these verbs: a stage, local or remote, and the drafter."""

    def open(self, slot: int) -> None: ...
    def close(self, slot: int) -> None: ...
    def capture(self, slot: int) -> Sequence[Part]: ...
    def restore(self, slot: int, position: int, parts: Sequence[Part]) -> None: ...
    def rewind(self, slot: int, position: int) -> None: ...

"""The snapshot: all state of one sequence at one position, in a layout that knows no split, device or pool.

A chain of snapshots shares its sealed pages by reference, so n boundaries of one conversation hold every page
once and only the recurrent parts anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from rekindle.errors import SnapshotMismatch
from rekindle.snapshots.slabs import Slab
from rekindle.spec import PAGE


class Ready(Protocol):
    """Copies to host memory that may still be under way. A published snapshot is complete; any other capture is waited
    for before the host reads it."""

    @property
    def done(self) -> bool:
        """There is nothing to wait for any more: `wait` says at once whether the copies came."""

    def wait(self) -> None:
        """Until they are complete. Raises where they never will be."""


class Page:
    """One layer's K and V of PAGE consecutive positions, sealed: it is never written again.

    Compared by identity: two pages are the same page only if they are the same object (or, on disk, the same
    content address).
    """

    __slots__ = ("__weakref__", "_number", "_run", "address", "nbytes", "slab")

    def __init__(self, data: torch.Tensor, slab: Slab | None = None) -> None:
        """data: [2, PAGE, kv_heads, row] in host memory, contiguous; row is head_dim for float types.
        slab: that it lies in."""
        self._run, self._number, self.slab = data, -1, slab
        self.nbytes, self.address = data.nbytes, data.data_ptr()

    @classmethod
    def all_of(cls, run: torch.Tensor, slab: Slab | None) -> list[Page]:
        """The pages [pages, 2, PAGE, kv_heads, row] that lie behind each other. A tensor for each is made when it is
        asked for: to make them all would cost a capture more than its copies, and so would asking torch for the size
        and the address of each."""
        count, start, pages = run.shape[0], run.data_ptr(), list[Page]()
        nbytes = run.nbytes // max(1, count)
        for number in range(count):
            page = cls.__new__(cls)
            page._run, page._number, page.slab = run, number, slab
            page.nbytes, page.address = nbytes, start + number * nbytes
            pages.append(page)
        return pages

    @property
    def data(self) -> torch.Tensor:
        return self._run if self._number < 0 else self._run[self._number]

    @property
    def pinned(self) -> bool:
        """A GPU of this process can read it where it lies."""
        return self.slab is not None and self.slab.pinned


DRAFTER_LAYER = (1 << 16) - 1  # the number of a drafter's part, which stands behind those of the layers
TAIL = "tail"  # of a paged layer: the rows of the page that is still open, [2, rows, kv_heads, row], 0 <= rows < PAGE


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one layer, or the drafter, holds: named tensors and, of a paged layer, the sealed pages before its tail.

    The names and shapes are the layer's own (`layers/`), which checks them when the part is restored. Only a paged
    layer has a tensor called "tail"; any other kind holds as much whatever the position.
    """

    layer: int
    tensors: Mapping[str, torch.Tensor]
    pages: tuple[Page, ...] = ()
    ready: Ready | None = None  # of all the part holds, pages too; None: complete

    def __post_init__(self) -> None:
        assert self.is_paged or not self.pages, f"layer {self.layer} has pages and no tail"

    @property
    def is_paged(self) -> bool:
        return TAIL in self.tensors

    @property
    def position(self) -> int | None:
        """How many positions the pages and the tail hold; None of a layer without pages."""
        return len(self.pages) * PAGE + self.tensors[TAIL].shape[1] if self.is_paged else None

    @property
    def own_bytes(self) -> int:
        """Beside the sealed pages, which others may share."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def copies_done(parts: Iterable[Part]) -> bool:
    """Whether `wait_for` returns, or raises, without a wait."""
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
    how: str  # prefill (alone in its batch), batched (prefill beside others), decode, verify (drafted blocks)
    cuts: tuple[int, ...] = ()  # prefill: chunk edges inside the stretch that do not lie on the grid


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """All state after `tokens`. Its key is its tokens, so a key is exactly as long as its state (law 1)."""

    tokens: np.ndarray  # int32 [position]
    parts: tuple[Part, ...]  # one per layer, ascending; then a drafter's, if one was there and had read the tokens
    logits: torch.Tensor | None  # [vocab] float32 after the last token; None where no logits were computed
    grid: int  # chunk grid of the prefill that made it
    stretches: tuple[Stretch, ...]  # tile [0, position)
    namespace: str = ""  # whose it is; the key is (namespace, tokens)

    def __post_init__(self) -> None:
        for part in self.parts:
            if part.position not in (self.position, None):
                raise SnapshotMismatch(
                    f"layer {part.layer} holds {part.position} positions, the snapshot's key is {self.position} long"
                )

    @property
    def position(self) -> int:
        return len(self.tokens)

    @property
    def own_bytes(self) -> int:
        """Bytes that no other snapshot of the chain can share: all but the sealed pages."""
        logits = self.logits.nbytes if self.logits is not None else 0
        return sum(part.own_bytes for part in self.parts) + logits + self.tokens.nbytes


class StateHolder(Protocol):
    """The verbs of everything that holds sequence state: a stage, local or remote."""

    def open(self, slot: int) -> None:
        """Before a sequence runs in the slot, unless its state is restored there."""
        ...

    def close(self, slot: int) -> None: ...
    def capture(self, slot: int) -> Sequence[Part]: ...
    def restore(self, slot: int, position: int, parts: Sequence[Part]) -> None: ...
    def rewind(self, slot: int, position: int) -> None: ...

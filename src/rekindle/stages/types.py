"""What a stage answers. The engine and the pipeline know this and nothing about where layers live."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from rekindle.batch import Ask, Batch
from rekindle.snapshots.types import Part, StateHolder
from rekindle.spec import Span


@dataclass(frozen=True, slots=True, eq=False)
class PendingTokens:
    """Tokens that a step before drew on the device, or that a drafter drafted there: row rows[i] of the batch takes
    tokens[sources[i]]."""

    tokens: torch.Tensor  # int64, on the device of the last stage
    rows: tuple[int, ...]
    sources: tuple[int, ...]

    def runs(self) -> list[tuple[int, int, int]]:
        """Rows and sources that follow one another: where each run begins, and how long it is."""
        found = list[tuple[int, int, int]]()
        for row, source in zip(self.rows, self.sources, strict=True):
            first, its_source, count = found[-1] if found else (row + 1, source, 0)
            if (row, source) == (first + count, its_source + count):
                found[-1] = first, its_source, count + 1
            else:
                found.append((row, source, 1))
        return found

    def of_rows(self, rows: range) -> PendingTokens | None:
        """Those of a portion of the batch, whose rows are counted from its first."""
        pairs = [(row - rows.start, source) for row, source in zip(self.rows, self.sources, strict=True) if row in rows]
        return PendingTokens(self.tokens, *map(tuple, zip(*pairs, strict=True))) if pairs else None


@dataclass(frozen=True, slots=True)
class StageOutput:
    """The residual stream for the next stage, or logits from the last one."""

    hidden: torch.Tensor | None  # [rows, hidden], None from the last stage
    logits: torch.Tensor | None  # [batch.logit_rows, vocab] float32, None from all but the last
    skipping: frozenset[int] = frozenset()  # slots whose rows left out pages (sparse mode): approximations
    scores: torch.Tensor | None = None  # [batch.scored_rows, …] float32, beside the logits (scores.py)
    features: tuple[torch.Tensor, ...] = ()  # [batch.feature_rows, hidden] of every tap of the stages so far


@dataclass(frozen=True, slots=True)
class PageCount:
    """Pages of one stage's pool. free + used = total, always."""

    free: int
    used: int
    total: int
    here: int | None = None  # of the free ones, those on the device: others are had by sending pages to the host
    slot: int = 0  # of those, as many are in the memory of a slot, and go when a sequence comes into it

    @property
    def at_once(self) -> int:
        """Free pages that nobody else's has to leave the device for."""
        return self.free if self.here is None else self.here


@runtime_checkable
class BeginsCapture(Protocol):
    """A holder of state that can be captured in two steps."""

    def begin_capture(self, slot: int) -> Callable[[], Sequence[Part]]:
        """The slot may go on at once. What is called later, on the same thread, does the greater part of the work."""
        ...


@runtime_checkable
class InProcess(Protocol):
    """A stage of this process, which says how it has worked and what went wrong."""

    def work(self) -> Counter[str]:
        """Since the start, by "kind:how": step, experts, swaps, pages."""
        ...

    def has_room_for_capture(self, others: int = 0) -> bool:
        """Whether a capture, and so many others behind it, would not wait until earlier ones are on the host."""
        ...

    def poll_experts(self) -> None:
        """Between forwards: finishes the expert swaps under way, and raises what has become known of the last forwards,
        such as CPU threads that are lost."""
        ...


@runtime_checkable
class Recoverable(Protocol):
    """A stage that can be lost, and brought back with every slot empty."""

    @property
    def lost(self) -> str | None: ...
    def recover(self) -> None:
        """Bring it back inside its deadline, or raise StageLost."""
        ...


@runtime_checkable
class TwoPhaseRestore(Protocol):
    """A stage that can check a restore completely before it changes anything.

    `prepare_restore` raises if the parts do not fit, and leaves the slot as it is either way. `commit_restore` adopts
    what was prepared and has no reason left to fail but the loss of the stage. `abort_restore` drops it; without a
    prepared restore it does nothing, so the caller need not know how far each stage came.
    """

    def prepare_restore(self, slot: int, position: int, parts: Sequence[Part]) -> None: ...
    def commit_restore(self, slot: int) -> None: ...
    def abort_restore(self, slot: int) -> None: ...


class Stage(StateHolder, Protocol):
    """A span of layers on a device: local, in another process, or on another machine."""

    @property
    def span(self) -> Span: ...
    @property
    def slots(self) -> int: ...
    @property
    def device(self) -> str: ...
    def forward(
        self, batch: Batch, hidden: torch.Tensor | None, pending: PendingTokens | None = None
    ) -> StageOutput: ...
    def pages(self) -> PageCount: ...
    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class Unseen:
    """A block that is being verified: the host does not know yet what of it is accepted, and the device does."""

    slot: int
    position: int  # of its first token, the only one that the host knows
    drafted: int  # tokens behind that one, where the last pass left them
    drawn: torch.Tensor  # int64 [1 + drafted]: what the target draws after each of them
    ends: frozenset[int]  # tokens that end the answer: what is drawn behind one is not accepted


class FeatureReader(StateHolder, TwoPhaseRestore, Protocol):
    """A drafter with a state of its own for every slot, which it computes from features of the target's layers."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers, ascending."""
        ...

    @property
    def reach(self) -> int:
        """Positions before a block of which it reads features at most."""
        ...

    @property
    def longest(self) -> int:
        """Tokens that it proposes at most."""
        ...

    @property
    def chained(self) -> bool:
        """Whether a drafted token costs a pass of its own; else a block does."""
        ...

    def read(self, batch: Batch, features: Sequence[torch.Tensor], pending: PendingTokens | None) -> None:
        """The stages have run the batch; features: [batch.feature_rows, hidden] of every tap; pending: tokens of the
        batch that only the device knows."""
        ...

    def propose(self, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        """Tokens that may follow, for each; perhaps while it reads features of other slots."""
        ...

    @property
    def drafts_ahead(self) -> bool:
        """Whether it can leave its tokens on the device."""
        ...

    def propose_ahead(self, asks: Sequence[Ask]) -> torch.Tensor:
        """Where it can: int64 [asks, tokens of its longest block]; the next pass writes over them."""
        ...

    def propose_behind(self, block: Unseen) -> torch.Tensor | None:
        """Where it can, for the block that follows one which is being verified: [1, tokens], behind what the target
        accepts. None where it has to know more. The slot is read again after `note_behind`."""
        ...

    def note_behind(self, slot: int, position: int | None) -> None:
        """The target has accepted the tokens before `position`, as that pass has assumed; None: it has not."""
        ...

    def context(self, slot: int) -> range:
        """The positions that it knows features of."""
        ...


class UnderWay(Protocol):
    """A forward whose answer has not been taken yet."""

    def result(self) -> StageOutput: ...


@runtime_checkable
class Sending(Stage, Protocol):
    """A stage elsewhere: the next forward can be sent before the last one has come back. It runs them in order."""

    def submit(self, batch: Batch, hidden: torch.Tensor | None) -> UnderWay: ...

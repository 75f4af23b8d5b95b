"""A chunk whose layers run in sections: between two of them steps of other slots may run.

A chunk of a long prompt takes many times as long as a decode step. Shorter chunks would keep others' answers waiting
for less, but every chunk reads all weights; a chunk that pauses reads them once. All that the host keeps of it is
written down when it begins, pages included, so that others' steps find the stage as if it had run. Its pages must stay
where they are until its last section: whoever has to move pages has the rest of it run first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

from rekindle.batch import Batch
from rekindle.stages.graphs import Replay
from rekindle.stages.types import PendingTokens, StageOutput


class PausedForward:
    """Called on the thread that has begun it. What goes wrong in it is raised by `result` alone, for its owners: those
    who had it go on for their own sake are not concerned."""

    def __init__(
        self,
        batch: Batch,
        replay: Replay | None,
        finish: Callable[[], StageOutput],
        running: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """replay: None where it cannot pause: then it is finished at once. finish: gives the output, behind the last
        section. running: what all of it runs in."""
        self.slots = frozenset(segment.slot for segment in batch.segments)
        self.sections = 1 if replay is None else replay.left  # in all
        self._replay = replay
        self._finish = finish
        self._running = running
        self._output = finish() if replay is None else None
        self._error: Exception | None = None  # why there will be no output

    def then(self, follow: Callable[[StageOutput], StageOutput]) -> PausedForward:
        """The same, with more to do behind its last section."""
        if self._output is not None:
            self._output = follow(self._output)
        finish = self._finish
        self._finish = lambda: follow(finish())
        return self

    @property
    def left(self) -> int:
        """Sections that are still to be run."""
        return 0 if self._replay is None or self._error is not None else self._replay.left

    def go_on(self, sections: int) -> None:
        """Run so many more; behind the last one comes whatever belongs to the chunk's end."""
        if self._replay is None or not self.left:
            return
        try:
            with self._running():
                self._replay.go_on(sections)
                if not self._replay.left:
                    self._output = self._finish()
        except Exception as error:
            self._error = error

    def drop(self) -> None:
        """No section of it runs any more: its slot is given up."""
        self._error = RuntimeError("the chunk was dropped: its slot was closed before all of it had run")

    def result(self) -> StageOutput:
        self.go_on(self.left)
        if self._error is not None:
            raise self._error
        assert self._output is not None, "it has run"
        return self._output


@runtime_checkable
class Pausing(Protocol):
    """A stage that runs chunks in sections."""

    def can_pause(self, rows: int) -> bool:
        """Whether a chunk of so many rows would have several."""
        ...

    def begin(self, batch: Batch, pending: PendingTokens | None = None) -> PausedForward: ...

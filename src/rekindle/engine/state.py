"""Where a sequence stands, and what it holds only while it stands there.

    Waiting ⇄ Loading                     in line
       ↓ ↑
    Restoring ⇄ Preempted                 from the line into a slot
       ↓
    Prefilling → Decoding → Ending        in a slot
                              ↓
                            Ended         reached from every state

Pages run short: Prefilling or Decoding → Preempted. A stage is lost: Prefilling or Decoding → Waiting.
The roster (roster.py) makes every transition; `check_transition` refuses those that the table does not name.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from rekindle.prefix import Lookup
from rekindle.snapshots.types import Snapshot


class State:
    """One of those below."""

    __slots__ = ()


class InLine(State):
    """The sequence waits for a slot."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class InSlot(State):
    """The sequence owns a slot of the pipeline, which is closed when the sequence leaves it."""

    slot: int


@dataclass(frozen=True, slots=True, eq=False)
class Waiting(InLine):
    found: Lookup | None = None  # the index's answer, while pages are short; its hit is pinned


@dataclass(frozen=True, slots=True, eq=False)
class Loading(InLine):
    reading: Future[Lookup]  # a loader thread reads the snapshot from disk


@dataclass(frozen=True, slots=True, eq=False)
class Preempted(InLine):
    snapshot: Snapshot  # all state of a sequence that left its slot because pages were short


@dataclass(frozen=True, slots=True, eq=False)
class Restoring(InSlot):
    before: Waiting | Preempted  # where the sequence returns if pages are short or a stage is lost


@dataclass(frozen=True, slots=True, eq=False)
class Prefilling(InSlot):
    """Prompt tokens are left to run or to be collected."""


@dataclass(frozen=True, slots=True, eq=False)
class Decoding(InSlot):
    """The prompt is in the state; every step brings tokens of the answer."""


@dataclass(frozen=True, slots=True, eq=False)
class Ending(InSlot):
    """The client has its last event; a step that was launched before is not back yet."""


@dataclass(frozen=True, slots=True, eq=False)
class Ended(State):
    """Out of the line and out of its slot."""


LEGAL: dict[type[State], frozenset[type[State]]] = {
    Waiting: frozenset({Waiting, Loading, Restoring, Ended}),  # Waiting: with another answer of the index
    Loading: frozenset({Waiting, Ended}),
    Preempted: frozenset({Restoring, Ended}),
    Restoring: frozenset({Waiting, Preempted, Prefilling, Decoding, Ended}),
    Prefilling: frozenset({Decoding, Preempted, Waiting, Ended}),
    Decoding: frozenset({Ending, Preempted, Waiting, Ended}),
    Ending: frozenset({Ended}),
    Ended: frozenset(),
}


def check_transition(name: str, now: State, then: State) -> None:
    assert type(then) in LEGAL[type(now)], (
        f"request {name} is {type(now).__name__} and cannot become {type(then).__name__}, "
        f"only one of {sorted(state.__name__ for state in LEGAL[type(now)])}"
    )

"""What an answer's text turns out to be, event by event.

A streamed answer forwards the events, a whole one adds them up (`Answer`), so both say the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the client offers."""

    name: str
    schema: Mapping[str, Any] = field(default_factory=dict)  # JSON schema of its arguments


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The name of a call is known; its arguments follow."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next characters of a call's arguments, a JSON object when they are joined."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallDone:
    index: int


@dataclass(frozen=True, slots=True)
class CallBroken:
    """A call that had begun and does not read as one. `raw` is what the model wrote of it, so that nothing is lost."""

    index: int
    raw: str
    reason: str


@dataclass(frozen=True, slots=True)
class CallCut:
    """The answer's limit came inside a call that had begun. `raw` is what the model wrote of it."""

    index: int
    raw: str


@dataclass(frozen=True, slots=True)
class NotACall:
    """Text that opens like a call and is none; the text itself comes as Content."""

    reason: str


Event = Reasoning | Content | CallBegun | CallArguments | CallDone | CallBroken | CallCut | NotACall


@dataclass(slots=True)
class Call:
    index: int
    name: str
    arguments: str = ""  # JSON; of a call that was cut off, the beginning of it
    cut: str | None = None  # where the answer's limit came inside the call, what the model wrote of it


@dataclass(slots=True)
class Answer:
    """The sum of an answer's events."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # why something that looked like a call is text

    @property
    def ends_in_call(self) -> bool:
        """Whether its limit came inside a call."""
        return bool(self.calls) and self.calls[-1].cut is not None

    def add(self, events: Iterable[Event]) -> Answer:
        for event in events:
            self._add(event)
        return self

    def _add(self, event: Event) -> None:
        match event:
            case Reasoning(text):
                self.reasoning += text
            case Content(text):
                self.content += text
            case CallBegun(index, name):
                self.calls.append(Call(index, name))
            case CallArguments(_, text):
                self.calls[-1].arguments += text
            case CallBroken(_, raw, reason):
                self.calls.pop()
                self.content += raw
                self.notes.append(reason)
            case CallCut(_, raw):
                self.calls[-1].cut = raw
            case NotACall(reason):
                self.notes.append(reason)

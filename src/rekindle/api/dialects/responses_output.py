"""The output items of OpenAI's Responses API, and the events that tell a stream how they grow.

An item is added, its text comes in deltas, then it is done. Whole answers are the same items without the events.
"""

from __future__ import annotations

import base64
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

from rekindle.api.choice import Choice
from rekindle.api.dialects.base import Json
from rekindle.text import parsing
from rekindle.text.parsing.jsonish import whole

SEALED = "rekindle-reasoning:"  # how `encrypted_content` begins; base64 of the reasoning's text follows
CUSTOM_ARGUMENT = "input"  # of the function that a custom tool becomes


class OutputItem(ABC):
    """One item. Its text is all that grows."""

    id_prefix: ClassVar[str]

    def __init__(self, index: int, answer_id: str) -> None:
        self.index = index
        self.id = f"{self.id_prefix}_{answer_id}{index}"
        self.text = ""

    @abstractmethod
    def json(self, status: str) -> Json: ...

    @abstractmethod
    def _beginning(self) -> Iterator[Json]:
        """Events after the item was added and before its first delta."""

    @abstractmethod
    def _delta(self, text: str) -> Json: ...

    @abstractmethod
    def _end(self) -> Iterator[Json]:
        """Events after the last delta and before the item is done."""

    def open(self) -> Iterator[Json]:
        yield {"type": "response.output_item.added", "output_index": self.index, "item": self.json("in_progress")}
        yield from self._beginning()

    def grow(self, text: str) -> Iterator[Json]:
        self.text += text
        yield self._delta(text)

    def close(self, status: str) -> Iterator[Json]:
        yield from self._end()
        yield {"type": "response.output_item.done", "output_index": self.index, "item": self.json(status)}

    def _event(self, kind: str, **fields: object) -> Json:
        return {"type": f"response.{kind}", "item_id": self.id, "output_index": self.index, **fields}


class MessageItem(OutputItem):
    id_prefix = "msg"

    def json(self, status: str) -> Json:
        content = [] if status == "in_progress" else [self._part]
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    @property
    def _part(self) -> Json:
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    def _beginning(self) -> Iterator[Json]:
        yield self._event("content_part.added", content_index=0, part=self._part)

    def _delta(self, text: str) -> Json:
        return self._event("output_text.delta", content_index=0, delta=text, logprobs=[])

    def _end(self) -> Iterator[Json]:
        yield self._event("output_text.done", content_index=0, text=self.text, logprobs=[])
        yield self._event("content_part.done", content_index=0, part=self._part)


class ReasoningItem(OutputItem):
    """Reasoning as it was thought: the text is the item's content."""

    id_prefix = "rs"

    def __init__(self, index: int, answer_id: str, sealed: bool) -> None:
        """sealed: the text is repeated in `encrypted_content`, which some clients send back as the only thing."""
        super().__init__(index, answer_id)
        self._sealed = sealed

    def json(self, status: str) -> Json:
        item = {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": []}
        if status != "in_progress":
            item |= self._carried() | ({"encrypted_content": seal(self.text)} if self._sealed else {})
        return item

    def _carried(self) -> Json:
        return {"content": [self._part]}

    @property
    def _part(self) -> Json:
        return {"type": "reasoning_text", "text": self.text}

    def _beginning(self) -> Iterator[Json]:
        yield self._event("content_part.added", content_index=0, part=self._part)

    def _delta(self, text: str) -> Json:
        return self._event("reasoning_text.delta", content_index=0, delta=text)

    def _end(self) -> Iterator[Json]:
        yield self._event("reasoning_text.done", content_index=0, text=self.text)
        yield self._event("content_part.done", content_index=0, part=self._part)


class SummaryItem(ReasoningItem):
    """Reasoning for clients that ask for a summary: they show that field, and its text is the whole reasoning."""

    def _carried(self) -> Json:
        return {"summary": [self._part]}

    @property
    def _part(self) -> Json:
        return {"type": "summary_text", "text": self.text}

    def _beginning(self) -> Iterator[Json]:
        yield self._event("reasoning_summary_part.added", summary_index=0, part=self._part)

    def _delta(self, text: str) -> Json:
        return self._event("reasoning_summary_text.delta", summary_index=0, delta=text)

    def _end(self) -> Iterator[Json]:
        yield self._event("reasoning_summary_text.done", summary_index=0, text=self.text)
        yield self._event("reasoning_summary_part.done", summary_index=0, part=self._part)


class CallItem(OutputItem):
    """A call of a function; its text is the JSON of its arguments."""

    id_prefix = "fc"

    def __init__(self, index: int, answer_id: str, name: str, call_id: str) -> None:
        super().__init__(index, answer_id)
        self.name = name
        self.call_id = call_id

    def break_off(self, raw: str) -> Iterator[Json]:
        """It turned out to be no call. An item that was added must be done, so it ends incomplete, with what the model
        wrote for arguments: a client that would run it anyway finds no JSON there."""
        self.text = raw
        yield from self.close("incomplete")

    def json(self, status: str) -> Json:
        head = {"id": self.id, "type": "function_call", "status": status}
        return head | {"call_id": self.call_id, "name": self.name, "arguments": self.text}

    def _beginning(self) -> Iterator[Json]:
        yield from ()

    def _delta(self, text: str) -> Json:
        return self._event("function_call_arguments.delta", delta=text)

    def _end(self) -> Iterator[Json]:
        yield self._event("function_call_arguments.done", name=self.name, arguments=self.text)


class CustomCallItem(CallItem):
    """A call of a custom tool, whose one argument is a text. The item is shown when its JSON is complete: only then is
    the text known."""

    id_prefix = "ctc"

    @property
    def _input(self) -> str:
        given = whole(self.text or "{}").get(CUSTOM_ARGUMENT, "")
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)

    def json(self, status: str) -> Json:
        text = "" if status == "in_progress" else self._input
        head = {"id": self.id, "type": "custom_tool_call", "status": status}
        return head | {"call_id": self.call_id, "name": self.name, "input": text}

    def open(self) -> Iterator[Json]:
        yield from ()

    def grow(self, text: str) -> Iterator[Json]:
        self.text += text
        yield from ()

    def close(self, status: str) -> Iterator[Json]:
        yield from super().open()
        yield from super().close(status)

    def break_off(self, raw: str) -> Iterator[Json]:
        yield from ()

    def _end(self) -> Iterator[Json]:
        yield self._event("custom_tool_call_input.delta", delta=self._input)
        yield self._event("custom_tool_call_input.done", input=self._input)


class Output:
    """The items of one answer, made from what is found in its text."""

    def __init__(self, choice: Choice, custom: frozenset[str], summarised: bool, sealed: bool) -> None:
        """custom: names of tools that are custom ones; summarised: reasoning goes into the summary."""
        self._choice = choice
        self._custom = custom
        self._reasoning = SummaryItem if summarised else ReasoningItem
        self._sealed = sealed
        self._open: OutputItem | None = None
        self._count = 0  # of items begun; those of broken calls count, since a stream has shown them
        self.items: list[Json] = []

    def add(self, event: parsing.Event) -> Iterator[Json]:
        match event:
            case parsing.Reasoning(text):
                yield from self._text(self._reasoning, text)
            case parsing.Content(text):
                yield from self._text(MessageItem, text)
            case parsing.CallBegun(index, name):
                yield from self._close("completed")
                kind = CustomCallItem if name in self._custom else CallItem
                yield from self._begin(kind(self._count, self._choice.request_id, name, self._choice.call_id(index)))
            case parsing.CallArguments(_, text) if self._open is not None:
                yield from self._open.grow(text)
            case parsing.CallDone():
                yield from self._close("completed")
            case parsing.CallCut() if not isinstance(self._open, CustomCallItem):
                yield from self._close("incomplete")
            case parsing.CallBroken(raw=raw) | parsing.CallCut(raw=raw):  # of a custom call nothing has been shown
                yield from self._break_off(raw)
                yield from self._text(MessageItem, raw)

    def finish(self, status: str) -> Iterator[Json]:
        """status: of an item that the answer's end cuts off. An answer that says nothing is an empty message."""
        if self._open is None and not self.items:
            yield from self._begin(self._new(MessageItem))
        yield from self._close(status)

    def _break_off(self, raw: str) -> Iterator[Json]:
        assert isinstance(self._open, CallItem), "only a call that has begun can break"
        yield from self._open.break_off(raw)
        self._open = None

    def _text(self, kind: type[OutputItem], text: str) -> Iterator[Json]:
        if type(self._open) is not kind:
            yield from self._close("completed")
            yield from self._begin(self._new(kind))
        assert self._open is not None
        yield from self._open.grow(text)

    def _new(self, kind: type[OutputItem]) -> OutputItem:
        if issubclass(kind, ReasoningItem):
            return kind(self._count, self._choice.request_id, self._sealed)
        return kind(self._count, self._choice.request_id)

    def _begin(self, item: OutputItem) -> Iterator[Json]:
        self._open = item
        self._count += 1
        yield from item.open()

    def _close(self, status: str) -> Iterator[Json]:
        if self._open is None:
            return
        yield from self._open.close(status)
        self.items.append(self._open.json(status))
        self._open = None


def seal(text: str) -> str:
    """Reasoning in the form that clients keep without reading. Nothing is secret: the client has seen the text."""
    return SEALED + base64.b64encode(text.encode()).decode()


def unseal(sealed: str) -> str | None:
    """None for what another server sealed."""
    if not sealed.startswith(SEALED):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(SEALED), validate=True).decode()
    except ValueError:
        return None

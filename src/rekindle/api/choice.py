"""One answer on its way from the engine's events to text, and from text to reasoning, content and tool calls."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rekindle.api.ports import TextPort
from rekindle.engine.types import (
    CacheReport,
    Event,
    Failed,
    Finished,
    FinishReason,
    PromptLogprobs,
    Started,
    ThinkingLimit,
    Token,
    TokenLogprob,
)
from rekindle.prompt import Prompt
from rekindle.text import parsing
from rekindle.text.parsing.parser import THINK

LAST = 16  # tokens at a prompt's end among which a template opens the thinking


@dataclass(frozen=True, slots=True)
class TextDelta:
    """A stretch of one answer: the tokens that came, and the text that they complete."""

    index: int  # of the answer
    text: str = ""
    tokens: tuple[Token, ...] = ()
    offsets: tuple[int, ...] = ()  # for each token, how many characters of the answer lie before it
    ids: tuple[int, ...] = ()  # as `tokens`, and the stop token
    prompt_rows: tuple[TokenLogprob | None, ...] | None = None
    finish: FinishReason | None = None
    found: tuple[parsing.Event, ...] = ()  # what the text turned out to be; empty where nothing is looked for


def join(deltas: Iterable[TextDelta]) -> TextDelta:
    """Consecutive deltas of one answer as one."""
    deltas = list(deltas)
    return TextDelta(
        index=deltas[0].index,
        text="".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        offsets=tuple(offset for delta in deltas for offset in delta.offsets),
        ids=tuple(token for delta in deltas for token in delta.ids),
        prompt_rows=next((delta.prompt_rows for delta in deltas if delta.prompt_rows is not None), None),
        finish=deltas[-1].finish,
        found=tuple(event for delta in deltas for event in delta.found),
    )


class Choice:
    """Detokenizes one answer, cuts it at its stop strings and, with a parser, finds reasoning and calls in it."""

    def __init__(
        self,
        index: int,
        request_id: str,
        prompt: Prompt,
        seed: int,
        text: TextPort,
        stops: Sequence[str],
        parser: parsing.AnswerParser | None = None,
    ) -> None:
        self.index = index
        self.request_id = request_id
        self.prompt = prompt
        self.seed = seed
        self.ids: list[int] = []  # drawn so far, the stop token last
        self.text = ""  # shown so far, as the model wrote it
        self.answer = parsing.Answer()  # the sum of what was found in it
        self.reasoning_tokens = 0  # drawn before the thinking was closed, with the tags around it
        self.started: CacheReport | None = None  # what was restored, since the prompt has a slot
        self.limit: ThinkingLimit | None = None  # of its thinking
        self.finished: Finished | None = None
        self.ended = False  # finished or failed: there is nothing left to cancel
        self.ending: str | None = None  # how it ended, for the log
        self.first_token_at: float | None = None  # monotonic seconds
        self.last_token_at: float | None = None
        self._parser = parser
        self._call_ids: list[str] = []
        self._detokenizer = text.detokenizer()
        self._stop_text = text.stop_text(stops)
        self._length = 0  # characters that the tokens so far have made, shown or not

    def read(self, events: Sequence[Event]) -> TextDelta:
        deltas = [self._read_one(event) for event in events]
        delta = deltas[0] if len(deltas) == 1 else join([TextDelta(self.index), *deltas])
        self.ids += delta.ids
        self.text += delta.text
        self.answer.add(delta.found)
        return delta

    def _read_one(self, event: Event) -> TextDelta:
        if isinstance(event, Token):
            return self._read_token(event)
        match event:
            case Started():
                self.started = event.cache
            case PromptLogprobs():
                return TextDelta(self.index, prompt_rows=event.rows)
            case Finished(reason=FinishReason.CANCELLED) | Failed():
                self.ended = True
            case Finished():
                self.finished, self.ended = event, True
                text = self._visible(self._detokenizer.finish()) + self._stop_text.finish()
                ids = () if event.stop_token is None else (event.stop_token,)
                is_cut = event.reason is FinishReason.LENGTH
                found = (*self._parsed(text), *(self._parser.finish(is_cut) if self._parser is not None else ()))
                return TextDelta(self.index, text, ids=ids, finish=event.reason, found=found)
        return TextDelta(self.index)

    def _read_token(self, event: Token) -> TextDelta:
        offset = self._length
        was_thinking = self._is_thinking
        text = self._visible(self._detokenizer.push(event.token))
        found = self._parsed(text)
        self.reasoning_tokens += was_thinking or self._is_thinking
        return TextDelta(self.index, text, (event,), (offset,), (event.token,), found=found)

    def _visible(self, text: str) -> str:
        """The part of the text that is certain to lie before a stop string."""
        self._length += len(text)
        return self._stop_text.push(text)

    @property
    def _is_thinking(self) -> bool:
        return self._parser is not None and self._parser.is_thinking

    def _parsed(self, text: str) -> tuple[parsing.Event, ...]:
        return tuple(self._parser.push(text)) if self._parser is not None and text else ()

    @property
    def thinking_was_closed(self) -> bool:
        """By the server, because the budget was used up: the model's own closing is never in this place."""
        limit = self.limit
        if limit is None or not (limit.is_open or limit.begin in self.ids):
            return False
        spent = limit.budget + (0 if limit.is_open else self.ids.index(limit.begin) + 1)
        return tuple(self.ids[spent : spent + len(limit.close)]) == limit.close

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended it."""
        return self._stop_text.met

    def call_id(self, index: int) -> str:
        """Under which the client knows a call of this answer."""
        while len(self._call_ids) <= index:
            self._call_ids.append(f"call_{uuid.uuid4().hex[:24]}")
        return self._call_ids[index]

    @property
    def message(self) -> dict[str, Any]:
        """The answer as the message that templates read when the client sends it back (OpenAI's form)."""
        if self._parser is None:
            return {"role": "assistant", "content": self.text}
        message: dict[str, Any] = {"role": "assistant", "content": self.answer.content}
        if self.answer.reasoning:
            message["reasoning_content"] = self.answer.reasoning
        if self.answer.calls:
            message["tool_calls"] = [self._call(call) for call in self.answer.calls]
        return message

    def _call(self, call: parsing.Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": self.call_id(call.index), "type": "function", "function": function}

    @property
    def result(self) -> Finished:
        assert self.finished is not None, f"answer {self.index} is accounted for before it has finished"
        return self.finished


def tools_of(tools: Iterable[Mapping[str, Any]]) -> list[parsing.Tool]:
    """What a parser needs to know of tools in OpenAI's form; those without a name cannot be called."""
    functions = [tool.get("function") for tool in tools]
    named = [each for each in functions if isinstance(each, dict) and isinstance(each.get("name"), str)]
    return [parsing.Tool(each["name"], _schema_of(each)) for each in named]


def _schema_of(function: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = function.get("parameters")
    return schema if isinstance(schema, dict) else {}


def ends_in_thinking(prompt: Prompt, text: TextPort) -> bool:
    """Whether a template has opened the thinking for the answer: nothing but blanks follows the tag."""
    return tail_of(prompt, text).rstrip().endswith(THINK.encode())


def ends_behind_thinking(prompt: Prompt, text: TextPort) -> bool:
    """Whether a template has closed the thinking for the answer: there is to be none."""
    return tail_of(prompt, text).rstrip().endswith(b"</" + THINK.encode()[1:])


def tail_of(prompt: Prompt, text: TextPort) -> bytes:
    """The prompt's last few tokens, as text."""
    return b"".join(text.token_bytes(token) for token in prompt.tokens[-LAST:])

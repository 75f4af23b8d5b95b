"""Answers in Anthropic's form: a message of blocks, whole or as a stream of events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

from rekindle.api.choice import Choice
from rekindle.api.dialects.anthropic_body import MessagesBody, signature_of
from rekindle.api.errors import Fault, fault_of
from rekindle.api.generation import Generation
from rekindle.api.settings import Settings
from rekindle.api.sse import Silence, event
from rekindle.engine.types import FinishReason
from rekindle.text import parsing
from rekindle.text.parsing.jsonish import so_far, whole

Json = dict[str, Any]

# By status; 529 is Anthropic's own, for a server that has too much to do.
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
OVERLOADED = frozenset({"queue_full", "too_many_bodies"})  # codes


def error_status(fault: Fault) -> int:
    return 529 if fault.code in OVERLOADED else fault.status


def error_body(fault: Fault) -> Json:
    kind = ERROR_TYPES.get(error_status(fault), "invalid_request_error" if fault.status < 500 else "api_error")
    too_long = fault.code == "context_length_exceeded"  # in these words clients look for it
    message = f"prompt is too long: {fault.sizes or fault.message}" if too_long else fault.message
    return {"type": "error", "error": {"type": kind, "message": message}}


def named(value: Json) -> bytes:
    """An event under the name that its type is."""
    return b"event: " + value["type"].encode() + b"\n" + event(value)


class Blocks:
    """What an answer's events become: blocks that open, grow and close, one at a time."""

    def __init__(self, choice: Choice, hides_thinking: bool) -> None:
        self._choice = choice
        self._hides = hides_thinking
        self._index = -1
        self._kind: str | None = None  # of the open block
        self._thought = ""  # in the open block

    def events(self, found: Sequence[parsing.Event]) -> Iterator[Json]:
        for each in found:
            yield from self._event(each)

    def _event(self, found: parsing.Event) -> Iterator[Json]:
        match found:
            case parsing.Reasoning(text):
                yield from self._open("thinking", {"thinking": "", "signature": ""})
                self._thought += text
                if not self._hides:
                    yield self._delta({"type": "thinking_delta", "thinking": text})
            case parsing.Content(text) | parsing.CallBroken(raw=text):
                yield from self._open("text", {"text": ""})
                yield self._delta({"type": "text_delta", "text": text})
            case parsing.CallBegun(index, name):
                yield from self.close()
                yield from self._open("tool_use", {"id": self._choice.call_id(index), "name": name, "input": {}})
            case parsing.CallArguments(_, text):
                yield self._delta({"type": "input_json_delta", "partial_json": text})
            case parsing.CallDone() | parsing.CallCut():
                yield from self.close()

    def _open(self, kind: str, fields: Json) -> Iterator[Json]:
        if self._kind == kind:
            return
        yield from self.close()
        self._index += 1
        self._kind = kind
        yield {"type": "content_block_start", "index": self._index, "content_block": {"type": kind, **fields}}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def close(self) -> Iterator[Json]:
        if self._kind is None:
            return
        if self._kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": signature_of(self._thought, self._hides)})
            self._thought = ""
        self._kind = None
        yield {"type": "content_block_stop", "index": self._index}


def content_of(choice: Choice, hides_thinking: bool) -> list[Json]:
    """The blocks of a whole answer."""
    answer = choice.answer
    content: list[Json] = []
    if answer.reasoning:
        shown = "" if hides_thinking else answer.reasoning
        signature = signature_of(answer.reasoning, hides_thinking)
        content.append({"type": "thinking", "thinking": shown, "signature": signature})
    if answer.content:
        content.append({"type": "text", "text": answer.content})
    for call in answer.calls:
        arguments = _arguments(call)
        content.append({"type": "tool_use", "id": choice.call_id(call.index), "name": call.name, "input": arguments})
    return content


def _arguments(call: parsing.Call) -> Json:
    """Of a call that the limit cut off, what is whole of them, as Anthropic's own clients read its stream."""
    if call.cut is None:
        value = whole(call.arguments)
    else:
        try:
            value = so_far(call.arguments)
        except ValueError:  # it ends in a number that is too large so far
            return {}
    assert isinstance(value, dict), "arguments are an object"
    return value


def stop_reason(choice: Choice, reason: FinishReason) -> str:
    if reason is FinishReason.LENGTH:
        return "max_tokens"
    if choice.answer.calls:
        return "tool_use"
    return "end_turn" if choice.stopped_by is None else "stop_sequence"


class MessagesWriter:
    def __init__(self, body: MessagesBody, generation: Generation, settings: Settings) -> None:
        self._generation = generation
        self._choice = generation.choices[0]
        self._hides = body.hides_thinking
        self._ids = bool(body.return_token_ids)
        self._is_long = body.conversation.keep_seconds > 300
        self._patience = settings.heartbeat_seconds
        self._model = body.model or settings.models[0]
        self._ignored = body.ignored_fields + body.conversation.ignored_fields(generation.text)

    async def whole(self) -> Json:
        (answer,) = await self._generation.answers()
        assert answer.finish is not None, "a whole answer has finished"
        ending = self._ending(answer.finish)
        content = content_of(self._choice, self._hides)
        return self._message(content) | ending | {"usage": self._final_usage()} | self._report()

    async def events(self) -> AsyncIterator[bytes]:
        try:
            async for value in self._events():
                yield named(value)
        except Exception as error:
            yield named(error_body(fault_of(error)))

    async def _events(self) -> AsyncIterator[Json]:
        """The message starts when its prompt has a slot, since then it is known what was cached."""
        blocks, has_started, silence = Blocks(self._choice, self._hides), False, Silence(self._patience)
        async for deltas in self._generation.batches(self._patience):
            if not deltas or silence.is_long:
                silence.broken()
                yield {"type": "ping"}
            for delta in deltas:
                if not has_started and self._choice.started is not None:
                    has_started = True
                    yield {"type": "message_start", "message": self._message([]) | {"usage": self._first_usage()}}
                for value in blocks.events(delta.found):
                    silence.broken()
                    yield value
                if delta.finish is not None:
                    for value in blocks.close():
                        yield value
                    ending = {"delta": self._ending(delta.finish), "usage": self._final_usage()}
                    yield {"type": "message_delta", **ending} | self._report()
                    yield {"type": "message_stop"}

    def _message(self, content: list[Json]) -> Json:
        return {
            "id": f"msg_{self._choice.request_id}",  # the log has the same id
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _ending(self, finish: FinishReason) -> Json:
        reason = stop_reason(self._choice, finish)
        stopped_by = self._choice.stopped_by if reason == "stop_sequence" else None
        return {"stop_reason": reason, "stop_sequence": stopped_by}

    def _first_usage(self) -> Json:
        """What will be published is not known yet."""
        assert self._choice.started is not None, "a message starts with its prompt in a slot"
        return self._usage(len(self._choice.prompt.tokens), self._choice.started.restored, 0, 0)

    def _final_usage(self) -> Json:
        usage = self._generation.usage()
        return self._usage(usage.prompt, usage.cached, usage.published, usage.completion)

    def _usage(self, prompt: int, read: int, published: int, output: int) -> Json:
        """The prompt's tokens are read from snapshots, computed and kept in new ones, or only computed."""
        created = min(published, prompt - read)  # a snapshot at the answer's end covers more than the prompt
        by_ttl = (0, created) if self._is_long else (created, 0)
        return {
            "input_tokens": prompt - read - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": read,
            "cache_creation": dict(
                zip(("ephemeral_5m_input_tokens", "ephemeral_1h_input_tokens"), by_ttl, strict=True)
            ),
            "output_tokens": output,
            "service_tier": "standard",
        }

    def _report(self) -> Json:
        return {"rekindle": self._generation.report(self._ignored, self._ids)}

"""OpenAI's Responses API: `POST /v1/responses`.

Responses are not stored: `previous_response_id` is refused, and clients send what was said before as `input`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator
from functools import cached_property, partial
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rekindle.api.choice import TextDelta
from rekindle.api.dialects.base import Json, Service
from rekindle.api.dialects.openai import AnswerLimit, OpenAIDialect
from rekindle.api.dialects.responses_input import Messages, Tools, choice_of, tools_of
from rekindle.api.dialects.responses_output import Output
from rekindle.api.errors import fault_of
from rekindle.api.generation import Generation
from rekindle.api.keys import Client
from rekindle.api.parsing import MAX_TOOLS, Body, kind_of, parse, refuse
from rekindle.api.request import ClientRequest, Conversation
from rekindle.api.served import ServedModel
from rekindle.api.settings import Settings
from rekindle.api.sse import Silence, event
from rekindle.api.thinking import Thinking
from rekindle.engine.types import FinishReason
from rekindle.grammar import Grammar

# Known, and rightly without effect here: bookkeeping of hosted services, or true of this server anyway.
HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "client_metadata",
        "max_tool_calls",  # counts calls of tools that a hosted service runs itself
        "stream_options",
    }
)
KEPT_NOWHERE = "responses are not stored here; send the earlier items in input, as clients with store=false do"
SEALED_REASONING = "reasoning.encrypted_content"


class ReasoningOptions(Body):
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            refuse("text.format.schema", "is missing, and the type is json_schema")
        return self

    @property
    def grammar(self) -> Grammar | None:
        if self.schema_ is not None and self.type == "json_schema":
            return Grammar.of_schema(self.schema_, "text.format")
        return Grammar.of_any_object("text.format") if self.type == "json_object" else None


class ResponsesText(Body):
    format: TextFormat | None = None
    verbosity: str | None = None


class ResponsesBody(Body):
    model: str | None = None
    input: Any = None
    instructions: str | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    max_output_tokens: AnswerLimit | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: ResponsesText | None = None
    include: Annotated[list[str], Field(max_length=64, fail_fast=True)] | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    background: bool | None = None
    truncation: str | None = None
    prompt: Any = None

    @model_validator(mode="after")
    def _is_served_here(self) -> ResponsesBody:
        if self.previous_response_id is not None:
            refuse("previous_response_id", KEPT_NOWHERE)
        if self.conversation is not None:
            refuse("conversation", KEPT_NOWHERE)
        if self.background:
            refuse("background", "answers are given at once or streamed, none is kept for later")
        if self.prompt is not None:
            refuse("prompt", "prompt templates of a hosted service are not known here; send input")
        if not isinstance(self.input, str | list):
            refuse("input", f"must be a string or a list of items, got {kind_of(self.input)}")
        return self

    @cached_property
    def messages(self) -> Messages:
        messages = Messages()
        if self.instructions:
            messages.instruct_or_ask("system", self.instructions)
        if isinstance(self.input, str):
            messages.instruct_or_ask("user", self.input)
        else:
            for i, item in enumerate(self.input):
                messages.add(item, f"input[{i}]")
        if not messages.made:
            refuse("input", "has nothing in it to answer")
        return messages

    @cached_property
    def known_tools(self) -> Tools:
        return tools_of(self.tools or ())

    @cached_property
    def wanted_call(self) -> str | Json | None:
        return choice_of(self.tool_choice)

    @property
    def conversation_to_answer(self) -> Conversation:
        return Conversation(
            messages=self.messages.made,
            tools=self.known_tools.functions or None,
            template_options={"tool_choice": self.wanted_call} if self.wanted_call is not None else {},
            thinking=Thinking().with_effort(self._effort, "reasoning.effort"),
            callable_tools=self.wanted_call != "none",
            must_call=self._must_call,
            only_tool=self.wanted_call["function"]["name"] if isinstance(self.wanted_call, dict) else None,
            parallel_calls=self.parallel_tool_calls is not False,
        )

    @property
    def _must_call(self) -> bool:
        return self.wanted_call not in (None, "auto", "none")

    @property
    def _effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning is not None else None

    @property
    def format(self) -> TextFormat:
        return (self.text and self.text.format) or TextFormat(type="text")

    @property
    def includes_sealed_reasoning(self) -> bool:
        return SEALED_REASONING in (self.include or ())

    @property
    def ignored_fields(self) -> list[str]:
        """Fields with no effect here that the client may believe to have one."""
        ignored = [name for name in self.model_extra or {} if name not in HARMLESS]
        ignored += [f"include {each[:60]}" for each in self.include or () if each != SEALED_REASONING]
        if isinstance(self.tool_choice, dict) and self.tool_choice.get("type") == "allowed_tools":
            ignored.append("tool_choice.tools")
        if self.parallel_tool_calls is False and not self._must_call:
            ignored.append("parallel_tool_calls")
        if self.truncation == "auto":  # nothing is ever cut from the input
            ignored.append("truncation")
        if self.text is not None and self.text.verbosity is not None:
            ignored.append("text.verbosity")
        return ignored + self.known_tools.skipped + self.messages.ignored


class ResponsesWriter:
    """Writes the one answer of a generation."""

    def __init__(self, body: ResponsesBody, generation: Generation, settings: Settings) -> None:
        self._body = body
        self._generation = generation
        self._patience = settings.heartbeat_seconds
        self._silence = Silence(self._patience)
        (self._choice,) = generation.choices
        self._id = f"resp_{self._choice.request_id}"
        self._created = int(time.time())
        self._model = body.model or settings.models[0]
        self._ignored = body.ignored_fields + body.conversation_to_answer.ignored_fields(generation.text)
        summarised = body.reasoning is not None and body.reasoning.summary is not None
        custom = body.known_tools.custom
        self._output = Output(self._choice, custom, summarised, body.includes_sealed_reasoning)
        self._sent = 0  # events

    async def whole(self) -> Json:
        (answer,) = await self._generation.answers()
        for _ in self._grow(answer):
            pass
        return self._finished()

    async def events(self) -> AsyncIterator[bytes]:
        """The status line is sent by now, so an error can only be an event of the stream."""
        try:
            async for data in self._events():
                yield data
        except Exception as error:
            fault = fault_of(error)
            failure = {"code": fault.code or fault.type, "message": fault.message}
            yield self._event({"type": "response.failed", "response": self._response("failed", error=failure)})

    async def _events(self) -> AsyncIterator[bytes]:
        for kind in ("response.created", "response.in_progress"):
            yield self._event({"type": kind, "response": self._response("in_progress")})
        async for deltas in self._generation.batches(self._patience):
            for delta in deltas:
                for each in self._grow(delta):
                    yield self._event(each)
            if not deltas or self._silence.is_long:  # clients count the seconds between events, and a comment is none
                yield self._event({"type": "keepalive"})
        response = self._finished()
        yield self._event({"type": f"response.{response['status']}", "response": response})

    def _grow(self, delta: TextDelta) -> Iterator[Json]:
        for found in delta.found:
            yield from self._output.add(found)
        if delta.finish is not None:
            yield from self._output.finish(_status(delta.finish))

    def _event(self, value: Json) -> bytes:
        self._sent += 1
        self._silence.broken()
        return event({**value, "sequence_number": self._sent - 1}, value["type"])

    def _finished(self) -> Json:
        status = _status(self._choice.result.reason)
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        response = self._response(status, incomplete_details=details, usage=self._usage())
        report = self._generation.report(self._ignored, bool(self._body.return_token_ids))
        return response | {"completed_at": int(time.time()), "rekindle": report}

    def _usage(self) -> Json:
        usage = self._generation.usage()
        written = min(usage.published, usage.prompt - usage.cached)  # a snapshot may cover more than the prompt
        return {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": written},
            "output_tokens": usage.completion,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning},
            "total_tokens": usage.prompt + usage.completion,
        }

    def _response(self, status: str, **fields: Any) -> Json:
        body = self._body
        reasoning = body.reasoning or ReasoningOptions()
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model,
            "output": list(self._output.items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": body.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
            "tools": body.tools or [],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "metadata": {},
            **fields,
        }


def _status(reason: FinishReason) -> str:
    return "incomplete" if reason is FinishReason.LENGTH else "completed"


class OpenAIResponses(OpenAIDialect):
    path = base_path = "/v1/responses"

    def parse(self, data: bytes) -> ResponsesBody:
        body = parse(ResponsesBody, data)
        _ = body.messages, body.known_tools, body.wanted_call  # made on this thread; what is bad is refused here
        return body

    def request(self, body: ResponsesBody) -> ClientRequest:
        sampling = {"temperature": body.temperature, "top_p": body.top_p}
        return ClientRequest(
            source=body.conversation_to_answer,
            prompt_field="input",
            model=body.model,
            sampling={name: value for name, value in sampling.items() if value is not None},
            max_tokens=body.max_output_tokens,
            grammar=body.format.grammar,
            stream=bool(body.stream),
        )

    def routes(self, service: Service) -> list[Route]:
        async def count(request: Request) -> Response:
            client: Client = request.state.client
            tokens = await service.work(request, self.parse, partial(self._count, namespace=client.namespace))
            return JSONResponse({"object": "response.input_tokens", "input_tokens": tokens})

        return [*super().routes(service), Route(f"{self.path}/input_tokens", count, methods=["POST"])]

    def _count(self, body: ResponsesBody, model: ServedModel, namespace: str) -> int:
        (prompt,) = self.request(body).source.render(model.text.beyond_context, namespace)
        return len(prompt.tokens)

    def writer(self, body: ResponsesBody, generation: Generation, settings: Settings) -> ResponsesWriter:
        return ResponsesWriter(body, generation, settings)

"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Any, Literal, cast

from pydantic import (
    Field,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from rekindle.api.choice import Choice, TextDelta
from rekindle.api.dialects.base import Json
from rekindle.api.dialects.openai import AnswerLimit, OpenAIBody, OpenAIDialect, OpenAIWriter
from rekindle.api.dialects.openai_logprobs import chat_logprobs, rows_of
from rekindle.api.generation import Generation
from rekindle.api.parsing import MAX_MESSAGES, MAX_TOOLS, Body, kind_of, parse, refuse
from rekindle.api.ports import TextPort
from rekindle.api.request import ClientRequest, Conversation
from rekindle.api.settings import Settings
from rekindle.api.thinking import Thinking
from rekindle.engine.types import FinishReason
from rekindle.text import parsing


def _as_sent(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check a value and keep it untouched: the template must see the keys in the client's order."""
    check(value)
    return value


class ChatMessage(Body):
    """One message; what else it holds (tool_calls, name, reasoning_content …) is the template's to read."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, Field(validate_default=True)] = None

    @field_validator("content")
    @classmethod
    def _content_is_text(cls, content: Any, info: ValidationInfo) -> Any:
        role = info.data.get("role", "assistant")  # a bad role is refused under its own name
        if content is None and role != "assistant":
            raise ValueError(f"only an assistant's message may have none, not a {role}'s")
        if not isinstance(content, str | list | None):
            raise ValueError(f"must be a string or a list of parts, got {kind_of(content)}")
        for part in content if isinstance(content, list) else ():
            _check_part(part)
        return content


def _check_part(part: Any) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise ValueError("a part must be an object with a type")
    if part["type"] != "text":
        raise ValueError(f"parts of type {part['type'][:40]!r} are not supported, only 'text'")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"a text part needs a text, got {kind_of(part.get('text'))}")


class ChatTool(Body):
    type: Literal["function"]
    function: dict[str, Any]


class ChatBody(OpenAIBody):
    prompt_field = "messages"

    messages: Annotated[
        list[Annotated[ChatMessage, WrapValidator(_as_sent)]],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
    ]
    max_tokens: AnswerLimit | None = None
    max_completion_tokens: AnswerLimit | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: (
        Annotated[list[Annotated[ChatTool, WrapValidator(_as_sent)]], Field(max_length=MAX_TOOLS, fail_fast=True)]
        | None
    ) = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", "needs logprobs to be true")
        if not isinstance(self.tool_choice, str | dict | None):
            refuse("tool_choice", f"must be a string or an object, got {kind_of(self.tool_choice)}")
        if isinstance(self.tool_choice, str) and self.tool_choice not in ("none", "auto", "required"):
            refuse("tool_choice", f"must be none, auto, required or an object, got {self.tool_choice[:40]!r}")
        if self.continue_final_message:
            refuse("continue_final_message", "must not be true: answers are not continued (prefill)")
        if taken := set(self.chat_template_kwargs or {}) & {"messages", "tools", "add_generation_prompt"}:
            refuse("chat_template_kwargs", f"{min(taken)!r} has a field of its own")
        return self

    @property
    def answer_limit(self) -> int | None:
        """The newer name of max_tokens wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def conversation(self) -> Conversation:
        return Conversation(
            messages=cast(list[dict[str, Any]], self.messages),  # as sent
            tools=cast(list[dict[str, Any]], self.tools) if self.tools else None,
            template_options=self._template_options,
            thinking=self._thinking,
            add_generation_prompt=self.add_generation_prompt is not False,
            callable_tools=self.tool_choice != "none",
            must_call=self.tool_choice == "required" or isinstance(self.tool_choice, dict),
            only_tool=self._only_tool,
            parallel_calls=self.parallel_tool_calls is not False,
        )

    @property
    def reported_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def _thinking(self) -> Thinking:
        """A switch that the client wrote for the template counts before an effort."""
        thinking = Thinking().with_effort(self.reasoning_effort, "reasoning_effort")
        for on, field in (
            (self.enable_thinking, "enable_thinking"),
            ((self.chat_template_kwargs or {}).get("enable_thinking"), "chat_template_kwargs.enable_thinking"),
        ):
            if isinstance(on, bool):
                return replace(thinking, on=on, on_field=field)
        return thinking

    @property
    def _template_options(self) -> dict[str, Any]:
        options = dict(self.chat_template_kwargs or {})
        if self._thinking.on is not None:
            options.pop("enable_thinking", None)
        if self.tool_choice is not None:
            options.setdefault("tool_choice", self.tool_choice)
        return options

    @property
    def _only_tool(self) -> str | None:
        """The tool that tool_choice names."""
        match self.tool_choice:
            case {"function": {"name": str(name)}}:
                return name
            case {}:
                refuse("tool_choice", "an object must name a function: {'type': 'function', 'function': {'name': …}}")
        return None

    @property
    def ignored_fields(self) -> list[str]:
        """One call at a time is kept to only where a call is demanded."""
        several = self.parallel_tool_calls is False and bool(self.tools) and not self.conversation.must_call
        return super().ignored_fields + (["parallel_tool_calls"] if several else [])


class ChatFormat:
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, body: ChatBody, text: TextPort) -> None:
        self._text = text
        self._logprobs = bool(body.logprobs)
        self._ids = bool(body.return_token_ids)
        self.ignored_fields = body.conversation.ignored_fields(text)

    def opening(self, choice: Choice) -> Json:
        extra = {"prompt_token_ids": list(choice.prompt.tokens)} if self._ids else {}
        return self._chunk(choice, {"role": "assistant", "content": ""}) | extra

    def chunks(self, choice: Choice, delta: TextDelta) -> Iterator[Json]:
        wants = bool(delta.tokens and self._logprobs) or bool(delta.ids and self._ids)
        reports = self._reports(delta) if wants else {}
        for piece in filter(None, (_delta_of(choice, event) for event in delta.found)):
            yield self._chunk(choice, piece) | reports
            reports = {}
        if reports:  # of tokens whose text is not known yet
            yield self._chunk(choice, {"content": ""}) | reports
        if delta.finish is not None:
            yield self._chunk(choice, {}) | {"finish_reason": _finish(choice, delta.finish)}

    def whole(self, choice: Choice, answer: TextDelta) -> Json:
        assert answer.finish is not None, "a whole answer has finished"
        message = choice.message | {"refusal": None}
        if choice.answer.calls and not choice.answer.content:
            message["content"] = None
        finish = _finish(choice, answer.finish)
        head = {"index": choice.index, "message": message, "logprobs": None, "finish_reason": finish}
        extra = {"prompt_token_ids": list(choice.prompt.tokens)} if self._ids else {}
        return head | self._reports(answer) | extra

    def _chunk(self, choice: Choice, delta: Json) -> Json:
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _reports(self, delta: TextDelta) -> Json:
        reports: Json = {}
        if self._logprobs:
            reports["logprobs"] = chat_logprobs(rows_of(delta), self._text)
        if self._ids:
            reports["token_ids"] = list(delta.ids)
        return reports


def _delta_of(choice: Choice, event: parsing.Event) -> Json | None:
    match event:
        case parsing.Content(text) | parsing.CallBroken(raw=text):
            return {"content": text}
        case parsing.Reasoning(text):
            return {"reasoning_content": text}
        case parsing.CallBegun(index, name):
            call = {"index": index, "id": choice.call_id(index), "type": "function"}
            return {"tool_calls": [call | {"function": {"name": name, "arguments": ""}}]}
        case parsing.CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    return None


def _finish(choice: Choice, reason: FinishReason) -> str:
    return "tool_calls" if choice.answer.calls and reason is FinishReason.STOP else reason.value


class OpenAIChat(OpenAIDialect):
    path = base_path = "/v1/chat/completions"

    def parse(self, data: bytes) -> ChatBody:
        return parse(ChatBody, data)

    def request(self, body: ChatBody) -> ClientRequest:
        return body.client_request(body.conversation)

    def writer(self, body: ChatBody, generation: Generation, settings: Settings) -> OpenAIWriter:
        return OpenAIWriter(body, ChatFormat(body, generation.text), generation, settings)

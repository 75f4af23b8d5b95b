"""The bodies of Ollama's API: options, messages, formats, and what they ask for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from rekindle.api.dialects.base import Json
from rekindle.api.parsing import LARGEST, MAX_MESSAGES, MAX_TOOLS, Body, Count, Stops, refuse
from rekindle.api.ports import TextPort
from rekindle.api.request import ClientRequest, Conversation, RawPrompts
from rekindle.api.thinking import Thinking
from rekindle.grammar import Grammar

# Options about how a model is loaded; the plan of this server has decided that.
LOADING = frozenset(
    {
        "num_gpu",
        "num_thread",
        "num_batch",
        "main_gpu",
        "use_mmap",
        "use_mlock",
        "numa",
        "low_vram",
        "f16_kv",
        "num_keep",
    }
)
SAMPLING = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repeat_penalty": "repetition_penalty",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
}  # option: the field of `Sampling`


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _at_least_0(value: Any) -> Any:
    """Below 0 is Ollama's word for "off"."""
    return max(0, value) if isinstance(value, int) and not isinstance(value, bool) else value


class Options(Body):
    num_predict: int | None = Field(None, ge=-2, le=LARGEST)  # 0 and below: no limit but the context
    num_ctx: int | None = Field(None, ge=0, le=LARGEST)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Annotated[Count | None, BeforeValidator(_at_least_0)] = None
    min_p: float | None = Field(None, ge=0, le=1)
    repeat_penalty: float | None = Field(None, ge=0.01, le=10)  # beyond, logits could overflow
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Annotated[Stops | None, BeforeValidator(_stops)] = None

    @property
    def sampling(self) -> dict[str, Any]:
        pairs = ((name, getattr(self, option)) for option, name in SAMPLING.items())
        return {name: value for name, value in pairs if value is not None}

    def ignored(self, context: int) -> list[str]:
        """Options with no effect here that the client may believe to have one."""
        names = [name for name, value in (self.model_extra or {}).items() if value is not None and name not in LOADING]
        too_large = ["num_ctx"] if (self.num_ctx or 0) > context else []
        return [f"options.{name[:60]}" for name in names + too_large]


class Function(Body):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class ToolCall(Body):
    id: str | None = None
    function: Function


class OllamaMessage(Body):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    def as_read(self) -> Json:
        """As templates read it."""
        message: Json = {"role": self.role, "content": self.content or ""}
        if self.thinking:
            message["reasoning_content"] = self.thinking
        if self.tool_calls:
            message["tool_calls"] = list(self._calls(self.tool_calls))
        if self.tool_name is not None:
            message["name"] = self.tool_name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message

    def _calls(self, calls: list[ToolCall]) -> Iterator[Json]:
        for call in calls:
            function = {"name": call.function.name, "arguments": call.function.arguments}
            yield {"type": "function", "function": function} | ({"id": call.id} if call.id is not None else {})


class OllamaBody(Body):
    """The fields that both routes share."""

    prompt_field: ClassVar[str]

    model: str | None = None
    stream: bool | None = None
    options: Options = Field(default_factory=lambda: Options.model_validate({}))
    format: Any = None
    think: Any = None

    @model_validator(mode="after")
    def _kinds_are_known(self) -> OllamaBody:
        if not isinstance(self.think, bool | str | None):
            refuse("think", "must be true, false or an effort such as 'low'")
        if not isinstance(self.format, dict) and self.format not in (None, "", "json"):
            refuse("format", "must be 'json' or a JSON schema")
        return self

    @property
    def only_loads(self) -> bool:
        """Nothing is asked: the client wants the model to be ready."""
        raise NotImplementedError

    @property
    def source(self) -> Conversation | RawPrompts:
        raise NotImplementedError

    @property
    def client_request(self) -> ClientRequest:
        limit = self.options.num_predict
        return ClientRequest(
            source=self.source,
            prompt_field=self.prompt_field,
            model=self.model,
            sampling=self.options.sampling,
            seed=self.options.seed,
            max_tokens=0 if self.only_loads else limit if limit is not None and limit > 0 else None,
            stop_strings=self.options.stop or (),
            grammar=self._grammar,
            stream=self.stream is not False,
        )

    @property
    def _grammar(self) -> Grammar | None:
        if isinstance(self.format, dict):
            return Grammar.of_schema(self.format, "format")
        return Grammar.of_any_object("format") if self.format == "json" else None

    @property
    def thinking(self) -> Thinking:
        if isinstance(self.think, str):
            return Thinking().with_effort(self.think, "think")
        return Thinking(on=self.think, on_field="think")

    def ignored_fields(self, context: int, text: TextPort) -> list[str]:
        """Fields with no effect here that the client may believe to have one."""
        source = self.source
        unheeded = source.ignored_fields(text) if isinstance(source, Conversation) else ["think"] * bool(self.think)
        return [*(self.model_extra or {}), *unheeded, *self.options.ignored(context)]


class OllamaChatBody(OllamaBody):
    prompt_field = "messages"

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] = Field(
        default_factory=list
    )
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _messages_are_text(self) -> OllamaChatBody:
        for i, message in enumerate(self.messages):
            if message.images:
                refuse(f"messages[{i}].images", "images are not supported, only text")
        return self

    @property
    def only_loads(self) -> bool:
        return not self.messages

    @property
    def source(self) -> Conversation | RawPrompts:
        messages = [message.as_read() for message in self.messages] or [{"role": "user", "content": ""}]
        return Conversation(messages, self.tools or None, thinking=self.thinking)


class GenerateBody(OllamaBody):
    prompt_field = "prompt"

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    images: list[Any] | None = None

    @model_validator(mode="after")
    def _is_served_here(self) -> GenerateBody:
        if self.suffix:
            refuse("suffix", "text cannot be filled in before a suffix, only continued")
        if self.template:
            refuse("template", "the model's own template is used; send raw=true and the whole prompt")
        if self.images:
            refuse("images", "are not supported, only text")
        return self

    @property
    def only_loads(self) -> bool:
        return not self.prompt

    @property
    def source(self) -> Conversation | RawPrompts:
        if self.raw:
            return RawPrompts([self.prompt or " "])
        system = [{"role": "system", "content": self.system}] if self.system else []
        return Conversation([*system, {"role": "user", "content": self.prompt}], thinking=self.thinking)

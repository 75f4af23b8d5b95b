"""The bodies of the two OpenAI routes: what a field may be, and which field a complaint is about.

A null field is an absent one. Types are strict: "1" is no number and 1 is no boolean.
Fields we do not know are accepted, because clients send novelties, and named in the answer's `ignored_fields`.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from rekindle.errors import BadRequest

MAX_CHOICES = 128  # answers in one response, over all its prompts
MAX_STOPS = 16

# Known, and rightly without effect here: bookkeeping of hosted services, or true of this server anyway.
HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
    }
)


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _biases(value: Any) -> Any:
    """JSON has string keys only; ours are token ids."""
    if not isinstance(value, dict):
        return value
    if bad := [key for key in value if not re.fullmatch(r"[0-9]{1,9}", key)]:
        raise ValueError(f"keys must be token ids, got {bad[0][:40]!r}")
    return {int(key): bias for key, bias in value.items()}


def _top_k(value: Any) -> Any:
    return 0 if value == -1 and not isinstance(value, bool) else value  # -1 is another server's word for "off"


Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Annotated[int, Field(ge=0)]
Stop = Annotated[str, Field(min_length=1, max_length=4096)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool | None = None


class ResponseFormat(_Body):
    type: str


class GenerationBody(_Body):
    """What both routes share."""

    prompt_field: ClassVar[str]  # where the prompt comes from, for complaints about it

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Annotated[int | None, BeforeValidator(_top_k), Field(ge=0)] = None
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)  # beyond, logits could overflow
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Annotated[list[Stop] | None, BeforeValidator(_stops), Field(max_length=MAX_STOPS)] = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[int, Bias] | None, BeforeValidator(_biases)] = None
    response_format: ResponseFormat | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _format_is_text(self) -> GenerationBody:
        if self.response_format is not None and self.response_format.type != "text":
            _refuse("response_format", f"{self.response_format.type!r} is not supported yet, only 'text'")
        return self

    @property
    @abstractmethod
    def answer_limit(self) -> int | None:
        """The most tokens the client wants; None if it did not say."""

    @property
    @abstractmethod
    def reported_logprobs(self) -> int | None:
        """How many alternatives to report beside each token of the answer; None reports nothing."""

    @property
    def reported_prompt_logprobs(self) -> int | None:
        return None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def ignored_fields(self) -> list[str]:
        """Fields with no effect here that the client may believe to have one."""
        ignored = [name for name in self.model_extra or {} if name not in HARMLESS]
        options = self.stream_options.model_extra if self.stream_options else None
        return ignored + [f"stream_options.{name}" for name in options or {}]


def _as_sent(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    """Check a value and keep it untouched: the template must see the keys in the client's order."""
    check(value)
    return value


class Message(_Body):
    """One message; what else it holds (tool_calls, name, reasoning_content …) is the template's to read."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Any, Field(validate_default=True)] = None

    @field_validator("content")
    @classmethod
    def _content_is_text(cls, content: Any, info: ValidationInfo) -> Any:
        role = info.data.get("role", "assistant")  # a bad role has its own complaint
        if content is None and role != "assistant":
            raise ValueError(f"only an assistant's message may have none, not a {role}'s")
        if not isinstance(content, str | list | None):
            raise ValueError(f"must be a string or a list of parts, got {_kind(content)}")
        for part in content if isinstance(content, list) else ():
            _check_part(part)
        return content


def _check_part(part: Any) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise ValueError("a part must be an object with a type")
    if part["type"] != "text":
        raise ValueError(f"parts of type {part['type'][:40]!r} are not supported, only 'text'")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"a text part needs a text, got {_kind(part.get('text'))}")


class Tool(_Body):
    type: Literal["function"]
    function: dict[str, Any]


class ChatBody(GenerationBody):
    prompt_field = "messages"

    messages: list[Annotated[Message, WrapValidator(_as_sent)]] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Annotated[Tool, WrapValidator(_as_sent)]] | None = None
    tool_choice: Any = None
    enable_thinking: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            _refuse("top_logprobs", "needs logprobs to be true")
        if not isinstance(self.tool_choice, str | dict | None):
            _refuse("tool_choice", f"must be a string or an object, got {_kind(self.tool_choice)}")
        if isinstance(self.tool_choice, str) and self.tool_choice not in ("none", "auto", "required"):
            _refuse("tool_choice", f"must be none, auto, required or an object, got {self.tool_choice[:40]!r}")
        if taken := set(self.chat_template_kwargs or {}) & {"messages", "tools", "add_generation_prompt"}:
            _refuse("chat_template_kwargs", f"{min(taken)!r} has a field of its own")
        return self

    @property
    def answer_limit(self) -> int | None:
        """The newer name of max_tokens wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def sent_messages(self) -> list[dict[str, Any]]:
        return cast(list[dict[str, Any]], self.messages)

    @property
    def sent_tools(self) -> list[dict[str, Any]] | None:
        return cast(list[dict[str, Any]], self.tools) if self.tools else None

    @property
    def reported_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template_kwargs(self) -> dict[str, Any]:
        kwargs = dict(self.chat_template_kwargs or {})
        if self.enable_thinking is not None:
            kwargs["enable_thinking"] = self.enable_thinking
        if self.tool_choice is not None:
            kwargs.setdefault("tool_choice", self.tool_choice)
        return kwargs

    @property
    def ignored_fields(self) -> list[str]:
        """A demand for a call reaches the template, but nothing makes the model obey it."""
        demanded = self.tool_choice not in (None, "auto", "none")
        return super().ignored_fields + (["tool_choice"] if demanded else [])


def _prompts(value: Any) -> Any:
    """One string or one list of token ids is a list of one prompt."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"must be a string, token ids, or a list of either, got {_kind(value)}")
    if not value:
        raise ValueError("must not be an empty list")
    if all(_is_token(item) for item in value):
        return [value]
    if all(isinstance(item, str) for item in value):
        return value
    if all(isinstance(item, list) and item and all(_is_token(token) for token in item) for item in value):
        return value
    raise ValueError("must hold only strings, only token ids, or only non-empty lists of token ids")


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class CompletionBody(GenerationBody):
    prompt_field = "prompt"

    prompt: Annotated[list[Any], BeforeValidator(_prompts), Field(max_length=MAX_CHOICES)]  # of str or list[int]
    max_tokens: int | None = Field(None, ge=0)  # 0 only scores the prompt
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1)
    logprobs: int | None = Field(None, ge=0, le=20)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> CompletionBody:
        if self.suffix:
            _refuse("suffix", "filling in the middle is not supported")
        if (self.best_of or 1) > 1:
            _refuse("best_of", "only 1 is supported; ask for n answers and choose")
        if self.prompt_logprobs is not None and self.stream:
            _refuse("prompt_logprobs", "is given in a whole answer only, not in a stream")
        if len(self.prompt) * (self.n or 1) > MAX_CHOICES:
            _refuse("n", f"{len(self.prompt)} prompts × {self.n} answers are more than {MAX_CHOICES}")
        return self

    @property
    def answer_limit(self) -> int | None:
        return self.max_tokens

    @property
    def reported_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def reported_prompt_logprobs(self) -> int | None:
        """Those asked for, and those an echo must show."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in asked if count is not None), default=None)


B = TypeVar("B", bound=GenerationBody)


def parse(kind: type[B], body: bytes) -> B:
    """A body of this kind, or BadRequest naming the first bad field."""
    value = _load(body)
    if not isinstance(value, dict):
        raise BadRequest(f"the body must be a JSON object, got {_kind(value)}")
    try:
        return kind.model_validate({name: field for name, field in value.items() if field is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        why = first["msg"].removeprefix("Value error, ")
        raise BadRequest(f"{_path(first['loc'])}: {why}", _field(first["loc"])) from None


def _load(body: bytes) -> Any:
    try:
        value = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None
    return _mend(value) if b"\\ud" in body.lower() else value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _mend(value: Any) -> Any:
    """Halves of surrogate pairs become U+FFFD. Agents cut text in the middle of an emoji, and no tokenizer takes it."""
    if isinstance(value, str):
        return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    if isinstance(value, list):
        return [_mend(item) for item in value]
    if isinstance(value, dict):
        return {_mend(key): _mend(item) for key, item in value.items()}
    return value


def _refuse(field: str, why: str) -> NoReturn:
    """A complaint about one field from a rule over several."""
    raise BadRequest(f"{field}: {why}", field)


def _path(loc: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") is messages[0].role"""
    name = ""
    for step in loc:
        name += f"[{step}]" if isinstance(step, int) else f".{step}" if name else step
    return name


def _field(loc: tuple[int | str, ...]) -> str:
    """The innermost named field: ("stop", 3) is stop"""
    while isinstance(loc[-1], int):
        loc = loc[:-1]
    return _path(loc)


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")

"""What the OpenAI routes have in common: fields of the body, the JSON around choices, errors, the list of models."""

from __future__ import annotations

import re
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any, ClassVar, Protocol

from pydantic import BeforeValidator, Field
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rekindle.api.cards import ModelCard, values_of
from rekindle.api.choice import Choice, TextDelta
from rekindle.api.dialects.base import Json, Service
from rekindle.api.dialects.openai_formats import ResponseFormat, StructuredOutputs, grammar_of
from rekindle.api.errors import Fault, fault_of
from rekindle.api.generation import Generation
from rekindle.api.model_host import ModelHost, Slot
from rekindle.api.parsing import LARGEST, MAX_BIASES, MAX_STOP_TOKENS, Body, Count, Stops
from rekindle.api.report import Usage
from rekindle.api.request import ClientRequest, Conversation, RawPrompts
from rekindle.api.settings import Settings
from rekindle.api.sse import EVENT_STREAM, HEARTBEAT, Silence, event

MAX_CHOICES = 128  # answers in one response, over all its prompts
DONE = b"data: [DONE]\n\n"

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
    }
)

SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
)  # of a body, under the names that `Sampling` has too


def _stops(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _biases(value: Any) -> Any:
    """Keys as token ids: in JSON they are strings."""
    if not isinstance(value, dict):
        return value
    if bad := [key for key in value if not re.fullmatch(r"[0-9]{1,9}", key)]:
        raise ValueError(f"keys must be token ids, got {bad[0][:40]!r}")
    return {int(key): bias for key, bias in value.items()}


def _top_k(value: Any) -> Any:
    return 0 if value == -1 and not isinstance(value, bool) else value  # -1 is another server's word for "off"


Bias = Annotated[float, Field(ge=-100, le=100)]
TokenId = Count
AnswerLimit = Annotated[int, Field(ge=1, le=LARGEST)]


class StreamOptions(Body):
    include_usage: bool | None = None


class OpenAIBody(Body):
    """The fields that the OpenAI routes share."""

    prompt_field: ClassVar[str]  # errors about the prompt name it

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Annotated[Count | None, BeforeValidator(_top_k)] = None
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)  # beyond, logits could overflow
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Annotated[Stops | None, BeforeValidator(_stops)] = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[int, Bias] | None, BeforeValidator(_biases), Field(max_length=MAX_BIASES)] = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    return_token_ids: bool | None = None

    @property
    @abstractmethod
    def answer_limit(self) -> int | None:
        """The most tokens that the client wants; None if it named no limit."""

    @property
    @abstractmethod
    def reported_logprobs(self) -> int | None:
        """How many alternatives to report beside each token of the answer; None reports nothing."""

    @property
    def reported_prompt_logprobs(self) -> int | None:
        return None

    def client_request(self, source: Conversation | RawPrompts) -> ClientRequest:
        return ClientRequest(
            source=source,
            model=self.model,
            prompt_field=self.prompt_field,
            n=self.n or 1,
            sampling={name: value for name in SAMPLING_FIELDS if (value := getattr(self, name)) is not None},
            seed=self.seed,
            max_tokens=self.answer_limit,
            stop_strings=self.stop or (),
            stop_token_ids=self.stop_token_ids or (),
            ignore_stop_tokens=bool(self.ignore_eos),
            logprobs=self.reported_logprobs,
            prompt_logprobs=self.reported_prompt_logprobs,
            stream=bool(self.stream),
            grammar=grammar_of(self.response_format, self.structured_outputs),
        )

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def ignored_fields(self) -> list[str]:
        """Fields with no effect here that the client may believe to have one."""
        ignored = [name for name in self.model_extra or {} if name not in HARMLESS]
        options = self.stream_options.model_extra if self.stream_options else None
        return ignored + [f"stream_options.{name}" for name in options or {}]


class ChoiceFormat(Protocol):
    """How one route writes its choices; `OpenAIWriter` writes what stands around them."""

    id_prefix: str
    object_name: str  # of a whole answer
    chunk_name: str  # of one event of a stream
    ignored_fields: list[str]  # of the body, that this model cannot heed

    def opening(self, choice: Choice) -> Json | None:
        """The chunk that opens one answer, before any token."""

    def chunks(self, choice: Choice, delta: TextDelta) -> Iterator[Json]:
        """What one delta becomes in a stream, each as the only choice of its event."""

    def whole(self, choice: Choice, answer: TextDelta) -> Json: ...


class OpenAIWriter:
    """Writes a generation as one JSON object or as a stream of events."""

    def __init__(self, body: OpenAIBody, form: ChoiceFormat, generation: Generation, settings: Settings) -> None:
        self._body = body
        self._format = form
        self._generation = generation
        self._patience = settings.heartbeat_seconds
        self._id = form.id_prefix + generation.choices[0].request_id  # the log has the same id
        self._created = int(time.time())
        self._model = body.model or settings.models[0]
        self._fingerprint = settings.system_fingerprint
        self._ignored = body.ignored_fields + form.ignored_fields

    async def whole(self) -> Json:
        answers = await self._generation.answers()
        choices = [self._format.whole(*pair) for pair in zip(self._generation.choices, answers, strict=True)]
        return self._frame(self._format.object_name, choices) | {"usage": self._usage()} | self._report()

    async def events(self) -> AsyncIterator[bytes]:
        """The status line is sent by now, so an error can only be an event of the stream."""
        try:
            async for data in self._events():
                yield data
        except Exception as error:
            yield event(error_body(fault_of(error)))
        yield DONE

    async def _events(self) -> AsyncIterator[bytes]:
        for choice in self._generation.choices:
            if (opening := self._format.opening(choice)) is not None:
                yield event(self._chunk(opening))
        silence = Silence(self._patience)
        async for deltas in self._generation.batches(self._patience):
            chunks = [
                self._chunk(choice)
                for delta in deltas
                for choice in self._format.chunks(self._generation.choices[delta.index], delta)
            ]
            if self._generation.done and not self._body.include_usage:
                chunks[-1] |= self._report()  # an answer's last chunk is its finish, and this is the last answer
            for chunk in chunks:
                silence.broken()
                yield event(chunk)
            if not deltas or silence.is_long:
                silence.broken()
                yield HEARTBEAT
        if self._body.include_usage:
            last = self._frame(self._format.chunk_name, []) | {"usage": self._usage()}
            yield event(last | self._report())

    def _chunk(self, choice: Json) -> Json:
        """With usage asked for, every chunk has the field, null until the last."""
        return self._frame(self._format.chunk_name, [choice]) | ({"usage": None} if self._body.include_usage else {})

    def _frame(self, object_name: str, choices: list[Json]) -> Json:
        return {
            "id": self._id,
            "object": object_name,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "choices": choices,
        }

    def _usage(self) -> Json:
        return usage_json(self._generation.usage())

    def _report(self) -> Json:
        return {"rekindle": self._generation.report(self._ignored)}


def usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning},
    }


def error_body(fault: Fault) -> Json:
    return {"error": {"message": fault.message, "type": fault.type, "param": fault.param, "code": fault.code}}


class OpenAIDialect:
    """What the dialects of the OpenAI routes inherit."""

    media_type = EVENT_STREAM

    def check(self, headers: Headers) -> None:
        """No header changes what this API means."""

    def error_status(self, fault: Fault) -> int:
        return fault.status

    def error_body(self, fault: Fault) -> Json:
        return error_body(fault)

    def routes(self, service: Service) -> list[Route]:
        models = _ModelList(service.models)
        return [Route("/v1/models", models.all), Route("/v1/models/{id:path}", models.one)]


class _ModelList:
    def __init__(self, models: ModelHost) -> None:
        self._models = models

    async def all(self, request: Request) -> Response:
        cards = [_card(name, slot) for slot in self._models.slots for name in slot.source.settings.models]
        return JSONResponse({"object": "list", "data": cards})

    async def one(self, request: Request) -> Response:
        name = request.path_params["id"]
        return JSONResponse(_card(name, self._models.exactly(name)))


def _card(name: str, slot: Slot) -> Json:
    settings = slot.source.settings
    return {
        "id": name,
        "object": "model",
        "created": settings.created,
        "owned_by": "rekindle",
        "context_length": settings.context,
        "max_model_len": settings.context,  # where vLLM's clients look
        "state": slot.state.value,
        "defaults": _defaults(settings.card),
    }


def _defaults(card: ModelCard) -> Json:
    """What holds for fields that a request leaves out."""
    direct = {} if card.direct is None else {"without_thinking": values_of(card.direct)}
    return values_of(card.sampling) | direct | {"max_tokens": card.max_tokens, "from": card.origin}

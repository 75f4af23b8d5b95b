"""Ollama's API: `POST /api/chat` and `POST /api/generate`, streamed as lines of JSON unless the client says otherwise,
and what its clients ask about models."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterable
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Generic, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rekindle.api.choice import Choice
from rekindle.api.dialects.base import Json, Service
from rekindle.api.dialects.ollama_body import GenerateBody, OllamaBody, OllamaChatBody
from rekindle.api.errors import Fault, UnknownModel, fault_of
from rekindle.api.generation import Generation
from rekindle.api.model_host import Slot
from rekindle.api.parsing import Body, parse
from rekindle.api.request import ClientRequest
from rekindle.api.settings import Settings
from rekindle.api.sse import Silence
from rekindle.text import parsing
from rekindle.text.parsing.jsonish import whole

SPOKEN = "0.13.0"  # the release whose API this is; clients ask for at least some release
NANOSECONDS = 1_000_000_000
FAR = "9999-12-31T23:59:59Z"

B = TypeVar("B", bound=OllamaBody)


class OllamaWriter:
    """Writes the one answer of a generation; subclasses say where its text goes."""

    def __init__(self, body: OllamaBody, generation: Generation, settings: Settings) -> None:
        self._body = body
        self._generation = generation
        self._patience = settings.heartbeat_seconds
        (self._choice,) = generation.choices
        self._model = body.model or settings.models[0]
        self._ignored = body.ignored_fields(settings.context, generation.text)

    @abstractmethod
    def _said(self, content: str = "", thinking: str = "", calls: list[Json] | None = None) -> Json:
        """What the answer says, as a part of a line."""

    async def whole(self) -> Json:
        await self._generation.answers()
        answer = self._choice.answer
        calls = [_call(self._choice, call) for call in answer.calls if call.cut is None]
        cut = "".join(call.cut for call in answer.calls if call.cut is not None)  # calls are sent whole, or as text
        if isinstance(self._body, GenerateBody) and self._body.raw:
            return self._line(self._said(self._choice.text)) | self._ending()
        return self._line(self._said(answer.content + cut, answer.reasoning, calls)) | self._ending()

    async def events(self) -> AsyncIterator[bytes]:
        """The status line is sent by now, so an error can only be a line of the stream."""
        try:
            async for line in self._lines():
                yield line
        except Exception as error:
            yield _encoded(error_body(fault_of(error)))

    async def _lines(self) -> AsyncIterator[bytes]:
        silence = Silence(self._patience)
        async for deltas in self._generation.batches(self._patience):
            for delta in deltas:
                said = [self._said(delta.text)] if delta.text and not self._generation.params.parses else []
                for part in (*said, *filter(None, map(self._part, delta.found))):
                    silence.broken()
                    yield _encoded(self._line(part))
            if not deltas or silence.is_long:
                silence.broken()
                yield _encoded(self._line(self._said()))  # clients parse every line, so an empty one would not do
        yield _encoded(self._line(self._said()) | self._ending())

    def _part(self, event: parsing.Event) -> Json | None:
        match event:
            case parsing.Content(text) | parsing.CallBroken(raw=text) | parsing.CallCut(raw=text):
                return self._said(text)
            case parsing.Reasoning(text):
                return self._said(thinking=text)
            case parsing.CallDone(index):
                # `answer` has read the whole batch; a call that is done stays in its place.
                call = next(call for call in self._choice.answer.calls if call.index == index)
                return self._said(calls=[_call(self._choice, call)])
        return None

    def _line(self, said: Json) -> Json:
        return {"model": self._model, "created_at": _now(), **said, "done": False}

    def _ending(self) -> Json:
        """What a request waits for its model to be loaded is in the total only: the load serves all who wait."""
        finished, timings = self._choice.result, self._choice.result.timings
        return {
            "done": True,
            "done_reason": "load" if self._body.only_loads else finished.reason.value,
            "total_duration": int((time.monotonic() - self._generation.arrived) * NANOSECONDS),
            "load_duration": 0,
            "prompt_eval_count": finished.prompt_tokens,
            "prompt_eval_duration": int(timings.prefill * NANOSECONDS),
            "eval_count": finished.completion_tokens,
            "eval_duration": int(timings.decode * NANOSECONDS),
            "rekindle": self._generation.report(self._ignored),
        }


class ChatWriter(OllamaWriter):
    def _said(self, content: str = "", thinking: str = "", calls: list[Json] | None = None) -> Json:
        message: Json = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = calls
        return {"message": message}


class GenerateWriter(OllamaWriter):
    def _said(self, content: str = "", thinking: str = "", calls: list[Json] | None = None) -> Json:
        return {"response": content} | ({"thinking": thinking} if thinking else {})


def _call(choice: Choice, call: parsing.Call) -> Json:
    function = {"index": call.index, "name": call.name, "arguments": whole(call.arguments or "{}")}
    return {"id": choice.call_id(call.index), "function": function}


def _now() -> str:
    return _spelt(datetime.now(UTC))


def _spelt(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def _encoded(line: Json) -> bytes:
    return json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def error_body(fault: Fault) -> Json:
    return {"error": fault.message}


class ShowBody(Body):
    model: str | None = None
    name: str | None = None  # what it was called before

    @property
    def wanted(self) -> str:
        return self.model or self.name or ""


class _Models:
    """What clients ask about the models that are served."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def tags(self, request: Request) -> Response:
        slots = self._service.models.slots
        return JSONResponse({"models": [_card(name, it) for it in _settings(slots) for name in it.models]})

    async def ps(self, request: Request) -> Response:
        """Those that are loaded."""
        host = self._service.models
        loaded = [(slot.source.settings, host.idle_left(slot)) for slot in host.slots if slot.served is not None]
        return JSONResponse(
            {"models": [_card(name, it) | _running(it, left) for it, left in loaded for name in it.models]}
        )

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": SPOKEN})

    async def show(self, request: Request) -> Response:
        """What the file says; the model need not be loaded for it."""
        body = await self._service.read(request, partial(parse, ShowBody))
        try:
            slot = self._service.models.exactly(body.wanted)
        except UnknownModel as error:  # clients look for these words
            raise UnknownModel(f"model not found: {error}") from error
        return JSONResponse(_shown(slot.source.settings))


def _settings(slots: Iterable[Slot]) -> list[Settings]:
    return [slot.source.settings for slot in slots]


def _shown(settings: Settings) -> Json:
    facts = settings.facts
    kinds = {"completion": True, "tools": "tools" in facts.template, "thinking": "think" in facts.template}
    return {
        "modelfile": "",
        "parameters": f"num_ctx {settings.context}",
        "template": facts.template,
        "details": _details(settings),
        "model_info": {
            "general.architecture": facts.architecture,
            "general.parameter_count": facts.parameters,
            f"{facts.architecture}.context_length": settings.context,
        },
        "capabilities": [kind for kind, holds in kinds.items() if holds],
        "modified_at": _modified(settings),
    }


def _running(settings: Settings, left: float | None) -> Json:
    """left: seconds until it is unloaded because nobody uses it; None: never. For another model it may go before."""
    return {
        "expires_at": FAR if left is None else _spelt(datetime.now(UTC) + timedelta(seconds=left)),
        "size_vram": 0,  # where the weights lie is the plan's to say
        "context_length": settings.context,
    }


def _modified(settings: Settings) -> str:
    return _spelt(datetime.fromtimestamp(settings.created, UTC))


def _details(settings: Settings) -> Json:
    facts = settings.facts
    return {
        "parent_model": "",
        "format": facts.format,
        "family": facts.architecture,
        "families": [facts.architecture],
        "parameter_size": f"{facts.parameters / 1e9:.1f}B",
        "quantization_level": facts.quantisation,
    }


def _card(name: str, settings: Settings) -> Json:
    return {
        "name": name,
        "model": name,
        "modified_at": _modified(settings),
        "size": settings.facts.nbytes,
        "digest": settings.fingerprint,
        "details": _details(settings),
    }


class OllamaDialect(Generic[B]):
    """What both routes have in common."""

    base_path = "/api"
    media_type = "application/x-ndjson"

    def check(self, headers: Headers) -> None:
        """No header changes what this API means."""

    def request(self, body: B) -> ClientRequest:
        return body.client_request

    def error_status(self, fault: Fault) -> int:
        return fault.status

    def error_body(self, fault: Fault) -> Json:
        return error_body(fault)

    def routes(self, service: Service) -> list[Route]:
        models = _Models(service)
        return [
            Route("/api/tags", models.tags),
            Route("/api/ps", models.ps),
            Route("/api/version", models.version),
            Route("/api/show", models.show, methods=["POST"]),
        ]


class OllamaChat(OllamaDialect[OllamaChatBody]):
    path = "/api/chat"

    def parse(self, data: bytes) -> OllamaChatBody:
        return parse(OllamaChatBody, data)

    def writer(self, body: OllamaChatBody, generation: Generation, settings: Settings) -> ChatWriter:
        return ChatWriter(body, generation, settings)


class OllamaGenerate(OllamaDialect[GenerateBody]):
    path = "/api/generate"

    def parse(self, data: bytes) -> GenerateBody:
        return parse(GenerateBody, data)

    def writer(self, body: GenerateBody, generation: Generation, settings: Settings) -> GenerateWriter:
        return GenerateWriter(body, generation, settings)

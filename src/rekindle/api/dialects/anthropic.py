"""Anthropic's messages: `POST /v1/messages`, `POST /v1/messages/count_tokens`, and `GET /v1/models` in their form."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rekindle.api.dialects import anthropic_writer
from rekindle.api.dialects.anthropic_body import MessagesBody, PromptBody
from rekindle.api.dialects.anthropic_writer import MessagesWriter
from rekindle.api.dialects.base import Json, Service
from rekindle.api.dialects.openai import OpenAIDialect
from rekindle.api.errors import Fault
from rekindle.api.generation import Generation
from rekindle.api.keys import Client
from rekindle.api.model_host import ModelHost
from rekindle.api.parsing import parse, refuse
from rekindle.api.request import ClientRequest
from rekindle.api.served import ServedModel
from rekindle.api.settings import Settings
from rekindle.api.sse import EVENT_STREAM

VERSION = "anthropic-version"
NEWEST = "2026-10-21"  # of the API's versions; what this one changed for the client's side is as it was here

Endpoint = Callable[[Request], Awaitable[Response]]


def check_version(headers: Headers) -> None:
    version = headers.get(VERSION)
    if version is None:
        return
    if not re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", version):
        refuse(VERSION, f"must be a date such as {NEWEST}, got {version[:40]!r}")
    if version > NEWEST:
        refuse(VERSION, f"{version} is not known here; the newest that is: {NEWEST}")


class AnthropicMessages:
    path = base_path = "/v1/messages"
    media_type = EVENT_STREAM

    def check(self, headers: Headers) -> None:
        check_version(headers)

    def parse(self, data: bytes) -> MessagesBody:
        return parse(MessagesBody, data)

    def request(self, body: MessagesBody) -> ClientRequest:
        return body.client_request

    def writer(self, body: MessagesBody, generation: Generation, settings: Settings) -> MessagesWriter:
        return MessagesWriter(body, generation, settings)

    def error_status(self, fault: Fault) -> int:
        return anthropic_writer.error_status(fault)

    def error_body(self, fault: Fault) -> Json:
        return anthropic_writer.error_body(fault)

    def routes(self, service: Service) -> list[Route]:
        """The list of models is OpenAI's too: a client of this API says so by its header."""
        ours = _ModelList(service.models)
        forms = {"/v1/models": ours.all, "/v1/models/{id:path}": ours.one}
        shared = [
            Route(route.path, _by_header(forms[route.path], route.endpoint))
            for route in OpenAIDialect().routes(service)
            if route.path in forms
        ]
        return [Route(f"{self.path}/count_tokens", _Counter(service).count, methods=["POST"]), *shared]


def _by_header(ours: Endpoint, other: Endpoint) -> Endpoint:
    async def choose(request: Request) -> Response:
        if VERSION not in request.headers:
            return await other(request)
        check_version(request.headers)
        return await ours(request)

    return choose


class _Counter:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def count(self, request: Request) -> Response:
        check_version(request.headers)
        client: Client = request.state.client
        count = partial(_count_tokens, namespace=client.namespace)
        return JSONResponse({"input_tokens": await self._service.work(request, partial(parse, PromptBody), count)})


def _count_tokens(body: PromptBody, model: ServedModel, namespace: str) -> int:
    (prompt,) = body.conversation.render(model.text.beyond_context, namespace)
    return len(prompt.tokens)


class _ModelList:
    def __init__(self, models: ModelHost) -> None:
        self._models = models

    async def all(self, request: Request) -> Response:
        names = self._models.names
        data = [_card(name, self._models.exactly(name).source.settings) for name in names]
        return JSONResponse({"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]})

    async def one(self, request: Request) -> Response:
        name = request.path_params["id"]
        return JSONResponse(_card(name, self._models.exactly(name).source.settings))


def _card(name: str, settings: Settings) -> Json:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(settings.created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": settings.context,
        "max_tokens": settings.context,
    }

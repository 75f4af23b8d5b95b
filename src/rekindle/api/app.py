"""The routes, and how one request goes through them."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

from anyio import to_thread
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from rekindle.api.answers import Answerer
from rekindle.api.dialects import Chat, Completion, Dialect
from rekindle.api.doors import CountingDoor, ErrorDoor, KeyDoor, read_body
from rekindle.api.errors import UnknownModel, fault_of
from rekindle.api.generation import Choice, Generation, make_order
from rekindle.api.history import History
from rekindle.api.metrics import Metrics
from rekindle.api.ports import EnginePort, TextPort
from rekindle.api.schema import ChatBody, CompletionBody, GenerationBody, parse
from rekindle.api.settings import Settings
from rekindle.api.sse import EventStream, unless_client_leaves
from rekindle.prompt import Prompt

B = TypeVar("B", bound=GenerationBody)

# The page holds its own style and script and talks to nobody but this server.
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)


def create_app(engine: EnginePort, text: TextPort, settings: Settings) -> Starlette:
    metrics = Metrics(engine)
    routes = Routes(engine, text, settings, metrics).table()
    doors = [Middleware(CountingDoor, metrics=metrics, routes=frozenset(route.path for route in routes))]
    if settings.allowed_origins:
        doors.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(settings.allowed_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
            )
        )
    doors.append(Middleware(ErrorDoor))
    if settings.api_key is not None:
        doors.append(Middleware(KeyDoor, api_key=settings.api_key))
    return Starlette(routes=routes, middleware=doors, exception_handlers={HTTPException: _http_error})


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own refusals; every other error goes on to the ErrorDoor."""
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        wording = {404: "there is no such path", 405: "this path does not take this method"}[error.status_code]
        error = HTTPException(error.status_code, f"{wording}: {request.method} {request.url.path}", error.headers)
    return fault_of(error).response()


class Routes:
    def __init__(self, engine: EnginePort, text: TextPort, settings: Settings, metrics: Metrics) -> None:
        self._engine = engine
        self._text = text
        self._settings = settings
        self._metrics = metrics
        self._history = History(engine, text, settings, metrics)
        self._page = (files("rekindle") / "web" / "index.html").read_text(encoding="utf-8")

    def table(self) -> list[Route]:
        return [
            Route("/", self.page),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{id:path}", self.model),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]

    async def page(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers={"Content-Security-Policy": PAGE_POLICY})

    async def health(self, request: Request) -> Response:
        status = self._engine.status()
        counts = {"running": status.running, "waiting": status.waiting, "slots": status.slots}
        if status.broken is not None:
            return JSONResponse({"status": "broken", "reason": status.broken, **counts}, status_code=503)
        return JSONResponse({"status": "ok", **counts})

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model_card(name) for name in self._settings.models]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["id"]
        if name not in self._settings.models:
            raise UnknownModel(f"the model {name!r} is not served here; served: {', '.join(self._settings.models)}")
        return JSONResponse(self._model_card(name))

    def _model_card(self, name: str) -> dict[str, Any]:
        context = self._settings.context
        return {
            "id": name,
            "object": "model",
            "created": self._settings.created,
            "owned_by": "rekindle",
            "context_length": context,
            "max_model_len": context,  # where vLLM's clients look
        }

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatBody, self._chat_prompts, Chat, self._history.finished)

    async def completions(self, request: Request) -> Response:
        return await self._answer(request, CompletionBody, self._completion_prompts, Completion)

    async def _chat_prompts(self, body: ChatBody) -> list[Prompt]:
        return [await to_thread.run_sync(self._render, body)]

    def _render(self, body: ChatBody) -> Prompt:
        generate = body.add_generation_prompt is not False
        return self._text.render(body.sent_messages, body.sent_tools, generate, **body.template_kwargs)

    async def _completion_prompts(self, body: CompletionBody) -> list[Prompt]:
        return await to_thread.run_sync(lambda: [self._prompt(each, body) for each in body.prompt])

    def _prompt(self, given: str | list[int], body: CompletionBody) -> Prompt:
        if isinstance(given, str):
            return self._text.encode(given, body.add_special_tokens is not False)
        return self._text.prompt_of(given)

    async def _answer(
        self,
        request: Request,
        kind: type[B],
        prompts_of: Callable[[B], Awaitable[list[Prompt]]],
        dialect_of: Callable[[B, TextPort], Dialect],
        on_finished: Callable[[B, Choice], None] | None = None,
    ) -> Response:
        arrived = time.monotonic()
        body = parse(kind, await read_body(request, self._settings.max_body_bytes))
        order = make_order(body, await prompts_of(body), self._text, self._settings)
        told = partial(on_finished, body) if on_finished is not None else None
        generation = Generation.start(self._engine, self._text, self._metrics, order, arrived, told)
        answerer = Answerer(body, dialect_of(body, self._text), generation, self._settings)
        if body.stream:
            return EventStream(answerer.events(), close=generation.close)
        try:
            return JSONResponse(await unless_client_leaves(request.receive, answerer.whole()))
        finally:
            generation.close()

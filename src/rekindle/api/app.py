"""The routes, and how one request goes through them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from importlib.resources import files
from typing import Any

from anyio import to_thread
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from rekindle.api.bodies import BodyReader
from rekindle.api.dialects import DIALECTS, error_response
from rekindle.api.dialects.base import Dialect, N, T
from rekindle.api.errors import Forbidden
from rekindle.api.events import Bell
from rekindle.api.generation import Generation
from rekindle.api.history import History
from rekindle.api.keys import Client
from rekindle.api.limits import Meter, Meters
from rekindle.api.metrics import Metrics
from rekindle.api.middleware import AuthMiddleware, CountingMiddleware, ErrorMiddleware, HostMiddleware, RestMiddleware
from rekindle.api.model_host import ModelHost
from rekindle.api.params import make_params
from rekindle.api.ports import TextPort
from rekindle.api.request import Conversation, RawPrompts
from rekindle.api.request_log import Listener, write_line
from rekindle.api.rules import is_constrained, rules_of
from rekindle.api.served import ServedModel
from rekindle.api.settings import Guard
from rekindle.api.sse import EventStream, unless_client_leaves
from rekindle.api.utilities import Utilities
from rekindle.hurry import give_way, let_pass
from rekindle.prompt import Prompt

OPEN_PATHS = ("/", "/health", "/ready")  # need no key
QUICK = 4 << 10  # bytes of a body that is parsed at once: the way to a worker thread and back takes five times as long

# The page holds its own style and script and connects to this server only.
PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)


def create_app(
    models: ModelHost,
    guard: Guard,
    dialects: Sequence[Dialect[Any]] = DIALECTS,
    listeners: Sequence[Listener] = (write_line,),
) -> Starlette:
    """listeners: told of every POST when it has ended."""
    metrics = Metrics(models)
    routes = Routes(models, guard, metrics).table(dialects)
    paths = frozenset(route.path for route in routes)
    around = [
        Middleware(RestMiddleware, most=guard.max_body),
        Middleware(CountingMiddleware, metrics=metrics, routes=paths, listeners=listeners),
    ]
    if guard.origins:
        around.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(guard.origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
            )
        )
    around.append(Middleware(ErrorMiddleware, dialects=dialects))
    hosts, origins = (frozenset(map(str.lower, names)) for names in (guard.hosts, guard.origins))
    around.append(Middleware(HostMiddleware, hosts=hosts, origins=origins))
    around.append(Middleware(AuthMiddleware, keys=guard.keys, guarded=_guarded_paths(routes)))
    handlers = {HTTPException: partial(_http_error, dialects=dialects)}
    return Starlette(routes=routes, middleware=around, exception_handlers=handlers)


def _guarded_paths(routes: Sequence[Route]) -> tuple[str, ...]:
    """Paths that begin like these need a key where there are keys: all but the page and the probes."""
    return tuple(dict.fromkeys("/" + route.path.split("/")[1] for route in routes if route.path not in OPEN_PATHS))


async def _http_error(request: Request, error: Exception, dialects: Sequence[Dialect[Any]]) -> Response:
    """Starlette's own refusals; every other error goes on to the ErrorMiddleware."""
    if isinstance(error, HTTPException) and error.status_code in (404, 405):
        wording = {404: "there is no such path", 405: "this path does not take this method"}[error.status_code]
        error = HTTPException(error.status_code, f"{wording}: {request.method} {request.url.path!r}", error.headers)
    return error_response(error, request.scope, dialects)


async def _parsed(parse: Callable[[bytes], T], data: bytes, meter: Meter) -> T:
    """On a worker thread where it may take long; a few at a time for each client."""
    if len(data) <= QUICK:
        return parse(data)
    return await to_thread.run_sync(parse, data, limiter=meter.threads)


async def _rendered(source: Conversation | RawPrompts, text: TextPort, namespace: str, meter: Meter) -> list[Prompt]:
    """The same."""
    if isinstance(source, RawPrompts) and source.are_few_ids:
        return source.render(text, namespace)

    def render() -> list[Prompt]:
        give_way()
        return source.render(text, namespace)

    return await to_thread.run_sync(render, limiter=meter.threads)


class Routes:
    def __init__(self, models: ModelHost, guard: Guard, metrics: Metrics) -> None:
        self.models = models
        self._metrics = metrics
        self._bodies = BodyReader(guard)
        self._meters = Meters()
        self._history = History(metrics)
        self._bell: Bell | None = None
        self._page = (files("rekindle") / "web" / "index.html").read_text(encoding="utf-8")

    def _bell_here(self) -> Bell:
        """One for all requests of an event loop; a server has one loop."""
        loop = asyncio.get_running_loop()
        if self._bell is None or self._bell.loop is not loop:
            self._bell = Bell(loop)
        return self._bell

    def table(self, dialects: Sequence[Dialect[Any]]) -> list[Route]:
        others = [route for dialect in dialects for route in dialect.routes(self)]
        return [  # looked through in order: those come first that are asked for most
            *(Route(dialect.path, partial(self.answer, dialect), methods=["POST"]) for dialect in dialects),
            Route("/", self.page),
            Route("/health", self.health),
            Route("/ready", self.ready),
            Route("/metrics", self.metrics),
            *Utilities(self).routes(),
            *{route.path: route for route in others}.values(),
        ]

    async def page(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers={"Content-Security-Policy": PAGE_POLICY})

    async def health(self, request: Request) -> Response:
        status = self.models.status()
        counts = {"running": status.running, "waiting": status.waiting, "slots": status.slots}
        if status.broken is not None:
            return JSONResponse({"status": "broken", "reason": status.broken, **counts}, status_code=503)
        return JSONResponse({"status": "ok", **counts})

    async def ready(self, request: Request) -> Response:
        """Whether the next request will get a right answer; /health says whether the process can go on at all."""
        status = self.models.status()
        reasons = {
            "the engine cannot run any more": status.broken is not None,
            "the model's file was changed": status.degraded is not None,
            "the server is stopping": status.draining or self.models.draining,
        }
        why = next((reason for reason, holds in reasons.items() if holds), None)
        if why is not None:  # details, with names of files, go to the log only: this route needs no key
            return JSONResponse({"status": "not ready", "reason": why}, status_code=503)
        return JSONResponse({"status": "ready"})

    async def metrics(self, request: Request) -> Response:
        client: Client = request.state.client
        if not client.sees_metrics:
            raise Forbidden(
                f"the key of {client.name} is not for the metrics: 'metrics = true' would make it so", "key"
            )
        return Response(self._metrics.page(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def read(self, request: Request, parse: Callable[[bytes], T]) -> T:
        client: Client = request.state.client
        with self._meters.of(client).visit() as meter:
            async with self._bodies.read(request, client) as data:
                return await _parsed(parse, data, meter)

    async def work(self, request: Request, parse: Callable[[bytes], N], job: Callable[[N, ServedModel], T]) -> T:
        client: Client = request.state.client
        with ExitStack() as until_done:
            meter = until_done.enter_context(self._meters.of(client).visit())
            async with self._bodies.read(request, client) as data:
                body = await _parsed(parse, data, meter)
            model = await self._model(body.model, request, until_done)
            return await to_thread.run_sync(job, body, model, limiter=meter.threads)

    async def _model(
        self, name: str | None, request: Request, until_done: ExitStack, held: AsyncExitStack | None = None
    ) -> ServedModel:
        """The model of this name, loaded, and kept so until the stack is closed.

        held: the body's share of the budget, given back if the model must be waited for: that may take minutes, and the
        line for models has its own end.
        """
        request.state.record.model = self.models.find(name).name
        lease = self.models.lease_at_once(name)
        if lease is None:
            if held is not None:
                await held.aclose()
            lease = await unless_client_leaves(request.receive, self.models.lease(name))
        until_done.callback(lease.release)
        return lease.model

    async def answer(self, dialect: Dialect[Any], request: Request) -> Response:
        arrived = time.monotonic()
        client: Client = request.state.client
        dialect.check(request.headers)
        with ExitStack() as until_answered:
            meter = until_answered.enter_context(self._meters.of(client).visit())
            async with AsyncExitStack() as held:
                data = await held.enter_async_context(self._bodies.read(request, client))
                await let_pass()  # of many requests that come at once the first is under way while others are read
                body = await _parsed(dialect.parse, data, meter)
                wanted = dialect.request(body)
                model = await self._model(wanted.model, request, until_answered, held)
                prompts = await _rendered(wanted.source, model.text, client.namespace, meter)
                rules = None
                if is_constrained(wanted):
                    rules = await to_thread.run_sync(rules_of, wanted, prompts[0], model.text, limiter=meter.threads)
            params = make_params(wanted, prompts, rules, model.text, model.settings, client)
            until_answered.enter_context(meter.more(len(prompts) * params.n - 1))
            meter.charge(sum(len(prompt.tokens) for prompt in prompts))
            on_finished = None
            if isinstance(wanted.source, Conversation):
                on_finished = partial(self._history.finished, model, wanted.source, wanted.n, client)
            generation = Generation.start(
                model.engine, model.text, self._metrics, params, arrived, self._bell_here(), on_finished
            )
            request.state.record.generation = generation
            until_answered.callback(lambda: meter.charge(generation.drawn))
            until_answered.callback(generation.close)
            writer = dialect.writer(body, generation, model.settings)
            if wanted.stream:
                return EventStream(writer.events(), dialect.media_type, close=until_answered.pop_all().close)
            return JSONResponse(await unless_client_leaves(request.receive, writer.whole()))

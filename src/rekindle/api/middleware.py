"""What every request passes on its way in and every answer on its way out. Plain ASGI, so that a stream stays one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from ipaddress import ip_address
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rekindle.api.bodies import SMALL
from rekindle.api.dialects import error_response
from rekindle.api.dialects.base import Dialect
from rekindle.api.errors import Forbidden, Unauthorized
from rekindle.api.keys import ANYONE, ApiKeys, Client
from rekindle.api.metrics import Metrics
from rekindle.api.request_log import Listener, RequestRecord
from rekindle.api.settings import HOST, ORIGIN

CLIENT_LEFT = 499  # the client closed the connection before a response began; the number is nginx's
REST_SECONDS = 5.0  # for the rest of a small body that nobody needs
NOT_OURS = (asyncio.CancelledError, KeyboardInterrupt, SystemExit, GeneratorExit)  # they end the task or the process


class CountingMiddleware:
    """Counts answers by route and status, and tells the listeners what became of each POST."""

    def __init__(
        self, app: ASGIApp, metrics: Metrics, routes: frozenset[str], listeners: Sequence[Listener] = ()
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes
        self._listeners = listeners

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, route = CLIENT_LEFT, self._route(scope["path"])
        record = scope.setdefault("state", {})["record"] = RequestRecord(route)

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._metrics.requests.labels(route, str(status)).inc()
            if scope["method"] == "POST":
                record.end(status, scope["state"].get("client", ANYONE).name)
                for listener in self._listeners:
                    listener(record)

    def _route(self, path: str) -> str:
        """Only our own names become labels: a client must not be able to make new ones."""
        if path in self._routes:
            return path
        return "/v1/models/{id}" if path.startswith("/v1/models/") else "other"


class ErrorMiddleware:
    """Gives every error an answer in the dialect of its path, as long as none has been begun."""

    def __init__(self, app: ASGIApp, dialects: Sequence[Dialect[Any]]) -> None:
        self._app = app
        self._dialects = dialects

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except ClientDisconnect:
            return  # there is no client to answer
        except NOT_OURS:
            raise
        except BaseException as error:  # a library in Rust panics with one that is no Exception
            if begun or scope["type"] != "http":
                raise
            await error_response(error, scope, self._dialects)(scope, receive, send)


class RestMiddleware:
    """Takes in what is left of a body before an answer begins that did not need it: a refusal for its key, path or
    rate. The connection could not be used again otherwise, and its client's next request would be lost."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        """most: bytes of a body that is taken in; with a longer one the connection ends."""
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        rest = _Rest(receive)

        async def after_the_body(message: Message) -> None:
            if message["type"] == "http.response.start" and (b"connection", b"close") not in message["headers"]:
                await rest.take_in(self._worth(Headers(scope=scope)))
            await send(message)

        await self._app(scope, rest.receive, after_the_body)

    def _worth(self, headers: Headers) -> int:
        """Bytes to take in. Chunks may be of one byte each, which costs more than a new connection."""
        if "expect" in headers:
            return 0  # the client sends nothing before it is told to
        length = headers.get("content-length", "")
        if length.isdigit():
            return int(length) if int(length) <= self._most else 0
        return SMALL


class _Rest:
    """What a client has not sent yet of its body."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._is_whole = False

    async def receive(self) -> Message:
        message = await self._receive()
        self._is_whole = not message.get("more_body", False)  # also where the client has left
        return message

    async def take_in(self, most: int) -> None:
        length = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(REST_SECONDS):
                while not self._is_whole and length < most:
                    length += len((await self.receive()).get("body", b""))


class HostMiddleware:
    """Refuses requests for unknown hosts and from pages of unknown origins.

    A page of another site may make the user's browser send requests to a server on the user's machine. Such a request
    carries the page's Origin; and after DNS rebinding, where the browser takes this server for the page's own, it
    carries the page's host name as Host. An address cannot be rebound, so hosts that are addresses are always allowed.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str], origins: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host = _only(headers, "host")
            if host is not None:  # HTTP/1.0 has none, and no browser speaks that
                self._check_host(host)
            self._check_origin(_only(headers, "origin"), host or "")
        await self._app(scope, receive, send)

    def _check_host(self, host: str) -> None:
        found = HOST.fullmatch(host)
        name = found[1].rstrip(".").lower() if found else None
        if name is None or not ("*" in self._hosts or name in self._hosts or _is_ours(name)):
            raise Forbidden(f"this server does not answer to the host {host[:80]!r}; --allow-host names more", "host")

    def _check_origin(self, origin: str | None, host: str) -> None:
        if origin is None or origin.lower() in self._origins or "*" in self._origins:
            return
        if not ORIGIN.fullmatch(origin) or origin.partition("://")[2].lower() != host.lower():
            raise Forbidden(f"pages of {origin[:80]!r} may not use this server; --allow-origin names more", "origin")


def _only(headers: Headers, name: str) -> str | None:
    """A header that may come once: of two, a proxy in front of us may have checked the one that we would not read."""
    values = headers.getlist(name)
    if len(values) > 1:
        raise Forbidden(f"the request has {len(values)} headers {name}", name)
    return values[0] if values else None


def _is_ours(name: str) -> bool:
    """Addresses, and names that no outside DNS server can rebind: those of one word, which only this network resolves,
    those below localhost, and the one by which containers call their host."""
    if "." not in name or name.endswith(".localhost") or name == "host.docker.internal":
        return True
    try:
        ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


class AuthMiddleware:
    """Finds the client of a request by its key. Paths that are not guarded, such as / and /health, need none."""

    def __init__(self, app: ASGIApp, keys: ApiKeys | None, guarded: tuple[str, ...]) -> None:
        """guarded: how paths begin that need a key where there are keys."""
        self._app = app
        self._keys = keys
        self._guarded = guarded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {})["client"] = self._client(scope)
        await self._app(scope, receive, send)

    def _client(self, scope: Scope) -> Client:
        if self._keys is None or not scope["path"].startswith(self._guarded):
            return ANYONE
        client = self._keys.find(_key_in(Headers(scope=scope)))
        if client is None:
            raise Unauthorized("a valid key is needed: send it as 'Authorization: Bearer …' or 'x-api-key: …'")
        return client


def _key_in(headers: Headers) -> bytes:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        key = headers.get("x-api-key", "")
    return key.strip().encode("latin-1")

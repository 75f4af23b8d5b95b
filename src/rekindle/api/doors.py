"""What every request passes on its way in and every answer on its way out. Plain ASGI, so that a stream stays one."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rekindle.api.errors import BodyTooLarge, Unauthorized, fault_of
from rekindle.api.metrics import Metrics

CLIENT_LEFT = 499  # no answer was sent because nobody was there; the number is nginx's
DRAIN_FACTOR = 4  # how many times the allowed size we read and throw away so that the client gets to see the refusal


class CountingDoor:
    """Counts answers by route and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_LEFT

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            self._metrics.requests.labels(self._route(scope["path"]), str(status)).inc()

    def _route(self, path: str) -> str:
        """Only our own names become labels: a client must not be able to make new ones."""
        if path in self._routes:
            return path
        return "/v1/models/{id}" if path.startswith("/v1/models/") else "other"


class ErrorDoor:
    """Gives every error an answer, as long as none has been begun."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except ClientDisconnect:
            return  # nobody to answer
        except Exception as error:
            if begun or scope["type"] != "http":
                raise
            await fault_of(error).response()(scope, receive, send)


class KeyDoor:
    """Lets nobody to the /v1 routes without the key. The page, health and metrics stay open."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1"):
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(key.strip().encode("latin-1"), self._key):
                raise Unauthorized("a valid key is needed: send it as 'Authorization: Bearer …'")
        await self._app(scope, receive, send)


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body, if it is not longer than allowed; nothing beyond that is kept."""
    kept = bytearray()
    length = 0
    async for data in request.stream():
        length += len(data)
        if length <= max_bytes:
            kept += data
        elif length > DRAIN_FACTOR * max_bytes:
            break
    if length > max_bytes:
        raise BodyTooLarge(f"the body is longer than the {max_bytes} bytes this server takes")
    return bytes(kept)

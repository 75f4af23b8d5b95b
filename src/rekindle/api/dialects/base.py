"""What a dialect is: one file that speaks one API over HTTP.

A dialect owns the schema of its bodies, the way from a body to a `ClientRequest`, the JSON of answers, streams and
errors, and its list of models. Everything between (limits, prompts, generation, metrics) is the same for all. Keys are
no part of it: `AuthMiddleware` takes them from `Authorization: Bearer` and from `x-api-key`, on every path.

To add one, write its file and name it in `DIALECTS`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol, TypeVar

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.routing import Route

from rekindle.api.errors import Fault
from rekindle.api.generation import Generation
from rekindle.api.model_host import ModelHost
from rekindle.api.parsing import Body
from rekindle.api.request import ClientRequest
from rekindle.api.served import ServedModel
from rekindle.api.settings import Settings

Json = dict[str, Any]
B = TypeVar("B", bound=Body)
T = TypeVar("T")


class ResponseWriter(Protocol):
    """Writes one generation, as a whole or as a stream; one of the two is called, once."""

    async def whole(self) -> Json:
        """The body of the response; raises what made the generation fail."""

    def events(self) -> AsyncIterator[bytes]:
        """The stream. It has begun with status 200, so errors are written into it."""


class NamesModel(Protocol):
    """A body that chooses a model."""

    @property
    def model(self) -> str | None: ...


N = TypeVar("N", bound=NamesModel)


class Service(Protocol):
    """What a dialect's other routes have of the server."""

    @property
    def models(self) -> ModelHost: ...

    async def read(self, request: Request, parse: Callable[[bytes], T]) -> T:
        """What `parse` makes of the request's body, on a worker thread and within the limits of its client."""

    async def work(self, request: Request, parse: Callable[[bytes], N], job: Callable[[N, ServedModel], T]) -> T:
        """What `job` makes of the request's body and of the model that the body names, which is loaded for it. Both run
        on worker threads and within the limits of the request's client."""


class Dialect(Protocol[B]):
    """B: the schema of its body."""

    path: str  # of its POST route
    base_path: str  # errors on this path and below it are written by this dialect
    media_type: str  # of its streams

    def check(self, headers: Headers) -> None:
        """Before the body is read. Raises BadRequest for a header that asks for what it does not speak."""

    def parse(self, data: bytes) -> B:
        """On a worker thread. Raises BadRequest naming the first bad field."""

    def request(self, body: B) -> ClientRequest: ...

    def writer(self, body: B, generation: Generation, settings: Settings) -> ResponseWriter: ...

    def error_status(self, fault: Fault) -> int: ...

    def error_body(self, fault: Fault) -> Json: ...

    def routes(self, service: Service) -> list[Route]:
        """Its other routes: which models there are, how many tokens a prompt has. Dialects may share a route."""

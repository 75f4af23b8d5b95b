"""Bodies on their way in: of the right type, no longer than allowed, in time, and not too many at once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import Request

from rekindle.api.errors import BodyTooLarge, BodyTooSlow, NotJson, TooManyBodies
from rekindle.api.keys import Client
from rekindle.api.settings import Guard

SMALL = 64 << 10  # bytes; a body up to here counts for nothing
SHARES = 4  # of the budget; a client with a key may hold one share, but always one body of the largest size
DRAIN_FACTOR = (
    4  # a body up to this many times the allowed size is read and thrown away, so that its client reads the refusal
)


class BodyReader:
    """Reads bodies. All bodies that are being read or parsed share one budget of bytes, which bounds their memory.

    Small ones cost nothing: the number of connections bounds them. A client with a key may hold its share of the budget
    and no more, so that slow bodies of one client do not keep out those of others.
    """

    def __init__(self, guard: Guard) -> None:
        self._largest = guard.max_body
        self._budget = guard.max_body * guard.bodies
        self._seconds = guard.body_seconds
        self._held: Counter[str] = Counter()  # bytes of bodies that are being read, parsed or rendered, by client

    @asynccontextmanager
    async def read(self, request: Request, client: Client) -> AsyncIterator[bytes]:
        """The body, which counts against the budget until the context is left."""
        _check_type(request)
        self._check_length(request)
        kept = bytearray()
        try:
            try:
                async with asyncio.timeout(self._seconds):
                    await self._fill(kept, request, client.name)
            except TimeoutError as error:
                raise BodyTooSlow(f"the body did not arrive within {self._seconds:g} seconds") from error
            yield bytes(kept)
        finally:
            self._held[client.name] -= _counted(len(kept))

    async def _fill(self, kept: bytearray, request: Request, name: str) -> None:
        length = 0
        async for data in request.stream():
            length += len(data)
            if length <= self._largest:
                self._hold(_counted(length) - _counted(len(kept)), name)
                kept += data
            elif length > DRAIN_FACTOR * self._largest:
                break
        if length > self._largest:
            raise self._too_large()

    def _hold(self, count: int, name: str) -> None:
        if count and self._held.total() + count > self._budget:
            held = self._held.total()
            raise TooManyBodies(f"bodies of {held} bytes are being read; the server takes {self._budget} at once")
        share = max(self._largest, self._budget // SHARES)
        if count and name and self._held[name] + count > share:
            raise TooManyBodies(f"bodies of {self._held[name]} bytes of {name}'s are being read, its share is {share}")
        self._held[name] += count

    def _check_length(self, request: Request) -> None:
        """A body whose declared length is far too long is not read at all."""
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and int(declared) > DRAIN_FACTOR * self._largest:
            raise self._too_large()

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(f"the body is longer than the {self._largest} bytes this server takes (--max-body)")


def _counted(length: int) -> int:
    """Bytes of the budget that a body of `length` bytes takes."""
    return length if length > SMALL else 0


def _check_type(request: Request) -> None:
    """A page of another site can send this type only after a CORS preflight, which Guard.origins decides."""
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        named = repr(given[:80]) if given else "missing"
        raise NotJson(f"the content-type must be application/json, it is {named}")

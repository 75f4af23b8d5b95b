"""Limits per client: requests and tokens per minute, answers at once. Used on the event loop only, so without locks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from anyio import CapacityLimiter

from rekindle.api.errors import RateLimited
from rekindle.api.keys import Client

MINUTE = 60.0
THREADS = 4  # in which a client's bodies are parsed, rendered and tokenised; further ones wait, while streams go on


class _Bucket:
    """A token bucket: full at the start, refilled evenly over a minute. A charge that is known only afterwards, such as
    an answer's length, may leave it in debt."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._left = float(per_minute)
        self._at = clock()

    def wait(self, wanted: float) -> float:
        """Seconds until the bucket holds `wanted`; 0 if it does."""
        now = self._clock()
        self._left = min(self._per_minute, self._left + (now - self._at) * self._per_minute / MINUTE)
        self._at = now
        return max(0.0, (wanted - self._left) * MINUTE / self._per_minute)

    def take(self, count: float) -> None:
        self._left -= count


class Meter:
    """One client's use."""

    def __init__(self, client: Client, clock: Callable[[], float]) -> None:
        self.threads = CapacityLimiter(THREADS)
        self._client = client
        self._running = 0  # answers
        self._requests = _Bucket(client.requests_per_minute, clock) if client.requests_per_minute else None
        self._tokens = _Bucket(client.tokens_per_minute, clock) if client.tokens_per_minute else None

    @contextmanager
    def visit(self) -> Iterator[Meter]:
        """One request, from before its body is read to the end of its answer; raises RateLimited at its start."""
        self._check_rates()
        with self.more(1):
            if self._requests is not None:
                self._requests.take(1)
            yield self

    @contextmanager
    def more(self, answers: int) -> Iterator[None]:
        """`answers` more under way while the block runs; raises RateLimited where the client may not have as many."""
        allowed = self._client.concurrent
        if allowed is not None and self._running + answers > allowed:
            said = f"{self._client.name} has {self._running} answers under way and wants {answers} more"
            raise RateLimited(f"{said}, its limit is {allowed}; again when one has ended", 1)
        self._running += answers
        try:
            yield
        finally:
            self._running -= answers

    def charge(self, tokens: int) -> None:
        """Tokens of a prompt or an answer; too many delay the next request, not this one."""
        if self._tokens is not None:
            self._tokens.take(tokens)

    def _check_rates(self) -> None:
        client = self._client
        for bucket, what, limit in (
            (self._requests, "requests", client.requests_per_minute),
            (self._tokens, "tokens", client.tokens_per_minute),
        ):
            if bucket is not None and (wait := bucket.wait(1)) > 0:
                seconds = math.ceil(wait)
                raise RateLimited(f"{client.name} has used its {limit} {what} a minute; again in {seconds} s", seconds)


class Meters:
    """The meters of all clients, by name."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._meters: dict[str, Meter] = {}

    def of(self, client: Client) -> Meter:
        if client.name not in self._meters:
            self._meters[client.name] = Meter(client, self._clock)
        return self._meters[client.name]

"""The bridge from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from threading import Lock

from rekindle.engine.types import Event


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """An event of answer `index`, and when it came (monotonic seconds)."""

    index: int
    event: Event
    at: float


class EventQueue:
    """Events of all answers of one HTTP request. Any thread may `put`; `take` empties the queue on the event loop.

    Events that gather while the reader is slow come out as one batch. The queue holds at most what the engine may still
    generate for the request, so max_tokens bounds it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = Lock()
        self._events: list[TimedEvent] = []
        self._filled = asyncio.Event()

    def put(self, index: int, event: Event) -> None:
        timed = TimedEvent(index, event, time.monotonic())
        with self._lock:
            self._events.append(timed)
            if len(self._events) > 1:  # the loop was woken for the first of them and has not taken it yet
                return
        with contextlib.suppress(RuntimeError):  # the loop has closed with the server, and the reader with it
            self._loop.call_soon_threadsafe(self._filled.set)

    async def take(self, patience: float) -> list[TimedEvent]:
        """All gathered events, as soon as there are any; an empty list after `patience` seconds without one."""
        try:
            async with asyncio.timeout(patience):
                await self._filled.wait()
        except TimeoutError:
            return []
        with self._lock:
            self._filled.clear()
            events, self._events = self._events, []
        return events

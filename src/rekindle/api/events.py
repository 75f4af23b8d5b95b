"""The bridge from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from threading import Lock

from rekindle.engine.types import Event


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """An event of answer `index`, and when it came (monotonic seconds)."""

    index: int
    event: Event
    at: float


class Bell:
    """Wakes the event loop for all queues that were filled since it last woke. A wake-up writes to a socket, and the
    thread that writes must then wait for the interpreter's lock again: with one for every token of a step, the engine
    would stand in line behind the loop that often before it can launch the next step."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._lock = Lock()
        self._filled: deque[EventQueue] = deque()

    def ring(self, queue: EventQueue) -> None:
        """From any thread."""
        with self._lock:
            self._filled.append(queue)
            if len(self._filled) > 1:  # the loop was woken for the first of them and has not come yet
                return
        try:
            self.loop.call_soon_threadsafe(self._answer)
        except RuntimeError:  # the loop has closed with the server, and the readers with it
            with self._lock:
                self._filled.clear()

    def _answer(self) -> None:
        with self._lock:
            filled, self._filled = self._filled, deque()
        for queue in filled:
            queue.wake()


class EventQueue:
    """Events of all answers of one HTTP request. Any thread may `put`; `take` empties the queue on the event loop.

    Events that gather while the reader is slow come out as one batch. The queue holds at most what the engine may still
    generate for the request, so max_tokens bounds it.
    """

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._lock = Lock()
        self._events: list[TimedEvent] = []
        self._reader: asyncio.Future[bool] | None = None  # who waits for events …
        self._since = 0.0  # … and from when on, by the loop's clock
        self._alarm: asyncio.TimerHandle | None = None  # for a reader whose patience ends

    def put(self, index: int, event: Event) -> None:
        timed = TimedEvent(index, event, time.monotonic())
        with self._lock:
            self._events.append(timed)
            if len(self._events) > 1:  # the bell was rung for the first of them
                return
        self._bell.ring(self)

    def wake(self, filled: bool = True) -> None:
        """On the event loop. A reader that is woken for events which it has taken already waits on."""
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(filled)

    async def take(self, patience: float) -> list[TimedEvent]:
        """All gathered events, as soon as there are any; an empty list after `patience` seconds without one."""
        while not self._events:
            if not await self._wait(patience):
                break
        with self._lock:
            events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Nobody reads any more."""
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    async def _wait(self, patience: float) -> bool:
        """False: nothing came in that time."""
        assert self._reader is None or self._reader.done(), "a queue has one reader"
        loop = self._bell.loop
        self._reader, self._since = loop.create_future(), loop.time()
        if self._alarm is None:
            self._alarm = loop.call_later(patience, self._alarmed, patience)
        return await self._reader

    def _alarmed(self, patience: float) -> None:
        """The alarm is set in one wait and may ring in a later one: a timer for each would cost as much as a token."""
        loop, until = self._bell.loop, self._since + patience
        self._alarm = None
        if loop.time() >= until:
            self.wake(filled=False)
        else:
            self._alarm = loop.call_at(until, self._alarmed, patience)

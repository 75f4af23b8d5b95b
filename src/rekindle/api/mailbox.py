"""The bridge from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass
from threading import Lock

from rekindle.engine.types import Event


@dataclass(frozen=True, slots=True)
class Letter:
    """An event, which of the requests sharing the mailbox it belongs to, and when it came (monotonic seconds)."""

    index: int
    event: Event
    at: float


class Mailbox:
    """Events of one HTTP request. `post` may be called from any thread; `take` empties it on the loop.

    What has gathered while the reader was slow comes out as one batch. It holds at most what the engine may still
    generate for the request, so max_tokens bounds it.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._lock = Lock()
        self._letters: list[Letter] = []
        self._full = asyncio.Event()

    def post(self, index: int, event: Event) -> None:
        letter = Letter(index, event, time.monotonic())
        with self._lock:
            self._letters.append(letter)
            if len(self._letters) > 1:  # the loop has been woken for the first and has not come yet
                return
        with contextlib.suppress(RuntimeError):  # the loop has closed with the server: nobody is left to read
            self._loop.call_soon_threadsafe(self._full.set)

    async def take(self, patience: float) -> list[Letter]:
        """All that has gathered, as soon as there is any; nothing if `patience` seconds bring nothing."""
        try:
            async with asyncio.timeout(patience):
                await self._full.wait()
        except TimeoutError:
            return []
        with self._lock:
            self._full.clear()
            letters, self._letters = self._letters, []
        return letters

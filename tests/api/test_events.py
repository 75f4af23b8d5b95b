"""Events on their way from the engine's thread to the readers on the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from rekindle.api.events import Bell, EventQueue
from rekindle.engine.types import Token

PATIENT = 60.0


class CountingLoop:
    """The running loop, with the wake-ups of other threads counted."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.woken = 0

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any) -> None:
        self.woken += 1
        self._loop.call_soon_threadsafe(callback, *args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


def in_a_thread(work: Callable[[], None]) -> None:
    """The loop stands still until it is done."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def tokens_of(events: list[Any]) -> list[int]:
    return [timed.event.token for timed in events]


def test_the_tokens_of_a_step_wake_the_loop_once() -> None:
    async def run() -> None:
        loop = CountingLoop()
        bell = Bell(loop)  # type: ignore[arg-type]
        queues = [EventQueue(bell) for _ in range(32)]
        readers = [asyncio.ensure_future(queue.take(PATIENT)) for queue in queues]
        await asyncio.sleep(0)
        in_a_thread(lambda: [queue.put(0, Token(number)) for number, queue in enumerate(queues)] and None)
        assert [tokens_of(await reader) for reader in readers] == [[number] for number in range(32)]
        assert loop.woken == 1
        in_a_thread(lambda: queues[7].put(0, Token(5)))
        assert tokens_of(await queues[7].take(PATIENT)) == [5]
        assert loop.woken == 2, "and again for the next step"
        for queue in queues:
            queue.close()

    asyncio.run(run())


def test_a_wake_up_for_what_was_taken_already_is_no_silence() -> None:
    async def run() -> None:
        queue = EventQueue(Bell(asyncio.get_running_loop()))
        in_a_thread(lambda: queue.put(0, Token(1)))
        assert tokens_of(await queue.take(PATIENT)) == [1], "taken before the loop has heard the bell"
        reader = asyncio.ensure_future(queue.take(PATIENT))
        for _ in range(3):
            await asyncio.sleep(0)
        assert not reader.done(), "an empty batch would be a heartbeat"
        in_a_thread(lambda: queue.put(0, Token(2)))
        assert tokens_of(await reader) == [2]
        queue.close()

    asyncio.run(run())


def test_a_reader_loses_patience_by_the_wait_that_it_is_in() -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        queue = EventQueue(Bell(loop))
        began = loop.time()
        for number in range(3):  # the alarm of the first wait would ring amid a later one
            loop.call_later(0.06, queue.put, 0, Token(number))
            assert tokens_of(await queue.take(0.1)) == [number]
        waited_from = loop.time()
        assert await queue.take(0.1) == []
        assert loop.time() - waited_from >= 0.1
        assert loop.time() - began >= 0.28
        queue.close()

    asyncio.run(run())


def test_a_queue_that_nobody_reads_any_more_has_no_timer() -> None:
    async def run() -> None:
        queue = EventQueue(Bell(asyncio.get_running_loop()))
        reader = asyncio.ensure_future(queue.take(PATIENT))
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.wait([reader])
        queue.close()
        assert queue._alarm is None
        in_a_thread(lambda: queue.put(0, Token(1)))  # the engine may still have something to say
        await asyncio.sleep(0)

    asyncio.run(run())


def test_events_after_the_server_has_gone_are_nobodys() -> None:
    loop = asyncio.new_event_loop()
    queue = EventQueue(Bell(loop))
    loop.close()
    queue.put(0, Token(1))

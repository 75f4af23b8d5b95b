"""What other threads ask of the engine: commands in the order of their arrival, and whether requests are taken."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import Counter
from collections.abc import Callable

from rekindle.errors import QueueFull, StageLost, Stopping

Command = Callable[[], object]  # runs on the engine's thread


class Inbox:
    """Every method may be called from any thread, but `receive` and `comes_within` only from the engine's."""

    def __init__(self, limit: int) -> None:
        """limit: requests of one name space that may wait for a slot. Each has its own, so that nobody is refused for
        what others ask."""
        self._limit = limit
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None: stop
        self._first = list[Command | None]()  # one that was waited for, and is to be run before the others
        self._lock = threading.Lock()  # guards what follows
        self._waiting: Counter[str] = Counter()  # requests taken and not yet admitted to a slot, by name space
        self.draining = self.stopping = False
        self.broken: str | None = None  # why nothing can run any more

    @property
    def waiting(self) -> int:
        with self._lock:
            return self._waiting.total()

    def submit(self, command: Command, namespace: str) -> None:
        """Take the request that the command enqueues, or refuse it with the reason."""
        with self._lock:
            if self.draining:
                raise Stopping("the server is stopping and takes no more requests")
            if self._waiting[namespace] >= self._limit:
                raise QueueFull(f"{self._waiting[namespace]} requests are waiting, the queue holds {self._limit}")
            if self.broken is not None:
                raise StageLost(f"the engine cannot run any more: {self.broken}")
            self._waiting[namespace] += 1
            self._commands.put(command)  # inside the lock, so that no request comes after the stop

    def put(self, command: Command) -> None:
        self._commands.put(command)

    def receive(self, idle: bool) -> bool:
        """Run the commands that have arrived; with nothing else to do, wait for one. False when it is time to stop, and
        from then on."""
        while True:
            try:
                command = self._first.pop() if self._first else self._commands.get(block=idle)
            except queue.Empty:
                return True
            if command is None:
                self._first.append(None)
                return False
            command()
            idle = False

    def comes_within(self, seconds: float) -> bool:
        """Whether there is a command, or one arrives in that time; `receive` runs it. On the engine's thread."""
        if not self._first:
            with contextlib.suppress(queue.Empty):
                self._first.append(self._commands.get(timeout=seconds))
        return bool(self._first)

    def count_in(self, namespace: str) -> None:
        """One more waits, that the engine itself has made."""
        with self._lock:
            self._waiting[namespace] += 1

    def count_out(self, namespace: str) -> None:
        """One that waited is in a slot for the first time, or has ended before."""
        with self._lock:
            self._waiting[namespace] -= 1

    def drain(self) -> None:
        """Refuse new requests."""
        with self._lock:
            self.draining = True

    def stop(self) -> None:
        """Refuse new requests, and have `receive` return False after the commands before this."""
        with self._lock:
            self.draining = self.stopping = True
            self._commands.put(None)

    def refuse_for_good(self, reason: str) -> None:
        with self._lock:
            self.broken = reason

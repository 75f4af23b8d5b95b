"""Who goes first where threads share the interpreter.

Every call into torch gives the interpreter's lock away, and a thread that wants it back stands in line with all
others: beside sixteen that read snapshots a restore of 2.5 ms took 80. So the token loop says when it is in a hurry,
and threads whose work can wait a moment (reads of snapshots, prompts that are being rendered) look before every piece
of it.
"""

from __future__ import annotations

import asyncio
import threading
import time
from types import TracebackType

# Seconds that a piece of work waits: no longer, since a token loop, or several, may be in a hurry most of the time.
MOST = 0.005
LOOK = 0.001  # … and between two looks of an event loop


class _Hurry:
    """Of the process, as the lock is. Several engines may be in a hurry at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._over = threading.Event()
        self._over.set()

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            self._over.clear()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._over.set()

    @property
    def now(self) -> bool:
        return not self._over.is_set()

    def give_way(self) -> None:
        """Called by a thread whose work can wait a moment, before each piece of it."""
        if self.now:
            self._over.wait(MOST)

    async def let_pass(self) -> None:
        """The same on an event loop, which goes on sending meanwhile."""
        until = time.monotonic() + MOST
        while self.now and time.monotonic() < until:
            await asyncio.sleep(LOOK)


hurrying = _Hurry()  # `with hurrying:`
give_way, let_pass = hurrying.give_way, hurrying.let_pass

"""Threads that leave the processors to others."""

from __future__ import annotations

import contextlib
import os
import sys
import threading


def stand_back(rank: int) -> None:
    """The calling thread, and threads that it starts, have this niceness from now on, unless theirs is higher. Only
    Linux gives threads one of their own.

    A decode step waits for the slowest of its threads, and the token loop for its next turn: whoever shares a core with
    them slows all of it down.
    """
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):  # a system that refuses it is slower, not wrong
            os.setpriority(os.PRIO_PROCESS, thread, max(rank, os.getpriority(os.PRIO_PROCESS, thread)))

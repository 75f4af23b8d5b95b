"""How the threads of a server share the interpreter."""

from __future__ import annotations

import ctypes
import sys

# Requests are read and tokens are sent by one thread, steps are launched by another, and every call into torch lets go
# of the interpreter's lock. Whoever wants it back from a thread that is busy in Python asks for it after so many
# seconds: Python's 5 ms are three tokens long. Each thread that waits wakes up as often: with 20 µs a few threads wait
# for less, and the sixteen that read snapshots take the processors from everyone (scripts/bench_interpreter.py).
TURN = 0.0001
# How much later than asked the system may end a wait, nanoseconds: its default of 50 µs would be half a turn more.
TIMER_SLACK = 1000
PR_SET_TIMERSLACK = 29  # of prctl(2)


def share_interpreter() -> None:
    """In short turns from now on. Threads inherit the slack from the one that starts them, so this comes first."""
    sys.setswitchinterval(TURN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(TIMER_SLACK), 0, 0, 0)

"""How the threads of a server share the interpreter."""

from __future__ import annotations

import ctypes
import sys

# Requests are read and tokens are sent by one thread, steps are launched by another, and every call into torch lets go
# of the interpreter's lock. Whoever wants it back from a thread that is busy in Python asks after this time, seconds:
# with the default of 5 ms that is three tokens long, and a capture of 20 calls waits 20 times. Below 10 µs threads that
# wait take the processor's time from the one that works.
TURN = 0.00002
# How much later than asked the system may end a wait, nanoseconds: its default of 50 µs would be most of it.
TIMER_SLACK = 1000
PR_SET_TIMERSLACK = 29  # of prctl(2)


def share_interpreter() -> None:
    """In short turns from now on. Threads inherit the slack from the one that starts them, so this comes first."""
    sys.setswitchinterval(TURN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(TIMER_SLACK), 0, 0, 0)

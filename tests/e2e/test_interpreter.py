"""Threads of a server take short turns in the interpreter."""

from __future__ import annotations

import ctypes
import sys
import threading

import pytest

from rekindle.cli.interpreter import TIMER_SLACK, TURN, share_interpreter

PR_GET_TIMERSLACK = 30


@pytest.mark.skipif(sys.platform != "linux", reason="the slack of timers is Linux's")
def test_turns_are_short_and_waits_for_them_end_in_time() -> None:
    """Also in threads that are started from then on."""
    found, before = list[int](), sys.getswitchinterval()

    def look() -> None:
        found.append(ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0))

    def share() -> None:
        share_interpreter()
        look()
        later = threading.Thread(target=look)
        later.start()
        later.join()

    thread = threading.Thread(target=share)  # this one stays as it was
    try:
        thread.start()
        thread.join()
        assert sys.getswitchinterval() == pytest.approx(TURN)
    finally:
        sys.setswitchinterval(before)
    look()
    assert found[:2] == [TIMER_SLACK, TIMER_SLACK] and found[2] != TIMER_SLACK

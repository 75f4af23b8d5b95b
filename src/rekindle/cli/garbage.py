"""When Python looks for garbage that refers to itself: while nobody waits."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

PAUSE = 30.0  # seconds between two full collections of an idle server …
LONGEST = 600.0  # … and of one that is never idle
NEVER = 1 << 30  # collections of younger objects before a full one
# Collections of the youngest objects before one of those that survived them. Python's 10 leave some thousand of them,
# and kept an answer waiting for 3.5 ms. What counts as old too early waits for the next full collection: a request
# leaves about seven objects that refer to themselves.
YOUNG = 3


class FullCollections:
    """By itself Python makes one after every few long prompts, amid answers, and it walks through every page of every
    snapshot in RAM: 4 ms for eight conversations of 32,768 tokens on a fast core, and more with each further one. What
    is young is collected more often, and snapshots need none of it: they go with the last reference to them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        gc.set_threshold(gc.get_threshold()[0], YOUNG, NEVER)
        self._clock = clock
        self._last = clock()

    def tick(self, is_idle: Callable[[], bool]) -> None:
        """Called several times a second."""
        since = self._clock() - self._last
        if since >= LONGEST or (since >= PAUSE and is_idle()):
            gc.collect()
            self._last = self._clock()

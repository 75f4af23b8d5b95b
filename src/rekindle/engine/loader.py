"""Snapshots are read from disk by threads of their own, while other sequences run."""

from __future__ import annotations

import os
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from rekindle.engine.state import Loading, Restoring, State, Waiting
from rekindle.prefix import Lookup, PrefixCache

# Threads, one for each snapshot that is read: enough to keep all readers at work, though they give way to the token
# loop (`hurry.py`). They have its priority, since one that holds the interpreter's lock and gets no core would keep it
# from everyone.
LOADERS = min(os.cpu_count() or 1, 8)


class LoaderThreads:
    """Lives on the engine's thread; the reads do not."""

    def __init__(self, prefixes: PrefixCache) -> None:
        self._prefixes = prefixes
        self._threads = ThreadPoolExecutor(LOADERS, "rekindle-loader")
        # By name space and by the tokens of the snapshot that is read: done when the last read of it has ended.
        self._turns: dict[tuple[str, bytes], Future[None]] = {}

    def load(self, tokens: np.ndarray, namespace: str) -> Future[Lookup]:
        """Look the prompt up, disk included. A second read of the same snapshot waits for the first and finds it in
        RAM; until then it takes no thread from others. What is cancelled before its turn has come is not read."""
        key = (namespace, tokens[: self._prefixes.known_length(tokens, namespace)].tobytes())
        self._turns = {other: turn for other, turn in self._turns.items() if not turn.done()}
        reading, turn, before = Future[Lookup](), Future[None](), self._turns.get(key)

        def read() -> None:
            if reading.set_running_or_notify_cancel():
                try:
                    reading.set_result(self._prefixes.lookup(tokens, namespace=namespace))
                except BaseException as error:
                    reading.set_exception(error)
            turn.set_result(None)

        def begin(_: object = None) -> None:
            try:
                self._threads.submit(read)
            except RuntimeError as error:  # no thread can be had, or they have ended, and every sequence before them
                if reading.set_running_or_notify_cancel():
                    reading.set_exception(error)
                turn.set_result(None)

        if before is None:
            begin()
        else:
            before.add_done_callback(begin)
        self._turns[key] = turn
        return reading

    def stop(self) -> None:
        """Wait for the reads under way. Every sequence has ended before."""
        self._threads.shutdown()


def drop_lookup(state: State) -> None:
    """A sequence leaves this state for good: unpin the hit that was found for it, or that will be read for it."""
    match state:
        case Waiting(found) | Restoring(before=Waiting(found)):
            release_hit(found)
        case Loading(reading) if not reading.cancel():
            reading.add_done_callback(lambda done: release_hit(done.result() if done.exception() is None else None))


def release_hit(found: Lookup | None) -> None:
    if found is not None and found.hit is not None:
        found.hit.release()

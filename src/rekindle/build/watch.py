"""Watches the files of a model that is being served: what this process holds must be what a restart would load."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rekindle.weights.source import SourceFiles

SECONDS = 1.0  # between two checks, of two system calls per file


class FileWatcher:
    """Calls `on_change` once, from its own thread, with what has happened to the files; then the thread ends."""

    def __init__(self, files: SourceFiles, on_change: Callable[[str], None], seconds: float = SECONDS) -> None:
        self._files, self._on_change, self._seconds = files, on_change, seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="model files", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while (reason := self._files.changed()) is None:
            if self._stopped.wait(self._seconds):
                return
        self._on_change(reason)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

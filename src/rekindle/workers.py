"""Scripts that run in processes of their own, so that what they are given can end them and nothing else.

A script reads requests and writes answers, one line of JSON each, and limits its own time and memory: the operating
system ends it where it needs too much.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "SYSTEMROOT")
KEPT = 4  # processes that wait for the next request, as many as one client may use at a time


class WorkerEnded(Exception):
    """A process ended over a request, and how."""

    def __init__(self, status: int) -> None:
        super().__init__(f"its process ended with status {status}")
        self.was_slow = status == -signal.SIGPROF


class Workers:
    """Processes of one script. May be used from several threads: each request takes a process for itself."""

    def __init__(self, script: Path) -> None:
        self._script = script
        self._idle: list[_Worker] = []
        self._lock = threading.Lock()

    def ask(self, request: bytes) -> dict[str, Any]:
        """The answer to one line; raises WorkerEnded where there is none."""
        worker = self._take()
        found = worker.ask(request)
        self._give(worker)
        return found

    def _take(self) -> _Worker:
        with self._lock:
            while self._idle:
                if (worker := self._idle.pop()).is_alive:
                    return worker
        return _Worker(self._script)

    def _give(self, worker: _Worker) -> None:
        with self._lock:
            if len(self._idle) < KEPT:
                self._idle.append(worker)
                return
        worker.close()


def _environment() -> dict[str, str]:
    """No key of the server's, and the packages that it has, wherever they lie."""
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return inherited | {"PYTHONPATH": os.pathsep.join(str(Path(path).resolve()) for path in sys.path if path)}


class _Worker:
    def __init__(self, script: Path) -> None:
        # A session of its own: Ctrl-C is for the server, which still asks while it stops. It ends with our pipe.
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=_environment(),
        )

    def ask(self, request: bytes) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None, "both are pipes"
        try:
            self._process.stdin.write(request + b"\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            self.close()
            raise WorkerEnded(self._process.returncode)
        found: dict[str, Any] = json.loads(line)
        return found

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.communicate()

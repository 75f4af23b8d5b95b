"""A real server process on a free port, as a user would start it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from support.forked import REKINDLE, Forked

Process = Forked | subprocess.Popen[Any]


class Server:
    """`rekindle serve` in a process of its own; stopped by whoever started it."""

    def __init__(
        self, *arguments: str, environment: Mapping[str, str] | None = None, outlives_terminal: bool = False
    ) -> None:
        """environment: of the process, beside ours. Without one and without --cache-dir it keeps nothing on disk, where
        a later test would find it. outlives_terminal: started as nohup starts it."""
        disk = [] if environment is not None or "--cache-dir" in arguments else ["--no-cache-dir"]
        reads, writes = os.pipe()
        hang_up = signal.SIG_IGN if outlives_terminal else signal.SIG_DFL
        words = [*arguments, *disk, "--port", "0"]
        self.process = self.start(words, writes, {**os.environ, **(environment or {})}, hang_up)
        os.close(writes)
        self._said = os.fdopen(reads)
        self.output: list[str] = []
        self._ready = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(180) and self.url, "the server did not start:\n" + "".join(self.output)

    def start(self, words: list[str], output: int, environment: Mapping[str, str], hang_up: Any) -> Process:
        return Forked([REKINDLE, "serve", *words], output, output, environment, hang_up)

    def _read(self) -> None:
        for line in self._said:
            self.output.append(line)
            if match := re.search(r"chat in a browser\s+(http://\S+?)/?\s*$", line):
                self.url = match[1]
            if "curl " in line:  # the last line of the greeting
                self._ready.set()
        self._ready.set()

    def finish_reading(self) -> None:
        """After the end of the process: all that it said is in `output`."""
        self._reader.join(60)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60)

    def post(self, path: str, body: object) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=300)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)


StartServer = Callable[..., Server]

"""A real server process on a free port, as a user would start it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest


class Server:
    """`rekindle serve` in a process of its own; stopped by whoever started it."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", "from rekindle.cli import main; main()", "serve", "--port", "0", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.output: list[str] = []
        self._ready = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._ready.wait(180) and self.url, "the server did not start:\n" + "".join(self.output)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
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


@pytest.fixture(scope="module")
def start_server() -> Iterator[StartServer]:
    started: list[Server] = []

    def start(*arguments: str | Path) -> Server:
        server = Server(*map(str, arguments))
        started.append(server)
        return server

    yield start
    for server in started:
        if server.process.poll() is None:
            server.stop()

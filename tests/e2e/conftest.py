"""A real server process on a free port, as a user would start it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.server import Server, StartServer


@pytest.fixture(scope="module")
def start_server() -> Iterator[StartServer]:
    started: list[Server] = []

    def start(*arguments: str | Path, **more: Any) -> Server:
        server = Server(*map(str, arguments), **more)
        started.append(server)
        return server

    yield start
    for server in started:
        if server.process.poll() is None:
            server.stop()

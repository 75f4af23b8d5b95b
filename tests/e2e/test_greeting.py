"""The greeting means: the next request is served without delay."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import Response
from support.server import Server

from rekindle.api import ModelHost
from rekindle.api.connections import guarded_protocol
from rekindle.cli.server import Server as OwnServer
from rekindle.cli.server import listen


class Telling(Server):
    """Says what it imports, and when."""

    def start(self, words: list[str], output: int, environment: Mapping[str, str], hang_up: Any) -> Any:
        command = [sys.executable, "-u", "-X", "importtime", "-m", "rekindle.cli", "serve", *words]
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def imported(self, since: int = 0) -> list[str]:
        """Modules, from this line of its output on."""
        lines = (line.split("|") for line in self.output[since:] if line.startswith("import time:"))
        return [parts[2].strip() for parts in lines if len(parts) == 3]


def test_requests_import_nothing_and_serving_on_a_cpu_needs_no_compiler_of_torch(golden: Path) -> None:
    model = golden / "tiny-qwen35-Q4_K_M.gguf"
    server = Telling(str(model), "--devices", "cpu", "--context", "512", "--sequences", "2", "--threads", "1")
    greeted = len(server.output)
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    try:
        answers = [
            server.post("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 4}),
            server.post("/v1/chat/completions", chat | {"stream": True}),
            server.post("/v1/messages", chat | {"model": "any"}),
        ]
    finally:
        by_requests = server.imported(since=greeted)
        server.stop()
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    assert "torch" in server.imported()
    assert by_requests == []
    assert "torch._dynamo" not in server.imported()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_tokens_wait_for_no_acknowledgement_of_those_before(host: str) -> None:
    """A client that keeps its connection acknowledges late, and TCP would hold the next small write back until then."""
    listener, found = listen(host, 0), list[int]()

    def visit() -> None:
        with socket.create_connection(listener.getsockname()[:2], timeout=60) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            client.recv(1)
        server.should_exit = True

    async def app(scope: Any, receive: Any, send: Any) -> None:
        (connection,) = server.server_state.connections
        taken = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
        found.append(taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        await Response()(scope, receive, send)

    visitor = threading.Thread(target=visit)
    settings = uvicorn.Config(app, log_level="warning", lifespan="off", http=guarded_protocol(8, 15.0))
    server = OwnServer(settings, ModelHost([]), False, greet=visitor.start)
    server.run(sockets=[listener])
    visitor.join()
    assert found == [1]


def test_who_is_greeted_can_connect() -> None:
    listener, connected = listen("127.0.0.1", 0), list[bool]()

    def greet() -> None:
        with socket.create_connection(listener.getsockname(), timeout=60):
            connected.append(True)
        server.should_exit = True

    server = OwnServer(uvicorn.Config(Starlette(), log_level="warning"), ModelHost([]), False, greet=greet)
    server.run(sockets=[listener])
    assert connected == [True]

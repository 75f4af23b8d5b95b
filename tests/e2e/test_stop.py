"""A server that is told to stop says so, ends its answers with a last event, writes what it knows, and is gone."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn

from rekindle.cli.server import Server
from rekindle.snapshots.tools import list_snapshots

SERVE = ("--context", "4096", "--sequences", "2", "--threads", "1")
ENDLESS = {"prompt": "x" * 300, "max_tokens": 3500, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def model(golden: Path) -> Path:
    return golden / "tiny-qwen35-Q4_K_M.gguf"


def wait_until_said(server: Any, words: str) -> None:
    for _ in range(600):
        if words in "".join(server.output):
            return
        time.sleep(0.05)
    pytest.fail(f"the server did not say {words!r}:\n" + "".join(server.output))


def ended(server: Any) -> tuple[int, str]:
    """The exit status and all that was said, however wide the terminal."""
    status = server.process.wait(60)
    server.finish_reading()
    return status, " ".join("".join(server.output).split())


class PaperBuilt:
    """An engine whose step under way at the stop ends when the test says so."""

    def __init__(self) -> None:
        self.stopping = asyncio.Event()
        self.ended = threading.Event()

    def end_requests(self) -> None:
        self.stopping.set()

    def wait_for_end(self) -> None:
        assert self.ended.wait(60), "the step never ended"


class ServerInATest(Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def test_a_step_that_outlasts_the_patience_with_clients_still_gets_its_last_event_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rekindle.cli.server.PATIENCE", 0)

    async def scene() -> list[str]:
        built = PaperBuilt()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200})
            await send({"type": "http.response.body", "body": b"first\n", "more_body": True})
            await built.stopping.wait()
            for _ in range(20):  # turns of the loop, in which whoever has no patience hangs up
                await asyncio.sleep(0)
            built.ended.set()
            await send({"type": "http.response.body", "body": b"last\n"})

        listener = socket.create_server(("127.0.0.1", 0))
        server = ServerInATest(uvicorn.Config(app, log_level="warning", lifespan="off"), built, False)  # type: ignore[arg-type]
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        url, lines = f"http://127.0.0.1:{listener.getsockname()[1]}", list[str]()
        async with httpx.AsyncClient(timeout=60) as client, client.stream("GET", url) as response:
            async for line in response.aiter_lines():
                lines.append(line)
                server.should_exit = True
        await serving
        return lines

    assert asyncio.run(scene()) == ["first", "last"]


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stream_that_runs_at_the_stop_gets_its_last_event(
    sign: signal.Signals, start_server: Any, model: Path, tmp_path: Path
) -> None:
    server = start_server(model, *SERVE, "--cache-dir", tmp_path, "--drain", "0")
    events: list[str] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json={**ENDLESS, "stream": True}, timeout=60) as response:
        for line in response.iter_lines():
            events += [line.removeprefix("data: ")] if line else []
            if line and len(events) == 3:  # once: a second signal would end the process
                server.process.send_signal(sign)
    status, said = ended(server)
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["error"]["code"] == "stopping"
    assert status == 0, said
    assert said.count("stopping: answers under way end here, snapshots are written; Ctrl-C again") == 1
    assert "Traceback" not in said
    assert list_snapshots(tmp_path), "the prompt's snapshots were waiting for the disk"


def test_an_answer_in_one_piece_is_refused_as_unavailable_at_the_stop(start_server: Any, model: Path) -> None:
    server = start_server(model, *SERVE)
    with socket.create_connection(address(server)) as client:
        send(client, json.dumps(ENDLESS))
        while "rekindle_running 1.0" not in server.get("/metrics").text:
            pass
        server.process.send_signal(signal.SIGINT)
        answer = b"".join(iter(lambda: client.recv(65536), b"")).decode()
    assert answer.startswith("HTTP/1.1 503")
    assert '"code":"stopping"' in answer
    status, said = ended(server)
    assert (status, "Traceback" in said) == (0, False), said
    assert "snapshots are written" not in said, "there is nowhere to write them"


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGHUP])
def test_a_server_that_drains_finishes_its_answers_and_takes_no_more(
    sign: signal.Signals, start_server: Any, model: Path, tmp_path: Path
) -> None:
    server = start_server(model, *SERVE, "--cache-dir", tmp_path, "--drain", "600")
    assert server.get("/ready").json() == {"status": "ready"}
    body = {**ENDLESS, "max_tokens": 600, "stream": True, "stream_options": {"include_usage": True}}
    events: list[Any] = []
    refused: list[httpx.Response] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == 3:
                server.process.send_signal(sign)
                wait_until_said(server, "stopping: answers under way get up to 600 seconds")
                refused = [server.post("/v1/completions", {"prompt": "x"}), server.get("/ready"), server.get("/health")]
    assert events[-1]["usage"]["completion_tokens"] == 600, "the answer under way is whole"
    assert [each.status_code for each in refused] == [503, 503, 200]
    assert refused[0].json()["error"]["code"] == "stopping"
    status, said = ended(server)
    assert (status, "Traceback" in said) == (0, False), said
    assert list_snapshots(tmp_path), "what was computed is saved"


def test_a_drain_ends_at_its_deadline_or_at_a_second_signal(start_server: Any, model: Path) -> None:
    for seconds, signals in (("0.3", 1), ("600", 2)):
        server = start_server(model, *SERVE, "--drain", seconds)
        events: list[str] = []
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json={**ENDLESS, "stream": True}, timeout=120
        ) as response:
            for line in response.iter_lines():
                events += [line.removeprefix("data: ")] if line else []
                if line and len(events) == 3:
                    for _ in range(signals):
                        server.process.send_signal(signal.SIGTERM)
                        wait_until_said(server, "stopping: answers under way get")
        assert json.loads(events[-2])["error"]["code"] == "stopping"
        status, said = ended(server)
        assert (status, "Traceback" in said) == (0, False), said


def test_a_server_that_was_started_to_outlive_its_terminal_does(start_server: Any, model: Path) -> None:
    server = start_server(model, *SERVE, outlives_terminal=True)
    server.process.send_signal(signal.SIGHUP)
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
    server.stop()


def test_a_client_that_does_not_let_go_is_hung_up_on_and_a_second_signal_waits_for_nobody(
    start_server: Any, model: Path
) -> None:
    for signals in (1, 2):
        server = start_server(model, *SERVE)
        with socket.create_connection(address(server)) as client:
            send(client, "half of a body", length=1000)
            assert server.get("/health").status_code == 200
            for _ in range(signals):
                server.process.send_signal(signal.SIGINT)
                wait_until_said(server, "stopping")
            status, said = ended(server)
        assert status == (0 if signals == 1 else -signal.SIGINT)
        assert "Traceback" not in said


def address(server: Any) -> tuple[str, int]:
    url = urlsplit(server.url)
    return str(url.hostname), int(url.port or 0)


def send(client: socket.socket, body: str, length: int | None = None) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    client.sendall(f"{head}content-length: {len(body) if length is None else length}\r\n\r\n{body}".encode())

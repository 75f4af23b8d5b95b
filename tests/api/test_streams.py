"""Clients that leave, clients that are slow, and many clients at once."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.api.sse import event


def head_of(path: str, data: bytes) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def open_request(house: Any, path: str, body: dict[str, Any]) -> socket.socket:
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", house.port), timeout=20)
    connection.sendall(head_of(path, data) + data)
    return connection


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    got = b""
    while mark not in got:
        data = connection.recv(65536)
        assert data, f"the connection closed before {mark!r}: {got!r}"
        got += data
    return got


@pytest.mark.parametrize("n", [1, 3])
def test_a_reader_that_leaves_midway_cancels_its_answers(fresh_house, n):
    house = fresh_house()
    body = {"messages": [{"role": "user", "content": "[drip] say(abcdef)"}], "stream": True, "n": n}
    connection = open_request(house, "/v1/chat/completions", body)
    read_until(connection, b'"content":"')
    connection.close()
    cancelled = {house.engine.cancelled.get(timeout=20) for _ in range(n)}
    assert cancelled == {request.id for request in house.engine.requests}
    assert f"rekindle_cancellations_total {n}.0" in httpx.get(house.url + "/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_before_the_first_token_cancels(fresh_house, stream):
    house = fresh_house()
    connection = open_request(house, "/v1/completions", {"prompt": "[silent]", "stream": stream})
    assert house.engine.submitted.acquire(timeout=20)
    connection.close()
    assert house.engine.cancelled.get(timeout=20) == house.engine.requests[0].id


def test_the_official_client_can_stop_a_stream(fresh_house):
    house = fresh_house()
    stream = house.client().completions.create(model="m", prompt="[drip] say(abcdef)", stream=True)
    next(iter(stream))
    stream.close()
    assert house.engine.cancelled.get(timeout=20) == house.engine.requests[0].id


def test_a_finished_answer_is_not_cancelled(fresh_house):
    house = fresh_house()
    house.client().completions.create(model="m", prompt="say(a)")
    list(house.client().completions.create(model="m", prompt="say(a)", stream=True))
    assert "rekindle_cancellations_total 0.0" in httpx.get(house.url + "/metrics").text
    assert house.engine.cancelled.empty()


def test_a_slow_reader_gets_the_whole_answer_in_fewer_events(fresh_house):
    house = fresh_house()
    text = "0123456789" * 1000
    # Too small for the answer's events, so the server has to wait for us while the engine goes on.
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", house.port))
    data = json.dumps({"prompt": f"say({text})", "stream": True, "model": "m" * 2000}).encode()
    connection.sendall(head_of("/v1/completions", data) + data)
    connection.settimeout(20)
    assert house.engine.submitted.acquire(timeout=20)
    probe = house.client().completions.create(model="m", prompt=f"say({text})")  # as long, so the first is done too
    assert probe.choices[0].text == text
    got = read_until(connection, b"[DONE]").decode()
    connection.close()
    events = [json.loads(line[6:]) for line in got.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert len(events) < len(text) / 2


def test_fifty_streams_at_once_each_complete_in_order(house):
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        said = f"answer {number}: " + "abcdefgh" * 10
        messages = [{"role": "user", "content": f"say({said})"}]
        stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{house.url}/v1", api_key="x", max_retries=0, timeout=60) as client:
            return await asyncio.gather(*(one(client, number) for number in range(50)))

    assert asyncio.run(all_of_them()) == [f"answer {number}: " + "abcdefgh" * 10 for number in range(50)]


def test_an_open_stream_is_never_silent_for_long(fresh_house):
    house = fresh_house(heartbeat_seconds=0.05)
    connection = open_request(house, "/v1/completions", {"prompt": "[silent]", "stream": True})
    assert b": waiting\n\n" in read_until(connection, b": waiting\n\n")
    connection.close()


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_an_event_is_one_line_of_json_that_says_what_was_written(value: Any) -> None:
    head, line, *rest = event({"value": value}, "name").split(b"\n")
    assert (head, rest) == (b"event: name", [b"", b""])
    assert json.loads(line.removeprefix(b"data: ")) == {"value": value}

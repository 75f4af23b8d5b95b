"""The embedded model behind a live server, through the official client."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

README = Path(__file__).parents[2] / "README.md"
QUESTIONS = [f"Name {n} things that are {c}." for n in (1, 2, 3, 4) for c in ("red", "round", "cold", "loud")]


@pytest.fixture(scope="module")
def server(start_server: Any) -> Iterator[Any]:
    server = start_server("--context", "1024", "--sequences", "16", "--threads", "2")
    yield server
    server.stop()


@pytest.fixture(scope="module")
def client(server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", timeout=300, max_retries=0)


def ask(client: openai.OpenAI, question: str, **fields: Any) -> Any:
    fields = {"max_tokens": 24, "temperature": 0, **fields}
    return client.chat.completions.create(model="any", messages=[{"role": "user", "content": question}], **fields)


def test_chat_answers_a_question(client: openai.OpenAI) -> None:
    answer = ask(client, "What is the capital of France?")
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_who_asks_on_the_page_without_a_word_on_sampling_gets_the_answer_too(server: Any) -> None:
    for _ in range(3):  # drawn as its publisher says it would be lost two times of three
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 24}
        answer = server.post("/v1/chat/completions", body).json()
        assert "Paris" in answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("place", ["greeting", "README"])
def test_the_first_curl_that_is_offered_asks_for_a_short_answer(place: str, server: Any) -> None:
    """Without a limit a small model may go on for minutes, and a newcomer takes that for a server that hangs."""
    text = "".join(server.output) if place == "greeting" else README.read_text()
    body = re.search(r"curl \S+/v1/chat/completions [^']*'content-type: application/json'\s[\\\s]*-d '(.*)'", text)
    assert body is not None
    answer = server.post("/v1/chat/completions", json.loads(body[1])).json()
    assert answer["rekindle"]["max_tokens"] == 64


def test_streamed_pieces_make_the_whole_answer(client: openai.OpenAI) -> None:
    whole = ask(client, "Say a sentence about rain.")
    pieces = list(ask(client, "Say a sentence about rain.", stream=True, stream_options={"include_usage": True}))
    text = "".join(p.choices[0].delta.content or "" for p in pieces if p.choices)
    assert text == whole.choices[0].message.content
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_log_probabilities_are_those_of_the_tokens_given(client: openai.OpenAI) -> None:
    answer = ask(client, "Hello", logprobs=True, top_logprobs=3, max_tokens=5)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        assert entry.logprob <= 0
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"
        assert len(entry.top_logprobs) == 3


def test_completions_take_text_or_token_ids(client: openai.OpenAI) -> None:
    fields: Any = dict(model="any", max_tokens=8, temperature=0, extra_body={"return_token_ids": True})
    text = client.completions.create(prompt="Once upon a time", **fields)
    ids = text.choices[0].model_extra["prompt_token_ids"]
    again = client.completions.create(prompt=ids, **fields)
    assert again.choices[0].text == text.choices[0].text
    assert again.choices[0].model_extra["token_ids"] == text.choices[0].model_extra["token_ids"]
    assert again.usage.prompt_tokens == len(ids)


def test_ignore_eos_runs_to_the_limit(client: openai.OpenAI) -> None:
    fields: Any = dict(model="any", prompt="Hi<|im_end|>", max_tokens=30, temperature=0)
    answer = client.completions.create(**fields, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 30
    assert answer.choices[0].finish_reason == "length"


def test_a_stop_string_ends_the_answer_and_is_not_shown(client: openai.OpenAI) -> None:
    free = ask(client, "Count from one to ten in words.").choices[0].message.content
    word = free.split()[2]
    stopped = ask(client, "Count from one to ten in words.", stop=[word])
    assert stopped.choices[0].message.content == free[: free.index(word)]
    assert stopped.choices[0].finish_reason == "stop"


def test_a_second_turn_restores_the_first(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Tell me about the sea."}]
    first = client.chat.completions.create(model="any", messages=messages, max_tokens=30, temperature=0)
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "And about rivers?"},
    ]
    second = client.chat.completions.create(model="any", messages=messages, max_tokens=8, temperature=0)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens
    assert second.model_extra["rekindle"]["computed"] < 20


def test_a_bad_field_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, "Hi", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.BadRequestError, match="context"):
        ask(client, "word " * 2000)


def test_sixteen_clients_at_once_get_what_each_gets_alone(client: openai.OpenAI, server: Any) -> None:
    alone = [ask(client, question).choices[0].message.content for question in QUESTIONS]

    async def all_at_once() -> list[str]:
        asynchronous = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", timeout=300, max_retries=0)

        async def one(question: str) -> str:
            stream = await asynchronous.chat.completions.create(
                model="any",
                messages=[{"role": "user", "content": question}],
                max_tokens=24,
                temperature=0,
                stream=True,
            )
            return "".join([piece.choices[0].delta.content or "" async for piece in stream if piece.choices])

        leaver = asyncio.create_task(leave_midway(server.url))
        answers = await asyncio.gather(*map(one, QUESTIONS))
        await leaver
        return answers

    assert asyncio.run(all_at_once()) == alone


async def leave_midway(url: str) -> None:
    """A client that reads one piece of a long stream and hangs up."""
    body = {"messages": [{"role": "user", "content": "Write a long story."}], "max_tokens": 900, "stream": True}
    async with (
        httpx.AsyncClient(timeout=300) as client,
        client.stream("POST", f"{url}/v1/chat/completions", json=body) as r,
    ):
        async for _ in r.aiter_lines():
            return


def test_a_client_killed_midway_frees_its_slot(server: Any) -> None:
    parts = urlsplit(server.url)
    body = json.dumps(
        {"messages": [{"role": "user", "content": "Write a long story."}], "max_tokens": 900, "stream": True}
    )
    connection = socket.create_connection((parts.hostname, parts.port))
    head = [
        "POST /v1/chat/completions HTTP/1.1",
        "host: x",
        "content-type: application/json",
        f"content-length: {len(body)}",
    ]
    connection.sendall("\r\n".join([*head, "", body]).encode())
    said = b""
    while b"\r\n" not in said:
        said += connection.recv(100)
    assert b" 200 " in said
    connection.close()
    for _ in range(600):
        if "rekindle_running 0.0" in server.get("/metrics").text.replace(
            "rekindle_running_requests", "rekindle_running"
        ):
            return
    pytest.fail("the slot is still taken: " + server.get("/metrics").text)


def test_it_answers_where_triton_is_not_installed() -> None:
    """As after ./scripts/serve on a machine without a GPU: the tests' own environment has it."""
    command = "import sys; sys.modules['triton'] = None; from rekindle.cli import main; main()"
    arguments = ["generate", "The capital of France is", "--max-tokens", "3", "--temperature", "0"]
    done = subprocess.run([sys.executable, "-c", command, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr

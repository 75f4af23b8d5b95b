"""A conversation with a real engine whose template drops thinking: nothing is computed while a client waits but what
it has just said."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from rekindle.api import Guard, ModelHost, create_app
from rekindle.build import Built, Preset, TextOptions, make_sources
from rekindle.config import Config

PATIENCE = 60.0  # seconds for what must happen
FRAME = 12  # tokens that the template writes around a message and before an answer
QUESTIONS = [
    "Tell me a long story about a river that flows from the mountains down to the sea.",
    "What lives in that river, and what do the people on its banks do all day?",
    "And when winter comes and the water freezes over, where do they all go?",
    "Do they come back in spring? Say more about the first of them to return.",
]


class House:
    """One server over one engine, and a conversation with it."""

    def __init__(self, built: Built, host: ModelHost) -> None:
        self.built = built
        self.client = TestClient(create_app(host, Guard()))
        self.prepared = 0
        self.spelled_unusually = False

    def ask(self, messages: list[dict[str, Any]], question: str) -> dict[str, Any]:
        """One turn, appended to the messages. A random model hardly ever ends its thinking, so it is encouraged."""
        messages.append({"role": "user", "content": question})
        closing = self.built.model.tokenizer.id_of("</think>")
        body = {"messages": messages, "max_tokens": 40, "seed": len(messages), "logit_bias": {str(closing): 4.5}}
        answer = self.client.post("/v1/chat/completions", json={**body, "return_token_ids": True}).json()
        choice = answer["choices"][0]
        given = choice["message"]
        messages.append({name: given[name] for name in ("role", "content", "reasoning_content") if name in given})
        kept = given["content"]
        encoded = self.built.model.tokenizer.encode(kept)
        self.spelled_unusually |= choice["token_ids"][-len(encoded) :] != encoded
        return answer["rekindle"]

    def wait_until_prepared(self) -> None:
        self.prepared += 1
        deadline = time.monotonic() + PATIENCE
        line = f'rekindle_preparations_total{{outcome="prepared"}} {float(self.prepared)}'
        while line not in (page := self.client.get("/metrics").text):
            assert time.monotonic() < deadline, [it for it in page.splitlines() if "preparations" in it]

    def length(self, text: str) -> int:
        return len(self.built.model.tokenizer.encode(text))


@contextmanager
def open_house(golden: Path, cache: Path | None = None, **switches: bool) -> Iterator[House]:
    config = Config(
        model=golden / "tiny-qwen35-f16.gguf",
        devices=("cpu",),
        context=2048,
        sequences=2,
        threads=1,
        cache_ram=256 << 20,
        cache_dir=cache,
        cache_disk=256 << 20,
    )
    (source,) = make_sources([Preset(config)], TextOptions(**switches))
    host = ModelHost([source]).start()
    try:
        # As a context manager the client keeps one event loop for all requests, as a server does.
        assert source.built is not None
        house = House(source.built, host)
        with house.client:
            yield house
    finally:
        host.stop()


def test_a_turn_computes_its_new_message_only_though_thinking_is_dropped(golden: Path, tmp_path: Path) -> None:
    messages: list[dict[str, Any]] = []
    with open_house(golden, tmp_path) as house:
        for turn, question in enumerate(QUESTIONS[:3]):
            report = house.ask(messages, question)
            if turn:
                assert report["computed"] <= house.length(question) + FRAME, report
            house.wait_until_prepared()
        assert any(message.get("reasoning_content") for message in messages), "there was thinking to drop"
        assert house.spelled_unusually, "and some answer whose ids are not those of its text"
    with open_house(golden, tmp_path) as house:
        report = house.ask(messages, QUESTIONS[3])
        assert report["restored"]["disk"] > 0
        assert report["computed"] <= house.length(QUESTIONS[3]) + FRAME, "the memory is gone, the ids are not"


@pytest.mark.parametrize("switches", [{"prepare_next": False}, {"remember_turns": False, "prepare_next": False}])
def test_without_preparation_the_answer_is_computed_again_and_without_memory_too(
    golden: Path, switches: dict[str, bool]
) -> None:
    messages: list[dict[str, Any]] = []
    with open_house(golden, **switches) as house:
        house.ask(messages, QUESTIONS[0])
        report = house.ask(messages, QUESTIONS[1])
        shown = messages[1]["content"].rpartition("</think>")[2].strip()
        assert report["computed"] > house.length(QUESTIONS[1]) + FRAME / 2 + house.length(shown) / 2
        assert "rekindle_preparations_total{" not in house.client.get("/metrics").text

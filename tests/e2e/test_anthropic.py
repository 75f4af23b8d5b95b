"""The official client of Anthropic's API and a real server: what it counts is what the engine did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from anthropic import Anthropic
from support.server import StartServer

BUDGET, LENGTH = 3, 9  # tokens of thinking; of the answer, with three that close it
THINKING: Any = {"type": "enabled", "budget_tokens": BUDGET}
SYSTEM: Any = [{"type": "text", "text": "You are brief. " * 12, "cache_control": {"type": "ephemeral"}}]
QUESTION: Any = {"role": "user", "content": "Which river is the longest one?"}
TOOLS: Any = [{"name": "look", "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}}}]
GREEDY = {"temperature": 0}  # the client has no field for it any more
ASKED: Any = {"model": "m", "system": SYSTEM, "tools": TOOLS, "messages": [QUESTION], "thinking": THINKING}


@pytest.fixture(scope="module")
def client(start_server: StartServer, golden: Path) -> Anthropic:
    options = ("--context", "2048", "--sequences", "2", "--threads", "1", "--cache-ram", "256MiB", "--no-prepare-next")
    server = start_server(golden / "tiny-qwen35-f16.gguf", *options)
    return Anthropic(base_url=server.url, api_key="unused", max_retries=0, timeout=120)


def prompt_length(usage: Any) -> int:
    return usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens


def test_a_prompt_is_counted_and_restored_whole_and_streamed(client: Anthropic) -> None:
    counted = client.messages.count_tokens(**ASKED).input_tokens
    first = client.messages.create(**ASKED, max_tokens=40, extra_body=GREEDY)
    assert prompt_length(first.usage) == counted
    assert (first.usage.cache_read_input_tokens, first.usage.input_tokens) == (0, 0), "all of it is in snapshots now"
    assert [block.type for block in first.content] == ["thinking", "text"], "the budget closed the thinking"
    assert first.model_extra is not None and first.model_extra["rekindle"]["thinking_closed_after"] == BUDGET
    assert first.stop_reason == "max_tokens"

    with client.messages.stream(**ASKED, max_tokens=40, extra_body=GREEDY) as stream:
        again = stream.get_final_message()
    assert [block.to_dict() for block in again.content] == [block.to_dict() for block in first.content]
    assert again.usage.cache_read_input_tokens == counted


def test_thinking_and_text_come_back_as_the_tokens_that_were_drawn(client: Anthropic) -> None:
    """A random model writes halves of characters, which no client can send back, and blanks at both ends, which its
    template trims; not in every answer, though."""
    result = {"type": "tool_result", "tool_use_id": "none", "content": "It is a long way."}
    reminder: Any = {"role": "system", "content": "<total_tokens>950</total_tokens>"}
    for number in range(40):
        asked: Any = {"role": "user", "content": f"Which river is the longest one? {number}"}
        first = client.messages.create(**ASKED | {"messages": [asked]}, max_tokens=LENGTH, extra_body=GREEDY)
        known = prompt_length(first.usage) + LENGTH - 1  # the last token is in no state
        messages = [asked, {"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
        second = client.messages.create(**ASKED | {"messages": [*messages, reminder]}, max_tokens=1)
        if second.usage.cache_read_input_tokens == known:
            break
    assert second.usage.cache_read_input_tokens == known
    third = client.messages.create(**ASKED | {"messages": [*messages, reminder, reminder]}, max_tokens=1)
    newest = prompt_length(second.usage) - third.usage.cache_read_input_tokens
    assert newest < 8, "a reminder in the middle moves nothing: all but the opening of the answer is known"


def test_a_system_prompt_is_read_by_another_conversation(client: Anthropic) -> None:
    other = ASKED | {"messages": [{"role": "user", "content": "What is the time?"}]}
    client.messages.create(**ASKED, max_tokens=1)
    usage = client.messages.create(**other, max_tokens=1).usage
    assert 0 < usage.cache_read_input_tokens < prompt_length(usage)

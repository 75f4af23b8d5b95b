"""What a client changed in the past of a conversation is named by its place and by the client's own words."""

from __future__ import annotations

from typing import Any

import pytest
from support.vocabulary import qwen_vocabulary

from rekindle.api.changes import changed
from rekindle.api.model_text import ModelText
from rekindle.engine.types import Divergence
from rekindle.prompt import common_length
from rekindle.text import ChatTemplate, Tokenizer

SYSTEM = "You help.\nToday is {}.\nWork well."
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": SYSTEM.format("2026-11-16")},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Status:\n950 tokens left\nGo on."},
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "Thanks."},
]


@pytest.fixture(scope="module")
def text() -> ModelText:
    metadata = qwen_vocabulary()
    tokenizer = Tokenizer.from_gguf(metadata)
    return ModelText(tokenizer, ChatTemplate.from_gguf(metadata, tokenizer))


def told(text: ModelText, before: Any, after: Any, tools: tuple[Any, Any] = (None, None)) -> str | None:
    was, now = text.render(before, tools[0], True), text.render(after, tools[1], True)
    at = common_length(was.tokens, now.tokens)
    tokens = [prompt.tokens[at] if at < len(prompt.tokens) else None for prompt in (now, was)]
    return changed(now, Divergence(at, *tokens), text)


def with_(index: int, content: str) -> list[dict[str, Any]]:
    return [message | ({"content": content} if i == index else {}) for i, message in enumerate(TALK)]


def test_a_line_of_the_system_prompt_is_named_with_a_guess(text: ModelText) -> None:
    said = told(text, TALK, with_(0, SYSTEM.format("2026-11-17")))
    assert said == "the system prompt changed at line 2 (a date or a time?): 'Today is 2026-11-17.'"


def test_of_another_conversation_nothing_was_changed(text: ModelText) -> None:
    assert told(text, TALK, with_(0, "You are a poet.\nRhyme.")) is None
    said = told(text, with_(0, "Today is 2026-11-16.\nBe kind."), with_(0, "Today is 2026-11-17.\nBe kind."))
    assert said == "the system prompt changed at line 1 (a date or a time?): 'Today is 2026-11-17.'"


def test_a_first_line_of_which_no_word_was_seen_before_was_not_changed_though_it_looks_like_a_date(
    text: ModelText,
) -> None:
    assert told(text, TALK, with_(0, "Today is 2026-11-18. You are brief.")) is None


def test_only_the_clients_own_words_are_shown(text: ModelText) -> None:
    said = told(text, with_(3, "Be kind.\nAlways."), with_(3, "Be kind.\nAlways be rude."))
    assert said == "message 4 (user) changed at line 2: 'Always be rude.'"


def test_a_line_of_a_message_is_named(text: ModelText) -> None:
    said = told(text, TALK, with_(3, "Status:\n870 tokens left\nGo on."))
    assert said == "message 4 (user) changed at line 2 (a counter?): '870 tokens left'"


def test_a_tool_that_changed_is_named_as_one(text: ModelText) -> None:
    tools = [[{"type": "function", "function": {"name": name}}] for name in ("read", "write")]
    said = told(text, TALK, TALK, (tools[0], tools[1]))
    assert said is not None and said.startswith("the list of tools changed at line")
    assert "write" in said and "read" not in said, "what it was before may be another client's"


def test_a_conversation_that_grows_has_changed_nothing(text: ModelText) -> None:
    assert told(text, TALK[:4], TALK) is None
    assert told(text, TALK, with_(5, "And now?")) is None, "the newest message is new"
    assert told(text, TALK, with_(2, "Hallo.")) is None, "templates rewrite answers of the past themselves"
    assert changed(text.render(TALK, None, True), None, text) is None

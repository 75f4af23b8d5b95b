"""Texts that were encoded before give the ids that they would give now."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rekindle.api.model_text import ModelText
from rekindle.text import ChatTemplate, Tokenizer, TooManyTokens, TurnMemory
from rekindle.text.encoded import LONG, EncodedTexts

TEXTS = [
    "",
    "a word",
    "x" * (LONG - 1),
    "x" * LONG,
    "one two three. " * 200,
    "Grüße, 世界 🎉\n" * 50,
    "\ud83d half " * 60,
]


class CountingTokenizer:
    """A tokenizer that notes what it is asked to encode."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *rest: Any) -> Any:
        self.texts.append(text)
        return self._tokenizer.encode(text, *rest)

    def encode_with_ends(self, text: str, *rest: Any) -> Any:
        self.texts.append(text)
        return self._tokenizer.encode_with_ends(text, *rest)


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_has_the_tokenizers_ids_and_ends_however_often_it_is_asked_for(text: str, golden: Tokenizer) -> None:
    texts = EncodedTexts(1 << 20)
    for _ in range(2):
        assert list(texts.encode(text, golden)) == golden.encode(text)
        ids, ends = texts.encode_with_ends(text, golden)
        assert (list(ids), list(ends)) == golden.encode_with_ends(text)


def test_a_next_turn_encodes_only_what_is_new(golden_metadata: dict[str, Any], golden: Tokenizer) -> None:
    counting: Any = CountingTokenizer(golden)
    text = ModelText(counting, ChatTemplate.from_gguf(golden_metadata, counting), {"": TurnMemory()})
    dated = {"role": "system", "content": "Be brief. " * 40 + "\nToday's date: 2026-01-02\n" + "Be kind. " * 40}
    first = [dated, {"role": "user", "content": "What is that? " * 40}]
    text.render(first, None, True)
    counting.texts.clear()
    new = [{"role": "assistant", "content": "A thing."}, {"role": "user", "content": "And this? " * 40}]
    prompt = text.render([*first, *new], None, True)
    assert counting.texts == ["assistant\nA thing.", "user\n" + "And this? " * 39 + "And this?"]
    cold = ModelText(golden, ChatTemplate.from_gguf(golden_metadata, golden))
    assert prompt == cold.render([*first, *new], None, True)


@pytest.mark.parametrize("encode", [EncodedTexts.encode, EncodedTexts.encode_with_ends])
def test_a_known_text_beyond_the_limit_is_refused_like_a_new_one(
    encode: Callable[..., object], golden: Tokenizer
) -> None:
    texts, text = EncodedTexts(1 << 20), "one two three. " * 200
    length = len(texts.encode(text, golden))
    encode(texts, text, golden, length)
    with pytest.raises(TooManyTokens):
        encode(texts, text, golden, length - 1)


def test_a_name_space_finds_nothing_of_another(golden_metadata: dict[str, Any], golden: Tokenizer) -> None:
    counting: Any = CountingTokenizer(golden)
    memories = {"a": TurnMemory(), "b": TurnMemory()}
    text = ModelText(counting, ChatTemplate.from_gguf(golden_metadata, counting), memories)
    messages = [{"role": "user", "content": "What is that? " * 40}]
    for space in memories:
        counting.texts.clear()
        text.render(messages, None, True, space)
        assert any(len(each) < LONG for each in counting.texts)
        assert any(len(each) >= LONG for each in counting.texts)


def test_encoded_texts_stay_in_their_budget(golden: Tokenizer) -> None:
    texts = EncodedTexts(20_000)
    for number in range(50):
        for times in (1, 100):
            texts.encode(f"{number} and so on. " * times, golden)
            assert 0 < texts.size <= 20_000

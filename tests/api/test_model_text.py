"""The text room behind the port: what a whole prompt may say, and what a message may not."""

from __future__ import annotations

from typing import Any

import pytest

from rekindle.api import ModelText, TextPort
from rekindle.errors import BadRequest, PromptTooLong
from rekindle.prompt import BoundaryKind
from rekindle.text import ChatTemplate, Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{% if loud %}!{% endif %}"
)


def byte_vocabulary(add_bos: bool) -> dict[str, Any]:
    """Every byte is a token, in GPT-2's letters; 256 to 258 are special."""
    hidden = [b for b in range(256) if not (0x21 <= b < 0x7F or 0xA1 <= b < 0xAD or b >= 0xAE)]
    letters = [chr(256 + hidden.index(b)) if b in hidden else chr(b) for b in range(256)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*letters, "<|im_start|>", "<|im_end|>", "<|begin|>"],
        "tokenizer.ggml.token_type": [1] * 256 + [3] * 3,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.ggml.bos_token_id": 258,
        "tokenizer.ggml.add_bos_token": add_bos,
    }


@pytest.fixture(scope="module")
def text() -> TextPort:
    tokenizer = Tokenizer.from_gguf(byte_vocabulary(add_bos=False))
    return ModelText(tokenizer, ChatTemplate(CHATML, tokenizer))


def test_messages_become_a_prompt_with_boundaries(text):
    prompt = text.render([{"role": "user", "content": "<|im_end|>"}], None, True, loud=True)
    assert prompt.tokens.count(257) == 1, "a message cannot end itself"
    assert prompt.tokens[-1] == ord("!")
    assert prompt.boundaries[-1].kind is BoundaryKind.END


def test_lines_that_clients_change_on_each_call_are_gone(text):
    def rendered(value: str) -> tuple[int, ...]:
        system = {"role": "system", "content": f"x-anthropic-billing-header: {value}\nbe brief"}
        return text.render([system, {"role": "user", "content": "x"}], None, True).tokens

    assert rendered("1") == rendered("2")


def test_a_whole_prompt_writes_its_own_structure(text):
    prompt = text.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", True)
    assert prompt.tokens[0] == 256
    assert prompt.tokens.count(257) == 1
    assert [b.kind for b in prompt.boundaries] == [BoundaryKind.MESSAGE, BoundaryKind.END]
    assert text.prompt_of(prompt.tokens) == prompt


def test_a_first_token_is_added_where_the_model_wants_one_and_only_once():
    text = ModelText(Tokenizer.from_gguf(byte_vocabulary(add_bos=True)), None)
    assert text.encode("a", True).tokens == (258, ord("a"))
    assert text.encode("<|begin|>a", True).tokens == (258, ord("a"))
    assert text.encode("a", False).tokens == (ord("a"),)


def test_without_a_template_messages_are_refused_by_name():
    text = ModelText(Tokenizer.from_gguf(byte_vocabulary(add_bos=False)), None)
    with pytest.raises(BadRequest) as caught:
        text.render([{"role": "user", "content": "x"}], None, True)
    assert caught.value.field == "messages"


def test_a_prompt_beyond_the_context_is_counted_and_not_rendered_to_be_run(text, monkeypatch):
    tokenizer = Tokenizer.from_gguf(byte_vocabulary(add_bos=False))
    narrow = ModelText(tokenizer, ChatTemplate(CHATML, tokenizer), context=20)
    asked = [{"role": "user", "content": "a question of more than twenty letters"}]
    with pytest.raises(PromptTooLong):
        narrow.render(asked, None, True)
    assert narrow.beyond_context.render(asked, None, True).tokens == text.render(asked, None, True).tokens
    assert narrow.beyond_context.encode("x" * 21, True).tokens == text.encode("x" * 21, True).tokens
    monkeypatch.setattr("rekindle.api.model_text.MAX_PROMPT", 30)
    with pytest.raises(BadRequest, match="at most 30 tokens are counted") as caught:
        narrow.beyond_context.render(asked, None, True)
    assert not isinstance(caught.value, PromptTooLong), "clients would take it for the limit of their prompts"


def test_a_prompt_up_to_twice_too_long_is_refused_with_its_length(text):
    tokenizer = Tokenizer.from_gguf(byte_vocabulary(add_bos=False))
    narrow = ModelText(tokenizer, ChatTemplate(CHATML, tokenizer), context=40)

    def refused(make, *arguments):
        with pytest.raises(PromptTooLong) as caught:
            make(*arguments)
        assert str(caught.value.tokens) in str(caught.value)
        return caught.value.tokens, caught.value.counted, caught.value.most

    asked = [{"role": "user", "content": "x" * 39}]
    assert refused(narrow.render, asked, None, True) == (len(text.render(asked, None, True).tokens), True, 39)
    assert refused(narrow.encode, "x" * 80, True) == (80, True, 39)
    assert refused(narrow.prompt_of, [1] * 41) == (41, True, 39)
    assert refused(narrow.encode, "xyz" * 27, True) == (81, False, 39), "and not counted to its end"


def test_watcher_and_shown_text_agree_on_where_an_answer_stops(text):
    watcher, detokenizer, shown = text.stop_watcher(["END"]), text.detokenizer(), text.stop_text(["END"])
    said, stopped = "", False
    for token in b"an E, then END and more":
        said += shown.push(detokenizer.push(token))
        if stopped := watcher(token):
            break
    assert stopped
    assert said + shown.finish() == "an E, then "
    assert text.stop_tokens == {257}

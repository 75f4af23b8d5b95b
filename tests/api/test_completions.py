"""The completions route: prompts as text and as tokens, echoes, legacy log-probabilities."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import httpx
import pytest

from rekindle.api.dialects.openai_completions import CompletionBody
from rekindle.api.parsing import parse
from rekindle.errors import BadRequest


def post(house: Any, **body: Any) -> dict[str, Any]:
    response = httpx.post(house.url + "/v1/completions", json=body, timeout=20)
    assert response.status_code == 200, response.text
    return response.json()


def chunks_of(house: Any, **body: Any) -> list[dict[str, Any]]:
    text = httpx.post(house.url + "/v1/completions", json={**body, "stream": True}, timeout=20).text
    blocks = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
    assert blocks.pop() == "[DONE]"
    return [json.loads(block) for block in blocks]


def test_text_prompt(house):
    answer = house.client().completions.create(model="m", prompt="say(hello)")
    assert answer.choices[0].text == "hello"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.usage.prompt_tokens == len("say(hello)")


def test_token_prompt_reaches_the_engine_unchanged(house):
    tokens = [256, *b"say(x)", 255]
    answer = house.client().completions.create(model="m", prompt=tokens)
    assert answer.choices[0].text == "x"
    assert house.engine.requests[-1].prompt.tokens == tuple(tokens)


@pytest.mark.parametrize("prompts", [["say(a)", "say(b)"], [list(b"say(a)"), list(b"say(b)")]])
def test_several_prompts_and_n_give_choices_in_order(house, prompts):
    answer = house.client().completions.create(model="m", prompt=prompts, n=2, seed=3)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(0, "a"), (1, "a"), (2, "b"), (3, "b")]
    assert [request.sampling.seed for request in house.engine.requests[-4:]] == [3, 4, 3, 4]
    assert answer.usage.prompt_tokens == 12
    assert answer.usage.completion_tokens == 8


def test_add_special_tokens_reaches_the_text_room(house):
    post(house, prompt="say(a)", add_special_tokens=False)
    assert house.engine.requests[-1].prompt.tokens[0] == 0
    post(house, prompt="say(a)")
    assert house.engine.requests[-1].prompt.tokens[0] == ord("s")


def test_stream_of_the_official_client(house):
    stream = house.client().completions.create(
        model="m", prompt="say(hello)", stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == "hello"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 6


def test_legacy_logprobs_are_parallel_lists_with_offsets_into_the_text(house):
    choice = post(house, prompt="say(aéb)", logprobs=2)["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert logprobs["token_logprobs"] == [-0.97, -1.95, -1.69, -0.98]
    assert logprobs["top_logprobs"][0] == {"a": -0.97, "b": -0.98}
    assert logprobs["text_offset"] == [0, 1, 1, 2]
    assert choice["text"] == "aéb"


def test_zero_logprobs_report_the_drawn_token_only(house):
    logprobs = post(house, prompt="say(a)", logprobs=0)["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"a": -0.97}]


def test_echo_puts_the_prompt_before_the_answer(house):
    assert post(house, prompt="é say(a)", echo=True)["choices"][0]["text"] == "é say(a)a"
    chunks = chunks_of(house, prompt="é say(a)", echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "é say(a)a"
    assert house.engine.requests[-1].prompt_logprobs is None


def test_echo_with_logprobs_scores_the_prompt(house):
    body = {"prompt": "é say(ab)", "echo": True, "logprobs": 1}
    choice = post(house, **body)["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "é say(ab)ab"
    assert len(logprobs["tokens"]) == len("é say(ab)".encode()) + 2
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][2] == -0.32
    assert [choice["text"][at] for at in logprobs["text_offset"][2:]] == list(" say(ab)ab")
    parts = [c["choices"][0]["logprobs"] for c in chunks_of(house, **body) if c["choices"][0]["logprobs"]]
    for name, values in logprobs.items():
        assert list(chain.from_iterable(part[name] for part in parts)) == values


def test_no_answer_at_all_still_scores_the_prompt(house):
    choice = post(house, prompt="say(ab)", echo=True, logprobs=0, max_tokens=0)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("say(ab)", "length")
    assert len(choice["logprobs"]["tokens"]) == 7


def test_prompt_logprobs_come_by_token_id(house):
    rows = post(house, prompt="xab", prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    assert rows[0] is None
    assert rows[1] == {
        "97": {"logprob": -0.97, "rank": 1, "decoded_token": "a"},
        "98": {"logprob": -0.98, "rank": 2, "decoded_token": "b"},
    }
    assert len(rows) == 3


def test_token_ids_are_returned_when_asked(house):
    choice = post(house, prompt="say(ab)", return_token_ids=True)["choices"][0]
    assert choice["token_ids"] == [97, 98, 256]
    assert choice["prompt_token_ids"] == list(b"say(ab)")
    chunks = [c["choices"][0] for c in chunks_of(house, prompt="say(ab)", return_token_ids=True)]
    assert chunks[0]["prompt_token_ids"] == list(b"say(ab)")
    assert list(chain.from_iterable(c.get("token_ids", []) for c in chunks)) == [97, 98, 256]


class SlowBody(CompletionBody):
    """The same body, whose ids are decoded and checked like all other values."""

    token_fields = frozenset()


PROMPTS = (
    *("[1]", "[1, 2,3 ]", " [0]", "[2147483647]", "[-0]", "[[1], [2, 3]]", '["a"]', '"a"', '["a", 1]', "[]", "[[]]"),
    *("[true]", "[1.0]", "[1, 2.5]", "[1e2]", "[-1]", "[2147483648]", "[9223372036854775808]", "[1" + "0" * 400 + "]"),
    *("[null]", "null", "{}", "7", "[1, [2]]", '[1, "2"]', "[NaN]", "[1e999]", "[[" + "1," * 5 + "1]]", "[{}]"),
)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_ids_that_are_decoded_at_once_are_taken_and_refused_like_all_others(prompt: str) -> None:
    body = f'{{"prompt": {prompt}, "max_tokens": 4}}'.encode()
    outcomes = []
    for kind in (CompletionBody, SlowBody):
        try:
            outcomes.append(parse(kind, body).prompt)
        except BadRequest as error:
            outcomes.append((str(error), error.field))
    assert outcomes[0] == outcomes[1]

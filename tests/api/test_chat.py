"""The chat route, as the official client sees it."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import httpx
import pytest

from rekindle.api import app
from rekindle.api.cards import CAUTIOUS

ASK = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say(Hé 🙂!)"}]


def lines_of(house: Any, path: str, body: dict[str, Any]) -> list[Any]:
    """Every event of a stream, parsed; [DONE] stays a string, heartbeats are left out."""
    response = httpx.post(house.url + path, json={**body, "stream": True}, timeout=20)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    data = [block.removeprefix("data: ") for block in blocks if not block.startswith(":")]
    return [each if each == "[DONE]" else json.loads(each) for each in data]


def test_answer_has_the_text_the_engine_said(house):
    answer = house.client().chat.completions.create(model="anything", messages=ASK)
    assert answer.choices[0].message.content == "Hé 🙂!"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model == "anything"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.system_fingerprint == "fp_abcdef012345"


def test_a_request_without_a_model_is_answered_by_the_served_one(house):
    answer = httpx.post(house.url + "/v1/chat/completions", json={"messages": ASK}).json()
    assert answer["model"] == "paper-9b"


def test_usage_and_report_are_the_engines_numbers(house):
    answer = house.client().chat.completions.create(model="m", messages=ASK)
    finished = house.last_finished()
    assert (
        answer.usage.prompt_tokens
        == finished.prompt_tokens
        == len(b"system:be brief|user:say(H\xc3\xa9 \xf0\x9f\x99\x82!)|assistant:")
    )
    assert answer.usage.completion_tokens == finished.completion_tokens == len("Hé 🙂!".encode()) + 1
    assert answer.usage.total_tokens == finished.prompt_tokens + finished.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == finished.cache.restored
    report = answer.model_extra["rekindle"]
    assert report == {
        "restored": finished.cache.restored_from,
        "computed": finished.cache.computed,
        "published": 5,
        "sparse": False,
        "miss": f"no snapshot reaches further into the prompt than position {finished.cache.restored}",
        "divergence": None,
        "draft": {
            "drafter": "lookup",
            "off": None,
            "blocks": 4,
            "proposed": 20,
            "accepted": 9,
            "mean_accepted": 2.25,
            "cold_from": None,
        },
        "timings_ms": {"queued": 1.0, "prefill": 250.0, "decode": 500.0},
        "max_tokens": house.engine.requests[-1].max_tokens,
        "seed": house.engine.requests[-1].sampling.seed,
        "ignored_fields": [],
    }


def test_stream_is_role_then_content_then_finish_then_done(house):
    *chunks, done = lines_of(house, "/v1/chat/completions", {"messages": ASK})
    assert done == "[DONE]"
    role, *contents, finish = [chunk["choices"][0] for chunk in chunks]
    assert role == {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    assert "".join(choice["delta"]["content"] for choice in contents) == "Hé 🙂!"
    assert all(choice["finish_reason"] is None for choice in contents)
    assert finish == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert not any("usage" in chunk for chunk in chunks)
    assert ["rekindle" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_stream_with_usage_ends_in_a_chunk_without_choices(house):
    body = {"messages": ASK, "stream_options": {"include_usage": True}}
    *chunks, last, done = lines_of(house, "/v1/chat/completions", body)
    assert done == "[DONE]"
    assert all(chunk["usage"] is None and "rekindle" not in chunk for chunk in chunks)
    assert last["choices"] == []
    finished = house.last_finished()
    assert last["usage"]["prompt_tokens"] == finished.prompt_tokens
    assert last["usage"]["completion_tokens"] == finished.completion_tokens
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] == finished.cache.restored
    assert last["rekindle"]["computed"] == finished.cache.computed


def test_official_client_reads_the_stream(house):
    stream = house.client().chat.completions.create(
        model="m", messages=ASK, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hé 🙂!"
    assert chunks[-1].usage.total_tokens > 0


def test_every_sampling_field_reaches_the_engine(house):
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.3,
        "presence_penalty": -0.4,
        "seed": 17,
    }
    body = {
        "messages": ASK,
        **fields,
        "logit_bias": {"65": -100, "66": 2.5},
        "max_completion_tokens": 2,
        "max_tokens": 9,
    }
    answer = httpx.post(house.url + "/v1/chat/completions", json=body).json()
    request = house.engine.requests[-1]
    assert {name: getattr(request.sampling, name) for name in fields} == fields
    assert request.sampling.logit_bias == {65: -100.0, 66: 2.5}
    assert request.max_tokens == 2
    assert request.stop_tokens == {256}
    assert not request.ignore_stop_tokens
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["rekindle"]["ignored_fields"] == []


def test_null_fields_are_absent_fields(house):
    names = ["temperature", "top_p", "top_k", "stop", "logit_bias", "n", "seed", "tools", "response_format", "logprobs"]
    response = httpx.post(house.url + "/v1/chat/completions", json={"messages": ASK, **dict.fromkeys(names)})
    assert response.status_code == 200
    assert house.engine.requests[-1].sampling.temperature == CAUTIOUS.temperature


@pytest.mark.parametrize("none", [{}, {"seed": -1}], ids=["left out", "-1"])
def test_requests_without_a_seed_get_different_ones_and_are_told(house, none):
    """-1 is none for other servers, whose clients send it."""
    client = house.client()
    answers = [client.chat.completions.create(model="m", messages=ASK, **none) for _ in range(3)]
    seeds = {answer.model_extra["rekindle"]["seed"] for answer in answers}
    assert len(seeds) == 3 and max(seeds) < 2**53
    assert {request.sampling.seed for request in house.engine.requests[-3:]} == seeds


def test_an_answer_may_take_what_the_context_leaves(house):
    house.client().chat.completions.create(model="m", messages=ASK)
    request = house.engine.requests[-1]
    assert request.max_tokens + len(request.prompt.tokens) == 30_000
    answer = house.client().chat.completions.create(model="m", messages=ASK, max_tokens=10**6)
    assert house.engine.requests[-1].max_tokens == request.max_tokens
    assert answer.model_extra["rekindle"]["max_tokens"] == request.max_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_before_itself(house, stream):
    messages = [{"role": "user", "content": "say(one two END three)"}]
    answer = house.client().chat.completions.create(model="m", messages=messages, stop=["END", "zzz"], stream=stream)
    if stream:
        chunks = list(answer)
        text, reason = "".join(c.choices[0].delta.content or "" for c in chunks), chunks[-1].choices[0].finish_reason
    else:
        text, reason = answer.choices[0].message.content, answer.choices[0].finish_reason
    assert (text, reason) == ("one two ", "stop")
    assert house.last_finished().completion_tokens == len("one two END")


def test_text_that_only_began_like_a_stop_string_is_shown(house):
    messages = [{"role": "user", "content": "say(one EN)"}]
    answer = house.client().chat.completions.create(model="m", messages=messages, stop="END")
    assert answer.choices[0].message.content == "one EN"


def test_half_a_character_at_the_end_is_not_lost(house):
    answer = house.client().chat.completions.create(
        model="m", messages=[{"role": "user", "content": "say(a🙂)"}], max_tokens=3
    )
    assert answer.choices[0].message.content == "a\ufffd"
    assert answer.choices[0].finish_reason == "length"


def test_logprobs_have_tokens_bytes_and_alternatives(house):
    messages = [{"role": "user", "content": "say(hé)"}]
    answer = house.client().chat.completions.create(model="m", messages=messages, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert [entry.bytes for entry in content] == [[104], [0xC3], [0xA9]]
    assert content[0].token == "h"
    assert content[0].logprob == pytest.approx(-1.04)
    assert [(top.token, top.logprob) for top in content[0].top_logprobs] == [("h", -1.04), ("i", -1.05)]


def test_logprobs_of_a_stream_are_those_of_the_whole(house):
    body = {"messages": [{"role": "user", "content": "say(hé)"}], "logprobs": True}
    whole = httpx.post(house.url + "/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    chunks = lines_of(house, "/v1/chat/completions", body)[:-1]
    parts = [c["choices"][0]["logprobs"]["content"] for c in chunks if c["choices"][0]["logprobs"]]
    assert list(chain(*parts)) == whole
    assert whole[0]["top_logprobs"] == []


def test_no_seed_of_the_servers_own_is_beyond_what_every_client_reads(house, monkeypatch):
    """JavaScript's numbers are exact up to 2^53; a client's own seed stays what it was."""
    monkeypatch.setattr("secrets.randbits", lambda bits: 2**bits - 1)
    monkeypatch.setattr("secrets.randbelow", lambda bound: bound - 1)
    reports = house.client().chat.completions.create(model="m", messages=ASK, n=3).model_extra["rekindle"]
    seeds = [reports["seed"], *(report["seed"] for report in reports["others"])]
    assert seeds == [request.sampling.seed for request in house.engine.requests[-3:]]
    assert max(seeds) < 2**53 and len(set(seeds)) == 3
    own = house.client().chat.completions.create(model="m", messages=ASK, seed=2**62 + 1).model_extra["rekindle"]
    assert own["seed"] == 2**62 + 1


def test_n_answers_have_neighbouring_seeds_and_count_the_prompt_once(house):
    answer = house.client().chat.completions.create(model="m", messages=ASK, n=3, seed=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [request.sampling.seed for request in house.engine.requests[-3:]] == [5, 6, 7]
    finished = house.last_finished()
    assert answer.usage.prompt_tokens == finished.prompt_tokens
    assert answer.usage.completion_tokens == 3 * finished.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == finished.cache.restored
    assert [report["seed"] for report in answer.model_extra["rekindle"]["others"]] == [6, 7]


def test_n_answers_stream_side_by_side(house):
    chunks = lines_of(house, "/v1/chat/completions", {"messages": ASK, "n": 3})[:-1]
    for index in range(3):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in mine) == "Hé 🙂!"
        assert mine[-1]["finish_reason"] == "stop"
    assert ["rekindle" in chunk for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_token_ids_are_returned_when_asked_stop_token_included(house):
    body = {"messages": [{"role": "user", "content": "say(ab)"}], "return_token_ids": True}
    choice = httpx.post(house.url + "/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["token_ids"] == [97, 98, 256]
    assert choice["prompt_token_ids"] == list(house.engine.requests[-1].prompt.tokens)
    chunks = [c["choices"][0] for c in lines_of(house, "/v1/chat/completions", body)[:-1]]
    assert chunks[0]["prompt_token_ids"] == choice["prompt_token_ids"]
    assert list(chain.from_iterable(c.get("token_ids", []) for c in chunks)) == [97, 98, 256]


def test_template_sees_messages_and_tools_as_sent(house):
    tools = [{"function": {"parameters": {"z": None, "a": 1}, "name": "f"}, "type": "function"}]
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"q": null}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"tool_calls": [call], "role": "assistant", "content": None},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    body = {
        "messages": messages,
        "tools": tools,
        "tool_choice": "required",
        "enable_thinking": False,
        "chat_template_kwargs": {"x": 1},
        "add_generation_prompt": False,
    }
    answer = httpx.post(house.url + "/v1/chat/completions", json=body).json()
    seen = house.text.rendered[-1]
    assert seen["messages"] == messages
    assert json.dumps(seen["tools"]) == json.dumps(tools), "the order of keys is the client's"
    assert (seen["generate"], seen["enable_thinking"], seen["tool_choice"], seen["x"]) == (False, False, "required", 1)
    assert answer["rekindle"]["ignored_fields"] == []


def test_fields_without_effect_are_named_and_harmless_ones_are_not(house):
    harmless = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
    }
    novel = {"temprature": 0.1, "reasoning": "high", "stream_options": {"chatty": True}}
    body = {"messages": ASK, "response_format": {"type": "text"}, **harmless, **novel}
    answer = httpx.post(house.url + "/v1/chat/completions", json=body).json()
    assert answer["rekindle"]["ignored_fields"] == ["temprature", "reasoning", "stream_options.chatty"]


def test_half_a_surrogate_pair_does_not_refuse_the_conversation(house):
    body = b'{"messages": [{"role": "user", "content": "cut \\ud83d"}, {"role": "user", "content": "\\ud83d\\ude42"}]}'
    response = httpx.post(
        house.url + "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert response.status_code == 200
    assert [m["content"] for m in house.text.rendered[-1]["messages"]] == ["cut \ufffd", "🙂"]


def test_ignore_eos_and_own_stop_tokens_reach_the_engine(house):
    body = {"messages": [{"role": "user", "content": "say(abcab)"}], "stop_token_ids": [99]}
    assert httpx.post(house.url + "/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"] == "ab"
    body = {"messages": [{"role": "user", "content": "say(ab)"}], "ignore_eos": True, "max_tokens": 4}
    choice = httpx.post(house.url + "/v1/chat/completions", json=body).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("ab", "length")


def test_the_token_loop_passes_before_a_request_is_read(house, monkeypatch):
    order, parsed = [], app._parsed

    async def passing():
        order.append("pass")

    async def reading(*arguments):
        order.append("read")
        return await parsed(*arguments)

    monkeypatch.setattr(app, "let_pass", passing)
    monkeypatch.setattr(app, "_parsed", reading)
    assert httpx.post(house.url + "/v1/chat/completions", json={"messages": ASK}).status_code == 200
    assert order == ["pass", "read"]

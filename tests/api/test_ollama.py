"""Ollama's API, as its own Python client sees it: whole and streamed alike."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx
import ollama
import pytest

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 3}}</tool_call>'
THOUGHT = "<think>\nRome, then.\n</think>\n\nIt is sunny."


def client(house: Any) -> ollama.Client:
    return ollama.Client(host=house.url)


def ask(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": f"say({text})"}]


def test_a_chat_is_answered_with_true_counts_and_durations(house: Any) -> None:
    answer = client(house).chat("paper-9b", ask("hello"))
    finished = house.last_finished()
    assert (answer.message.content, answer.done, answer.done_reason) == ("hello", True, "stop")
    assert (answer.prompt_eval_count, answer.eval_count) == (finished.prompt_tokens, finished.completion_tokens)
    assert (answer.prompt_eval_duration, answer.eval_duration) == (250_000_000, 500_000_000)
    assert answer.total_duration > 0
    assert answer.load_duration == 0


def test_streaming_is_the_default_and_lines_of_json(house: Any) -> None:
    answer = httpx.post(house.url + "/api/chat", json={"messages": ask("hello")})
    assert answer.headers["content-type"].startswith("application/x-ndjson")
    lines = [json.loads(line) for line in answer.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == "hello"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["rekindle"]["ignored_fields"] == []


@pytest.mark.parametrize("text", ["hello", THOUGHT, CALL, f"{THOUGHT}\n{CALL}{CALL}", CALL[:60], ""])
def test_whole_and_streamed_say_the_same(house: Any, text: str) -> None:
    options = {"num_predict": 1000}
    whole = client(house).chat("m", ask(text), tools=TOOLS, options=options).message
    content, thinking, calls = "", "", []
    for line in client(house).chat("m", ask(text), tools=TOOLS, options=options, stream=True):
        content += line.message.content or ""
        thinking += line.message.thinking or ""
        calls += line.message.tool_calls or []
    assert (content, thinking, calls) == (whole.content, whole.thinking or "", list(whole.tool_calls or []))


def test_half_a_character_in_a_call_costs_none_of_its_arguments(house: Any) -> None:
    half = '<tool_call>{"name": "weather", "arguments": {"city": "Rome \\ud83d", "days": 3}}</tool_call>'
    options = {"num_predict": 1000}
    whole = client(house).chat("m", ask(half), tools=TOOLS, options=options)
    streamed = client(house).chat("m", ask(half), tools=TOOLS, options=options, stream=True)
    found = [*whole.message.tool_calls, *(call for line in streamed for call in line.message.tool_calls or [])]
    assert [call.function.arguments for call in found] == [{"city": "Rome \ufffd", "days": 3}] * 2


def test_a_call_that_the_limit_cuts_off_is_text(house: Any) -> None:
    options = {"num_predict": 60}
    said = client(house).chat("m", ask(CALL), tools=TOOLS, options=options)
    assert (said.done_reason, said.message.content, said.message.tool_calls) == ("length", CALL[:60], None)
    parts = list(client(house).chat("m", ask(CALL), tools=TOOLS, options=options, stream=True))
    assert "".join(part.message.content or "" for part in parts) == CALL[:60]


def test_calls_and_thinking_come_back_as_they_were_given(house: Any) -> None:
    said = client(house).chat("m", ask(f"{THOUGHT}\n{CALL}"), tools=TOOLS, options={"num_predict": 1000}).message
    (call,) = said.tool_calls
    assert (call.function.name, dict(call.function.arguments)) == ("weather", {"city": "Rome", "days": 3})
    given = house.text.remembered[-1][2]
    client(house).chat("m", [*ask("x"), said, {"role": "tool", "tool_name": "weather", "content": "sunny"}])
    _, turn, result = house.text.rendered[-1]["messages"]
    assert (turn["content"], turn["reasoning_content"]) == (given["content"], given["reasoning_content"])
    assert turn["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"city": "Rome", "days": 3}}
    assert result == {"role": "tool", "name": "weather", "content": "sunny"}


def test_generate_takes_a_prompt_with_or_without_the_template(house: Any) -> None:
    answer = client(house).generate("m", "say(hello)", system="Be brief.")
    assert (answer.response, answer.done_reason) == ("hello", "stop")
    assert [message["role"] for message in house.text.rendered[-1]["messages"]] == ["system", "user"]
    before = len(house.text.rendered)
    assert client(house).generate("m", f"say({THOUGHT})", raw=True).response == THOUGHT
    streamed = client(house).generate("m", f"say({THOUGHT})", raw=True, stream=True)
    assert "".join(part.response for part in streamed) == THOUGHT
    assert len(house.text.rendered) == before, "a raw prompt is the whole prompt"
    thought = client(house).generate("m", f"say({THOUGHT})")
    assert (thought.response, thought.thinking) == ("It is sunny.", "Rome, then.")


def test_nothing_to_answer_is_a_request_to_be_ready(house: Any) -> None:
    assert client(house).generate("m").done_reason == "load"
    answer = client(house).chat("m", [])
    assert (answer.done_reason, answer.message.content) == ("load", "")
    assert house.engine.requests[-1].max_tokens == 0


def test_options_reach_the_engine_and_those_without_effect_are_named(house: Any) -> None:
    options = {
        "num_predict": 3,
        "temperature": 0.25,
        "top_k": -1,
        "min_p": 0.125,
        "repeat_penalty": 1.5,
        "seed": 7,
        "stop": ["|"],
        "num_ctx": 10_000_000,
        "mirostat": 1,
        "num_gpu": 99,
    }
    body = {"messages": ask("hello"), "options": options, "stream": False, "keep_alive": "5m"}
    answer = httpx.post(house.url + "/api/chat", json=body).json()
    request = house.engine.requests[-1]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.min_p, sampling.seed) == (0.25, 0, 0.125, 7)
    assert (sampling.repetition_penalty, request.max_tokens) == (1.5, 3)
    assert (answer["message"]["content"], answer["done_reason"]) == ("hel", "length")
    assert answer["rekindle"]["ignored_fields"] == ["keep_alive", "options.mirostat", "options.num_ctx"]


def test_thinking_is_a_switch_or_an_effort(house: Any) -> None:
    client(house).chat("m", ask("hi"), think=False)
    assert house.text.rendered[-1]["enable_thinking"] is False
    client(house).chat("m", ask("hi"), think="high")
    assert house.text.rendered[-1]["reasoning_effort"] in house.text.efforts


@pytest.mark.parametrize("form", ["json", {"type": "object", "properties": {"a": {"type": "integer"}}}])
def test_a_format_is_a_grammar_of_the_answer(house: Any, form: Any) -> None:
    client(house).chat("m", ask('{"a": 1}'), format=form)
    assert house.engine.requests[-1].rules is not None
    client(house).chat("m", ask("hi"), format="")
    assert house.engine.requests[-1].rules is None


def test_a_model_is_shown_by_every_name_that_its_file_or_the_list_gives_it(fresh_house: Any, late_model: Any) -> None:
    late_model.settings = replace(late_model.settings, context=1_000, unlisted=("late-Q4_K_M",))
    house = fresh_house(others=[late_model])
    listed = [card["id"] for card in httpx.get(house.url + "/v1/models").json()["data"]]
    lengths = dict.fromkeys(listed, 30_000) | dict.fromkeys(("late", "late-Q4_K_M", "late-Q4_K_M.gguf"), 1_000)
    for name, context in lengths.items():
        for written in (name, f"{name}:latest"):
            assert client(house).show(written).modelinfo["unknown.context_length"] == context
    with pytest.raises(ollama.ResponseError, match="served: paper-9b, org/alias, late") as refused:
        client(house).show("other")
    assert refused.value.status_code == 404


def test_what_is_served_can_be_listed_and_shown(house: Any) -> None:
    ours = client(house)
    assert [model.model for model in ours.list().models] == ["paper-9b", "org/alias"]
    shown = ours.show("paper-9b:latest")
    assert shown.modelinfo["unknown.context_length"] == 30_000
    assert shown.capabilities == ["completion", "tools", "thinking"]
    assert ours.ps().models[0].context_length == 30_000
    assert httpx.get(house.url + "/api/version").json().keys() == {"version"}
    with pytest.raises(ollama.ResponseError, match="not found") as refused:
        ours.show("other")
    assert refused.value.status_code == 404


def test_errors_are_in_the_words_of_this_api(house: Any) -> None:
    with pytest.raises(ollama.ResponseError) as refused:
        client(house).chat("m", [{"role": "robot", "content": "x"}])
    assert refused.value.status_code == 400
    assert refused.value.error.startswith("messages[0].role: ")
    with pytest.raises(ollama.ResponseError, match="stage 1 missed its deadline"):
        list(client(house).chat("m", ask("[lost]hello"), stream=True))
    assert httpx.get(house.url + "/api/nowhere").json().keys() == {"error"}
    refused_type = httpx.post(house.url + "/api/chat", content=b"{}", headers={"content-type": "text/plain"})
    assert refused_type.status_code == 415, "a page of another site can send such a body without asking"


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("chat", {"messages": [{"role": "user", "content": "x", "images": ["AA"]}]}, "messages[0].images: "),
        ("chat", {"format": 3}, "format: must be"),
        ("chat", {"think": 3}, "think: must be"),
        ("chat", {"options": {"temperature": 3}}, "options.temperature: "),
        ("chat", {"options": {"num_predict": 10**30}}, "options.num_predict: "),
        ("generate", {"prompt": "x", "suffix": "y"}, "suffix: "),
        ("generate", {"prompt": "x", "template": "{{ .Prompt }}"}, "template: "),
    ],
)
def test_a_bad_field_is_named(house: Any, path: str, fields: dict[str, Any], words: str) -> None:
    answer = httpx.post(f"{house.url}/api/{path}", json=fields)
    assert answer.status_code == 400
    assert answer.json()["error"].startswith(words)


def test_a_quiet_stream_is_kept_alive_and_a_client_that_leaves_cancels(fresh_house: Any) -> None:
    house = fresh_house(heartbeat_seconds=0.05)
    with httpx.stream("POST", house.url + "/api/chat", json={"messages": ask("[drip]hello")}) as stream:
        for line in stream.iter_lines():
            if json.loads(line)["message"]["content"] == "":
                break
    assert house.engine.cancelled.get(timeout=20) == house.engine.requests[-1].id

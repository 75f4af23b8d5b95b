"""Anthropic's messages over HTTP, as the official client sees them."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic, BadRequestError

from rekindle.api import ApiKeys
from rekindle.api.errors import fault_of
from rekindle.errors import PromptTooLong

from .conftest import PATIENCE, House

TOOLS: list[Any] = [
    {
        "name": "weather",
        "description": "The weather of a city.",
        "input_schema": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
    {"name": "now", "input_schema": {"type": "object"}},
]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 3}}</tool_call>'
ROME = {"city": "Rome", "days": 3}


def client(house: House, key: str = "unused") -> Anthropic:
    return client_of(house.url, key)


@cache
def client_of(url: str, key: str) -> Anthropic:
    return Anthropic(base_url=url, api_key=key, max_retries=0, timeout=PATIENCE)


def ask(house: House, text: str, **fields: Any) -> Any:
    fields = {"max_tokens": 1000, "messages": [{"role": "user", "content": text}]} | fields
    return client(house).messages.create(model="m", **fields)


def streamed(house: House, text: str, **fields: Any) -> Any:
    fields = {"max_tokens": 1000, "messages": [{"role": "user", "content": text}]} | fields
    with client(house).messages.stream(model="m", **fields) as stream:
        return stream.get_final_message()


def raw(house: House, **fields: Any) -> httpx.Response:
    """With ?beta=true, as Claude Code asks."""
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]} | fields
    return httpx.post(house.url + "/v1/messages?beta=true", json=body, headers={"anthropic-version": "2023-06-01"})


def seen(house: House) -> Any:
    """The messages that the template got last."""
    return house.text.rendered[-1]["messages"]


def test_a_message_is_answered_whole_and_streamed(house: House) -> None:
    for answer in (ask(house, "say(hello)", system="Be brief."), streamed(house, "say(hello)", system="Be brief.")):
        assert answer.id.startswith("msg_")
        assert (answer.type, answer.role, answer.model) == ("message", "assistant", "m")
        assert [(block.type, block.text) for block in answer.content] == [("text", "hello")]
        assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
        assert answer.usage.output_tokens == 6, "five letters and the stop token"
    assert seen(house)[0] == {"role": "system", "content": "Be brief."}


def test_the_counts_of_the_cache_add_up_to_the_prompt(house: House) -> None:
    for answer in (ask(house, "say(hello) and more"), streamed(house, "say(hello) and more")):
        finished, usage = house.last_finished(), answer.usage
        assert usage.cache_read_input_tokens == finished.cache.restored
        assert usage.cache_creation_input_tokens == finished.cache.published == 5
        parts = (usage.input_tokens, usage.cache_creation_input_tokens, usage.cache_read_input_tokens)
        assert sum(parts) == finished.prompt_tokens


def test_the_events_of_a_stream_come_in_order_under_their_names(house: House) -> None:
    text = f"say(<think>\nHm.\n</think>\n\nI look.\n\n{CALL})"
    body = {"model": "m", "max_tokens": 500, "stream": True, "tools": TOOLS, "thinking": {"type": "adaptive"}}
    response = httpx.post(house.url + "/v1/messages", json=body | {"messages": [{"role": "user", "content": text}]})
    events = [event.split("\n") for event in response.text.strip().split("\n\n")]
    values = [json.loads(data.removeprefix("data: ")) for _, data in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [value["type"] for value in values]
    kinds = [value["type"] for value in values if value["type"] != "content_block_delta"]
    block = ["content_block_start", "content_block_stop"]
    assert kinds == ["message_start", *block, *block, *block, "message_delta", "message_stop"]
    started = [value["content_block"]["type"] for value in values if value["type"] == "content_block_start"]
    assert started == ["thinking", "text", "tool_use"]
    deltas = [value["delta"]["type"] for value in values if value["type"] == "content_block_delta"]
    assert list(dict.fromkeys(deltas)) == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta"]
    assert deltas.count("input_json_delta") > 3, "arguments come while they are written"
    first, last = values[0]["message"]["usage"], values[-2]["usage"]
    assert first["cache_read_input_tokens"] == last["cache_read_input_tokens"] == house.last_finished().cache.restored
    assert values[-2]["rekindle"]["computed"] == house.last_finished().cache.computed


@pytest.mark.parametrize("way", [ask, streamed])
def test_a_call_goes_round(house: House, way: Any) -> None:
    first = way(
        house, f"say(<think>\nRome.\n</think>\n\nI look.\n\n{CALL})", tools=TOOLS, thinking={"type": "adaptive"}
    )
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.stop_reason == "tool_use"
    thinking, text, call = first.content
    assert (thinking.thinking, text.text, call.name, call.input) == ("Rome.", "I look.", "weather", ROME)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "Sunny."}]}
    ask(
        house,
        "",
        tools=TOOLS,
        messages=[
            {"role": "user", "content": "How is Rome?"},
            {"role": "assistant", "content": first.content},
            {"role": "user", "content": [result, {"type": "text", "text": "And say(ok)."}]},
        ],
    )
    _, said, tool, user = seen(house)
    remembered = next(message for _, _, message in house.text.remembered if message.get("tool_calls"))
    given = remembered["tool_calls"][0]["function"] | {"arguments": ROME}
    assert said["tool_calls"][0]["function"] == given, "as it was said, but for the arguments, which are an object"
    assert {name: said[name] for name in ("content", "reasoning_content")} == {
        "content": "I look.",
        "reasoning_content": "Rome.",
    }
    assert tool == {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}
    assert user == {"role": "user", "content": "And say(ok)."}
    function = house.text.rendered[-1]["tools"][0]
    assert function["function"]["parameters"] == TOOLS[0]["input_schema"]


def test_hidden_thinking_comes_back_in_its_signature(house: House) -> None:
    hidden: Any = {"type": "adaptive", "display": "omitted"}
    for way in (ask, streamed):
        thinking, text = way(house, "say(<think>\nRome.\n</think>\n\nYes.)", thinking=hidden).content
        assert (thinking.thinking, text.text) == ("", "Yes.")
        question = {"role": "user", "content": "say(ok)"}
        ask(house, "", messages=[question, {"role": "assistant", "content": [thinking, text]}, question])
        assert seen(house)[1]["reasoning_content"] == "Rome."


@pytest.mark.parametrize("signature", ["", "EqQBCkYIBxgCKkA", "rk2.", "rk2.????", "rk2.no base64"])
def test_a_signature_of_another_server_is_taken_as_it_is(house: House, signature: str) -> None:
    blocks = [{"type": "thinking", "thinking": "", "signature": signature}, {"type": "text", "text": "Yes."}]
    redacted = {"type": "redacted_thinking", "data": signature}
    question = {"role": "user", "content": "say(ok)"}
    ask(house, "", messages=[question, {"role": "assistant", "content": [redacted, *blocks]}, question])
    assert seen(house)[1] == {"role": "assistant", "content": "Yes."}


def test_the_reason_of_the_end_is_true(house: House) -> None:
    for way in (ask, streamed):
        assert way(house, "say(hello)", max_tokens=3).stop_reason == "max_tokens"
        assert way(house, "say(hello)", max_tokens=0).content == []
        stopped = way(house, "say(hello world)", stop_sequences=["x", "o w"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "o w")
        assert stopped.content[0].text == "hell"
        cut = way(house, f"say({CALL})", tools=TOOLS, max_tokens=60)
        assert cut.stop_reason == "max_tokens"
        (call,) = cut.content
        assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Rome"})


def test_half_a_character_in_a_call_costs_none_of_its_arguments(house: House) -> None:
    """Models cut text in the middle of an emoji, too."""
    half = '<tool_call>{"name": "weather", "arguments": {"city": "Rome \\ud83d", "days": 3}}</tool_call>'
    (call,) = ask(house, f"say({half})", tools=TOOLS).content
    assert call.input == {"city": "Rome \ufffd", "days": 3}
    (call,) = ask(house, f"say({half})", tools=TOOLS, max_tokens=half.index(', "days') + 10).content
    assert call.input == {"city": "Rome \ufffd"}


def test_every_kind_of_block_finds_its_place(house: House) -> None:
    document = {
        "type": "document",
        "title": "Notes",
        "source": {"type": "text", "media_type": "text/plain", "data": "A"},
    }
    inner = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "B"}]}}
    failed = {"type": "tool_result", "tool_use_id": "t1", "is_error": True, "content": "no such file"}
    call = {"type": "tool_use", "id": "t1", "name": "now", "input": {}}
    marked = {"type": "text", "text": "two", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    raw(
        house,
        system=[{"type": "text", "text": "one"}, marked],
        messages=[
            {"role": "user", "content": [document, inner, {"type": "text", "text": "say(ok)"}]},
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [failed]},
            {"role": "system", "content": "<total_tokens>5</total_tokens>"},
        ],
    ).raise_for_status()
    system, user, said, tool, late = seen(house)
    assert system["content"] == [{"type": "text", "text": "one\n"}, marked]
    texts = [part["text"] for part in user["content"]]
    assert texts == ["<document>\nNotes\nA\n</document>\n", "<document>\nB\n</document>\n", "say(ok)"]
    assert said["tool_calls"][0]["id"] == tool["tool_call_id"] == "t1"
    assert tool["content"] == "Error: no such file"
    assert late == {"role": "system", "content": "<total_tokens>5</total_tokens>"}, "in its place"


USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": None}, "max_tokens: Field required"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role: must be user, assistant or system"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: must be a string or a list of blocks"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content: must not be empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]: images are not"),
        ({"messages": [{"role": "user", "content": [{"type": "web_x"}]}]}, "blocks of type 'web_x' are not supported"),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {"type": "base64"}}]}]},
            "messages[0].content[0].source: only documents of text are supported, got 'base64'",
        ),
        ({"messages": [USER, {"role": "assistant", "content": "The"}]}, "messages: the last one must not be"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema: must be an object, got null"),
        ({"tool_choice": {"type": "tool", "name": "g"}, "tools": TOOLS}, "tool_choice: names the tool 'g'"),
        ({"thinking": {"type": "often"}}, "thinking.type: Input should be 'enabled'"),
        ({"cache_control": {"type": "ephemeral", "ttl": "9h"}}, "cache_control.ttl: must be one of 5m, 1h, got '9h'"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences: has 17 entries, at most 16 are taken"),
    ],
)
def test_what_is_wrong_is_named(house: House, fields: Any, said: str) -> None:
    answer = raw(house, **fields)
    assert answer.status_code == 400
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert said in answer.json()["error"]["message"]


def test_errors_have_the_types_that_clients_know(house: House, fresh_house: Any) -> None:
    with pytest.raises(anthropic.APIStatusError) as full:
        ask(house, "[full]")
    assert (full.value.status_code, full.value.body["error"]["type"]) == (529, "overloaded_error")
    with pytest.raises(anthropic.BadRequestError):
        ask(house, "[long]")
    with pytest.raises(anthropic.NotFoundError):
        client(house).messages.batches.list()
    with pytest.raises(anthropic.APIStatusError) as lost:
        ask(house, "say(hello)[lost]")
    assert lost.value.body["error"]["type"] == "overloaded_error"
    with pytest.raises(anthropic.APIStatusError) as midway:
        streamed(house, "say(hello)[bug]")
    assert midway.value.body["error"]["type"] == "api_error"
    assert "secret" not in str(midway.value)
    closed = fresh_house(keys=ApiKeys.single("sesame-seed"))
    with pytest.raises(anthropic.AuthenticationError) as stranger:
        ask(closed, "hi")
    assert stranger.value.body["error"]["type"] == "authentication_error"
    assert client(closed, "sesame-seed").messages.create(model="m", max_tokens=9, messages=[USER]).content
    bearer = Anthropic(base_url=closed.url, auth_token="sesame-seed", max_retries=0)
    assert bearer.messages.count_tokens(model="m", messages=[USER]).input_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_too_long_is_said_in_the_words_that_clients_look_for(house: House, stream: bool) -> None:
    """Claude Code makes the conversation shorter when it reads them."""
    for text, sizes in (("[long]", "9 tokens > 7 maximum"), ("x" * 40_000, "40016 tokens > 29999 maximum")):
        with pytest.raises(BadRequestError) as caught:
            client(house).messages.create(
                model="m", max_tokens=5, messages=[{"role": "user", "content": text}], stream=stream
            )
        error = caught.value.body["error"]  # type: ignore[index, call-overload]
        assert error == {"type": "invalid_request_error", "message": f"prompt is too long: {sizes}"}
    not_counted = PromptTooLong("not counted to the end", tokens=20, most=9, counted=False)
    assert fault_of(not_counted).sizes == "at least 20 tokens > 9 maximum"


def test_a_quiet_stream_is_pinged(fresh_house: Any) -> None:
    house = fresh_house(heartbeat_seconds=0.02)
    body = {"model": "m", "max_tokens": 9, "stream": True, "messages": [{"role": "user", "content": "[silent]"}]}
    with httpx.stream("POST", house.url + "/v1/messages", json=body) as response:
        lines = response.iter_lines()
        assert [next(lines), next(lines)] == ["event: ping", 'data: {"type":"ping"}']


def test_count_tokens_is_what_the_message_counts(house: House) -> None:
    fields: dict[str, Any] = {"system": "Be brief.", "tools": TOOLS, "messages": [USER]}
    counted = client(house).messages.count_tokens(model="m", **fields).input_tokens
    ask(house, "", **fields)
    assert counted == house.last_finished().prompt_tokens


@pytest.mark.parametrize(
    ("version", "status"), [("2023-06-01", 200), ("2026-10-21", 200), ("latest", 400), ("2027-01-01", 400)]
)
def test_versions_of_the_api_are_dates_up_to_the_one_that_is_known(house: House, version: str, status: int) -> None:
    headers = {"anthropic-version": version, "anthropic-beta": "made-up-2031-01-01,other"}
    body = {"model": "m", "max_tokens": 9, "messages": [USER]}
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        answer = httpx.post(house.url + path, json=body, headers=headers)
        assert answer.status_code == status
        assert status == 200 or answer.json()["error"]["message"].startswith("anthropic-version: ")
    assert httpx.get(house.url + "/v1/models", headers=headers).status_code == status


def test_models_are_listed_in_the_form_that_the_header_asks_for(house: House) -> None:
    models = client(house).models.list()
    assert [(model.id, model.type) for model in models.data] == [("paper-9b", "model"), ("org/alias", "model")]
    assert client(house).models.retrieve("org/alias").max_input_tokens == 30_000
    with pytest.raises(anthropic.NotFoundError):
        client(house).models.retrieve("gpt")
    assert house.client().models.list().data[0].object == "model", "OpenAI's clients get theirs"


def test_a_head_request_is_answered(house: House) -> None:
    assert httpx.head(house.url + "/").status_code == 200


def test_fields_without_effect_are_named(house: House) -> None:
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}
    answer = raw(house, tools=[*TOOLS, search], metadata={"user_id": "u"}, context_management={"edits": []}).json()
    assert answer["rekindle"]["ignored_fields"] == ["context_management", "tools: web_search"]
    assert [tool["function"]["name"] for tool in house.text.rendered[-1]["tools"]] == ["weather", "now"]


def test_a_choice_of_tools_becomes_the_one_that_every_dialect_has(house: House) -> None:
    text = f"say({CALL})"
    assert ask(house, text, tools=TOOLS, tool_choice={"type": "none"}).content[0].text == CALL
    ask(house, text, tools=TOOLS, tool_choice={"type": "any"})
    assert house.text.rendered[-1]["tool_choice"] == "required"
    ask(house, text, tools=TOOLS, tool_choice={"type": "tool", "name": "now"})
    assert house.text.rendered[-1]["tool_choice"] == {"type": "function", "function": {"name": "now"}}


def test_what_is_marked_is_kept_for_the_longest_time_that_a_mark_names(fresh_house: Any) -> None:
    house = fresh_house()
    house.text.marks = (3, 9)
    hour = {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    short = {"type": "text", "text": "say(ok)", "cache_control": {"type": "ephemeral"}}
    ask(house, "", system=[hour], messages=[{"role": "user", "content": [short]}])
    ask(house, "", messages=[{"role": "user", "content": [short]}])
    ask(house, "say(ok)", cache_control={"type": "ephemeral"})
    ask(house, "say(ok)")
    assert house.engine.kept == [((3, 9), seconds, "") for seconds in (3600, 300, 300)]

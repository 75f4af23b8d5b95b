"""Tool calls and reasoning over HTTP, as the official client sees them: whole and streamed alike."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rekindle.text.parsing.jsonish import object_in

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"  # noqa: E501
JSON = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 3}}</tool_call>'
ROME = {"city": "Rome", "days": 3}


def ask(text: str) -> list[Any]:
    return [{"role": "user", "content": f"say({text})"}]


def whole(house: Any, text: str, **fields: Any) -> Any:
    fields = {"tools": TOOLS, "max_tokens": 1000} | fields
    return house.client().chat.completions.create(model="m", messages=ask(text), **fields)


def streamed(house: Any, text: str, **fields: Any) -> dict[str, Any]:
    """The deltas of a stream, added up as clients do."""
    fields = {"tools": TOOLS, "max_tokens": 1000} | fields
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": {}, "finish": None, "deltas": 0}
    for chunk in house.client().chat.completions.create(model="m", messages=ask(text), stream=True, **fields):
        for choice in chunk.choices:
            delta = choice.delta
            message["content"] += delta.content or ""
            message["reasoning_content"] += (delta.model_extra or {}).get("reasoning_content") or ""
            for call in delta.tool_calls or ():
                known = message["calls"].setdefault(call.index, {"id": call.id, "name": "", "arguments": ""})
                known["name"] += call.function.name or ""
                known["arguments"] += call.function.arguments or ""
                message["deltas"] += 1
            message["finish"] = choice.finish_reason or message["finish"]
    return message


@pytest.mark.parametrize("call", [XML, JSON], ids=["xml", "json"])
@pytest.mark.parametrize("before", ["", "I look it up.\n\n"])
def test_a_call_is_a_call_whole_and_streamed(house: Any, call: str, before: str) -> None:
    choice = whole(house, before + call).choices[0]
    (made,) = choice.message.tool_calls
    assert (made.type, made.function.name, json.loads(made.function.arguments)) == ("function", "weather", ROME)
    assert choice.message.content == (before.strip() or None)
    assert choice.finish_reason == "tool_calls"
    assert made.id.startswith("call_")
    stream = streamed(house, before + call)
    assert (stream["content"], stream["finish"]) == (before.strip(), "tool_calls")
    assert stream["calls"][0]["name"] == "weather"
    assert json.loads(stream["calls"][0]["arguments"]) == ROME
    assert stream["deltas"] > 3, "arguments come while they are written"


def test_several_calls_have_ids_of_their_own(house: Any) -> None:
    message = whole(house, f"{XML}\n{JSON}").choices[0].message
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [ROME, ROME]
    assert len({call.id for call in message.tool_calls}) == 2
    assert [call["name"] for call in streamed(house, f"{XML}\n{JSON}")["calls"].values()] == ["weather", "weather"]


def test_reasoning_is_apart_from_content(house: Any) -> None:
    text = "<think>\nRome, then.\n</think>\n\nIt is sunny."
    message = whole(house, text, tools=[]).choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == ("It is sunny.", "Rome, then.")
    stream = streamed(house, text)
    assert (stream["content"], stream["reasoning_content"]) == ("It is sunny.", "Rome, then.")


def test_an_answer_without_reasoning_has_no_field_for_it(house: Any) -> None:
    assert "reasoning_content" not in (whole(house, "Hello.").choices[0].message.model_extra or {})


@pytest.mark.parametrize("fields", [{"tools": None}, {"tool_choice": "none"}], ids=["no tools", "tool_choice none"])
def test_without_tools_to_call_the_text_is_text(house: Any, fields: dict[str, Any]) -> None:
    given = {name: value for name, value in ({"tools": TOOLS} | fields).items() if value is not None}
    answer = house.client().chat.completions.create(model="m", messages=ask(JSON), max_tokens=1000, **given)
    assert answer.choices[0].message.content == JSON
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


def test_a_broken_call_is_text_and_the_report_says_why(house: Any) -> None:
    broken = '<tool_call>{"name": "weather", "arguments": {"city": Rome}}</tool_call>'
    answer = whole(house, broken)
    assert answer.choices[0].message.content == broken
    assert answer.choices[0].finish_reason == "stop"
    assert answer.model_extra["rekindle"]["calls_as_text"] == ["the arguments do not read as JSON"]


@pytest.mark.parametrize(
    ("text", "limit"), [(JSON, 40), (JSON, 62), (JSON, JSON.index("}") + 1), (XML, 30), (XML, 63), (XML, 80)]
)
def test_a_call_that_the_limit_cuts_off_is_as_far_as_it_went_streamed_or_not(house: Any, text: str, limit: int) -> None:
    answer, stream = whole(house, text, max_tokens=limit).choices[0], streamed(house, text, max_tokens=limit)
    assert answer.finish_reason == stream["finish"] == "length"
    assert (answer.message.content or "") == stream["content"] == "", "nothing of it is text"
    (call,) = answer.message.tool_calls
    told = stream["calls"][0]
    assert (call.function.name, call.function.arguments) == (told["name"], told["arguments"])
    assert json.dumps(ROME).startswith(call.function.arguments)
    is_whole = text[:limit].endswith("}")
    assert object_in(call.function.arguments) == (ROME if is_whole else None), "nobody runs half a command"


def test_what_the_client_got_is_what_is_remembered(house: Any) -> None:
    message = whole(house, f"<think>\nHm.\n</think>\n\n{XML}").choices[0].message
    remembered = house.text.remembered[-1][2]
    assert remembered["tool_calls"][0]["id"] == message.tool_calls[0].id
    assert remembered["reasoning_content"] == "Hm."


def test_tools_that_the_template_does_not_take_are_named(fresh_house: Any) -> None:
    house = fresh_house()
    house.text.takes_tools = False
    answer = whole(house, JSON)
    assert "tools" in answer.model_extra["rekindle"]["ignored_fields"]
    assert answer.choices[0].message.content == JSON, "tools that the model never saw are not called"


def test_a_user_who_writes_of_thinking_gets_an_answer(house: Any) -> None:
    ask_it = [{"role": "user", "content": "say(It thinks.) What does <think> do?"}]
    answer = house.client().chat.completions.create(model="m", messages=ask_it)
    assert answer.choices[0].message.content == "It thinks."

"""The Responses API over HTTP, as the official client sees it: whole and streamed alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pydantic
import pytest

from rekindle.api import Settings
from rekindle.api.choice import Choice, TextDelta
from rekindle.api.dialects.ollama import OllamaChat
from rekindle.api.dialects.openai_responses import OpenAIResponses
from rekindle.prompt import Prompt
from rekindle.text.parsing import Answer, AnswerParser

from .conftest import PaperText

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Changes files.", "format": {"type": "text"}}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 3}}</tool_call>'
PATCHED = '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin \\"Patch\\"\\n+x"}}</tool_call>'
THOUGHT = "<think>\nRome, then.\n</think>\n\nIt is sunny."


def whole(house: Any, text: str, **fields: Any) -> Any:
    fields = {"model": "m", "max_output_tokens": 1000} | fields
    return house.client().responses.create(input=f"say({text})", **fields)


def streamed(house: Any, text: str, **fields: Any) -> list[Any]:
    fields = {"model": "m", "max_output_tokens": 1000} | fields
    with house.client().responses.stream(input=f"say({text})", **fields) as stream:
        return list(stream)


def raw_events(house: Any, **body: Any) -> list[dict[str, Any]]:
    answer = httpx.post(house.url + "/v1/responses", json={"stream": True} | body, timeout=20)
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = [block.split("\n") for block in answer.text.strip().split("\n\n")]
    for name, data in blocks:
        assert name == f"event: {json.loads(data.removeprefix('data: '))['type']}"
    return [json.loads(data.removeprefix("data: ")) for _, data in blocks]


def stripped(output: list[Any]) -> list[dict[str, Any]]:
    """Items without what differs from answer to answer."""
    items = [item if isinstance(item, dict) else item.model_dump() for item in output]
    dropped = ("id", "call_id", "parsed_arguments")
    return [{name: value for name, value in item.items() if name not in dropped} for item in items]


def messages_of(house: Any) -> list[dict[str, Any]]:
    return house.text.rendered[-1]["messages"]


def test_a_text_is_answered_by_a_message(house: Any) -> None:
    response = whole(house, "hello", instructions="Be brief.")
    assert (response.status, response.output_text, response.model) == ("completed", "hello", "m")
    assert [item.type for item in response.output] == ["message"]
    assert messages_of(house) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "say(hello)"},
    ]
    finished = house.last_finished()
    assert response.usage.input_tokens == finished.prompt_tokens
    assert response.usage.input_tokens_details.cached_tokens == finished.cache.restored
    assert response.usage.total_tokens == finished.prompt_tokens + finished.completion_tokens
    assert response.store is False, "nothing is stored, and the response says so"


def test_a_stream_tells_how_every_item_grows(house: Any) -> None:
    events = raw_events(house, input=f"say({THOUGHT}\n{CALL})", tools=[WEATHER], max_output_tokens=1000)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    without_repeats = [kind for i, kind in enumerate(kinds) if i == 0 or kinds[i - 1] != kind]
    assert without_repeats == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert kinds.count("function_call_arguments.delta") > 3, "arguments come while they are written"
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert events[-1]["response"]["output"] == done
    thought = events[-1]["response"]["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert thought == len(">\nRome, then.\n</think>"), "the byte that completes the opening tag is the first"


@pytest.mark.parametrize("text", ["hello", THOUGHT, CALL, f"{THOUGHT}\n{CALL}\n{PATCHED}", PATCHED, ""])
def test_whole_and_streamed_say_the_same(house: Any, text: str) -> None:
    fields = {"tools": [WEATHER, PATCH], "reasoning": {"summary": "auto"}}
    last = raw_events(house, input=f"say({text})", max_output_tokens=1000, **fields)[-1]
    assert last["type"] == "response.completed"
    answer = httpx.post(house.url + "/v1/responses", json={"input": f"say({text})", "max_output_tokens": 1000} | fields)
    assert stripped(last["response"]["output"]) == stripped(answer.json()["output"])
    assert streamed(house, text, **fields)[-1].type == "response.completed", "the official client follows it"


def test_a_function_is_called_with_its_arguments(house: Any) -> None:
    (call,) = whole(house, CALL, tools=[WEATHER]).output
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "weather",
        {"city": "Rome", "days": 3},
    )
    assert house.text.rendered[-1]["tools"] == [
        {"type": "function", "function": {"name": "weather", "parameters": WEATHER["parameters"]}}
    ]
    assert house.text.remembered[-1][2]["tool_calls"][0]["id"] == call.call_id


def test_half_a_character_in_a_custom_call_costs_none_of_its_input(house: Any) -> None:
    half = '<tool_call>{"name": "apply_patch", "arguments": {"input": "a \\ud83d b"}}</tool_call>'
    (call,) = whole(house, half, tools=[PATCH]).output
    assert (call.type, call.input) == ("custom_tool_call", "a \ufffd b")
    events = streamed(house, half, tools=[PATCH])
    assert "".join(e.delta for e in events if e.type == "response.custom_tool_call_input.delta") == call.input


def test_a_custom_tool_gets_its_input_as_text(house: Any) -> None:
    (call,) = whole(house, PATCHED, tools=[PATCH]).output
    assert (call.type, call.name, call.input) == ("custom_tool_call", "apply_patch", '*** Begin "Patch"\n+x')
    events = streamed(house, PATCHED, tools=[PATCH])
    assert "".join(e.delta for e in events if e.type == "response.custom_tool_call_input.delta") == call.input
    house.client().responses.create(
        model="m",
        input=[
            {"role": "user", "content": "go"},
            {"type": "custom_tool_call", "call_id": call.call_id, "name": call.name, "input": call.input},
            {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "Done"},
        ],
        tools=[PATCH],
    )
    _, turn, result = messages_of(house)
    remembered = house.text.remembered[-3][2]["tool_calls"][0]
    assert turn["tool_calls"][0]["id"] == remembered["id"]
    assert json.loads(turn["tool_calls"][0]["function"]["arguments"]) == json.loads(remembered["function"]["arguments"])
    assert result == {"role": "tool", "tool_call_id": call.call_id, "content": "Done"}


@pytest.mark.parametrize(
    "fields", [{}, {"reasoning": {"summary": "auto"}}, {"include": ["reasoning.encrypted_content"]}]
)
def test_an_answer_that_comes_back_is_the_message_that_was_given(house: Any, fields: dict[str, Any]) -> None:
    """Whether a client keeps the reasoning's text, its summary or only what is sealed."""
    response = whole(house, f"{THOUGHT}\n{CALL}\n{PATCHED}", tools=[WEATHER, PATCH], **fields)
    given = house.text.remembered[-1][2]
    items = [item.model_dump(exclude_none=True) for item in response.output]
    if fields.get("include"):
        items[0].pop("content")
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": [{"type": "input_text", "text": "7"}]}
        for item in items[2:]
    ]
    house.client().responses.create(model="m", input=[{"role": "user", "content": "x"}, *items, *outputs])
    _, turn, *results = messages_of(house)
    for call in (*turn["tool_calls"], *given["tool_calls"]):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    assert turn == given
    assert [result["content"] for result in results] == ["7", "7"]


def test_what_was_said_before_the_conversation_is_one_system_message(house: Any) -> None:
    said = [("developer", "A"), ("system", "B"), ("user", "C"), ("developer", "D"), ("user", "E")]
    house.client().responses.create(
        model="m",
        instructions="I",
        input=[{"type": "message", "role": r, "content": [{"type": "input_text", "text": t}]} for r, t in said],
    )
    roles = [(message["role"], message["content"]) for message in messages_of(house)]
    assert roles == [("system", "I\n\nA\n\nB"), ("user", "C"), ("system", "D"), ("user", "E")]


def test_tools_of_hosted_services_are_skipped_and_named(house: Any) -> None:
    tools: list[Any] = [{"type": "web_search"}, WEATHER, {"type": "namespace", "name": "n", "tools": []}]
    response = whole(house, "hi", tools=tools)
    assert response.model_extra["rekindle"]["ignored_fields"] == ["tools[0] (web_search)", "tools[2] (namespace)"]
    assert [tool["function"]["name"] for tool in house.text.rendered[-1]["tools"]] == ["weather"]


def test_fields_of_codex_are_harmless(house: Any) -> None:
    response = whole(
        house,
        "hi",
        store=False,
        parallel_tool_calls=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        reasoning={"summary": "auto"},
        extra_body={"client_metadata": {"session_id": "s"}},
    )
    assert response.model_extra["rekindle"]["ignored_fields"] == []


def test_effort_reaches_the_template_in_its_own_words(house: Any) -> None:
    whole(house, "hi", reasoning={"effort": "minimal"})
    assert house.text.rendered[-1]["reasoning_effort"] == "low"
    whole(house, "hi", reasoning={"effort": "none"})
    assert house.text.rendered[-1]["enable_thinking"] is False


def test_an_image_that_a_tool_returned_is_left_out_and_named(house: Any) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "see", "arguments": "{}"}
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA"}
    output: Any = {"type": "function_call_output", "call_id": "c", "output": [image]}
    response = house.client().responses.create(model="m", input=[{"role": "user", "content": "x"}, call, output])
    assert messages_of(house)[-1]["content"] == "[image left out: this model reads text only]"
    assert response.model_extra["rekindle"]["ignored_fields"] == ["input[2].output[0] (input_image)"]


def test_a_cut_answer_is_incomplete(house: Any) -> None:
    response = whole(house, "hello", max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.output[0].status, response.output_text) == ("incomplete", "hel")
    last = streamed(house, "hello", max_output_tokens=3)[-1]
    assert (last.type, last.response.output[0].status) == ("response.incomplete", "incomplete")


@pytest.mark.parametrize(
    "broken", [CALL[:60], '<tool_call>{"name": "weather", "arguments": {"city": Rome}}</tool_call>']
)
def test_a_broken_call_is_text_and_a_stream_ends_it_as_incomplete(house: Any, broken: str) -> None:
    response = whole(house, broken, tools=[WEATHER])
    assert [item.type for item in response.output] == ["message"]
    assert response.output_text == broken
    events = streamed(house, broken, tools=[WEATHER])
    call, message = [event.item for event in events if event.type == "response.output_item.done"]
    assert (call.type, call.status) == ("function_call", "incomplete")
    assert broken.startswith(call.arguments), "what the model wrote, which is no JSON"
    assert [item.id for item in events[-1].response.output] == [message.id], "the broken call is in no final output"
    back = [call.model_dump(exclude_none=True), message.model_dump(exclude={"phase", "parsed"})]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "arguments are not JSON"}
    house.client().responses.create(model="m", input=[{"role": "user", "content": "x"}, *back, result])
    assert messages_of(house)[1:] == [
        {"role": "assistant", "content": broken},
        {"role": "tool", "tool_call_id": call.call_id, "content": "arguments are not JSON"},
    ]


@pytest.mark.parametrize("limit", [36, 50, 70])
def test_a_call_that_the_limit_cuts_off_is_incomplete_and_can_be_sent_back(house: Any, limit: int) -> None:
    response = whole(house, CALL, tools=[WEATHER], max_output_tokens=limit)
    (call,) = response.output
    assert (response.status, call.type, call.status) == ("incomplete", "function_call", "incomplete")
    assert '{"city": "Rome", "days": 3}'.startswith(call.arguments)
    assert call.arguments
    events = streamed(house, CALL, tools=[WEATHER], max_output_tokens=limit)
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert [deltas] == [event.arguments for event in done] == [call.arguments]
    assert [item.arguments for item in events[-1].response.output] == [call.arguments]
    back = call.model_dump(exclude_none=True)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "cut off"}
    house.client().responses.create(model="m", input=[{"role": "user", "content": "x"}, back, result])
    assert messages_of(house)[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": call.arguments}


def test_a_custom_call_that_the_limit_cuts_off_is_text(house: Any) -> None:
    cut = {"tools": [{"type": "custom", "name": "apply_patch"}], "max_output_tokens": 70}
    response, events = whole(house, PATCHED, **cut), streamed(house, PATCHED, **cut)
    assert response.output_text == events[-1].response.output_text == PATCHED[:70]
    assert [item.type for item in response.output] == ["message"], "half a patch is nobody's input"


def test_an_error_inside_a_stream_is_a_failed_response(house: Any) -> None:
    last = raw_events(house, input="[lost]say(hello)")[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "stage_lost", "message": "stage 1 missed its deadline"}


def test_a_quiet_stream_is_kept_alive_by_events(fresh_house: Any) -> None:
    house = fresh_house(heartbeat_seconds=0.05)
    with house.client().responses.stream(model="m", input="[drip]say(hello)") as stream:
        for event in stream:
            if event.type == "keepalive":
                break
    assert house.engine.cancelled.get(timeout=20) == house.engine.requests[-1].id, "a client that leaves cancels"


class Muttering:
    """A generation whose tokens complete nothing that can be shown."""

    def __init__(self) -> None:
        self.text = PaperText()
        self.choices = [Choice(0, "id", Prompt((1,)), 0, self.text, ())]

    async def batches(self, patience: float) -> AsyncIterator[list[TextDelta]]:
        yield [TextDelta(0)]


@pytest.mark.parametrize(
    ("dialect", "body", "beat"),
    [(OpenAIResponses(), b'{"input": "x"}', b"keepalive"), (OllamaChat(), b'{"messages": []}', b'"content":""')],
)
def test_tokens_that_show_nothing_do_not_make_a_stream_silent(dialect: Any, body: bytes, beat: bytes) -> None:
    """A long call of a custom tool is shown when it is complete, and clients hang up on a stream that says nothing."""
    settings = Settings(models=("m",), context=100, heartbeat_seconds=1e-9)
    writer = dialect.writer(dialect.parse(body), Muttering(), settings)

    async def first_beat() -> bool:
        return any([beat in data async for data in writer.events()])

    assert asyncio.run(first_beat())


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": None}, "input", "must be a string or a list of items, got null"),
        ({"input": []}, "input", "nothing in it"),
        ({"input": [3]}, "input[0]", "must be an object, got a number"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type", "'web_search_call' is not supported"),
        ({"input": [{"type": {}}]}, "input[0].type", "is not supported"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", "must be one of"),
        ({"input": [{"role": "user"}]}, "input[0].content", "got null"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "'input_image'"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c"}]}, "input[0].arguments", "got null"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id", "got null"),
        ({"input": [{"type": "reasoning", "content": 3}]}, "input[0].content", "got a number"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored here"),
        ({"background": True}, "background", "none is kept"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "got null"),
        ({"tool_choice": "always"}, "tool_choice", "must be none, auto"),
        ({"text": {"format": {"type": 3}}}, "text.format.type", "Input should be"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "is missing"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
    ],
)
def test_a_bad_field_is_named(house: Any, fields: dict[str, Any], param: str, words: str) -> None:
    answer = httpx.post(house.url + "/v1/responses", json={"input": "x"} | fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], words in error["message"]) == (param, True), error


def test_the_official_client_knows_the_errors(house: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="not stored here"):
        house.client().responses.create(model="m", input="x", previous_response_id="resp_1")
    with pytest.raises(openai.RateLimitError):
        house.client().responses.create(model="m", input="[full]", stream=True)


class City(pydantic.BaseModel):
    name: str
    people: int


def test_a_schema_is_a_grammar_of_the_answer(house: Any) -> None:
    said = 'say({"name": "Rome", "people": 3})'
    response = house.client().responses.parse(model="m", input=said, text_format=City)
    assert response.output_parsed == City(name="Rome", people=3)
    assert house.engine.requests[-1].rules is not None
    assert response.text.format.type == "json_schema"
    house.client().responses.create(model="m", input="x", text={"format": {"type": "json_object"}})
    assert house.engine.requests[-1].rules is not None
    house.client().responses.create(model="m", input="x", text={"format": {"type": "text"}})
    assert house.engine.requests[-1].rules is None


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "name": "weather"}, {"type": "custom", "name": "apply_patch"}]
)
def test_a_call_that_must_be_made_is_a_grammar_too(house: Any, choice: Any) -> None:
    response = whole(house, "hi", tools=[WEATHER, PATCH], tool_choice=choice)
    assert house.engine.requests[-1].rules is not None
    assert response.model_extra["rekindle"]["ignored_fields"] == []


def test_tokens_of_an_input_are_counted_without_an_answer(house: Any) -> None:
    counted = house.client().responses.input_tokens.count(model="m", input="Hi", instructions="Be brief.")
    assert counted.input_tokens == len("system:Be brief.|user:Hi|assistant:")


def test_a_parser_says_whether_the_text_ends_inside_the_reasoning() -> None:
    parser, answer = AnswerParser(), Answer()
    states = []
    for piece in ("<think>", "hm", "</think>", "\n\n", "yes"):
        answer.add(parser.push(piece))
        states.append(parser.is_thinking)
    assert states == [True, True, False, False, False]

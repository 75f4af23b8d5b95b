"""Every way of writing a call, cut at every place: the same answer, whatever the pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rekindle.text import Detokenizer, Tokenizer
from rekindle.text.parsing import Answer, AnswerParser, CallArguments, CallBegun, Content, Event, Tool

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "more": {"type": "object"},
            "share": {"type": ["number", "null"]},
        },
        "required": ["city"],
    },
)
WRITE = Tool("write", {"type": "object", "properties": {"path": {"type": "string"}, "text": {"type": "string"}}})
NOW = Tool("now")
TOOLS = (WEATHER, WRITE, NOW)


def parse(
    pieces: Iterable[str], tools: Sequence[Tool] = TOOLS, thinking: bool = False, is_cut: bool = False
) -> tuple[Answer, list[Event]]:
    parser, events = AnswerParser(tools, thinking), list[Event]()
    for piece in pieces:
        events += parser.push(piece)
    events += parser.finish(is_cut)
    return Answer().add(events), events


def simple(answer: Answer) -> tuple[str, str, list[tuple[str, object]]]:
    return answer.reasoning, answer.content, [(call.name, json.loads(call.arguments)) for call in answer.calls]


ROME = ("get_weather", {"city": "Rome", "days": 3})
CALLS = {
    "qwen": "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "qwen without the outer tags": "<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>3</parameter>\n</function>",
    "qwen that ends early": "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n"
    "<parameter=days>3</parameter>",
    "hermes": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>',
    "hermes, arguments first": '<tool_call>{"arguments": {"city": "Rome", "days": 3}, "name": "get_weather"}'
    "</tool_call>",
    "hermes, arguments as a string": '<tool_call>{"name": "get_weather", '
    '"arguments": "{\\"city\\": \\"Rome\\", \\"days\\": 3}"}</tool_call>',
    "hermes, nested": '<tool_call>{"type": "function", "id": 7, "function": {"name": "get_weather", "parameters": '
    '{"city": "Rome", "days": 3}}}</tool_call>',
    "laguna": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>"
    "<arg_value>3</arg_value>\n</tool_call>",
    "call style": '<function=get_weather(city="Rome", days=3)></function>',
    "call style in tags": '<tool_call><function=get_weather(city="Rome", days=3)></function></tool_call>',
    "named tag": "<get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>3</parameter>\n</get_weather>",
    "tool_code": '<tool_code>{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}</tool_code>',
    "gemma": 'call:weather:get_weather{city: <|"|>Rome<|"|>, days: 3}',
    "gemma, other quotes": "call:get_weather{city: 'Rome', \"days\": 3}",
    "bare": '{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}',
    "bare, nested": '{"function": {"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}}',
}


@pytest.mark.parametrize("text", CALLS.values(), ids=CALLS.keys())
def test_a_call_is_found_wherever_the_text_is_cut(text: str) -> None:
    for at in range(len(text) + 1):
        assert simple(parse([text[:at], text[at:]])[0]) == ("", "", [ROME]), f"cut at {at}"
    assert simple(parse(text)[0]) == ("", "", [ROME])


@pytest.mark.parametrize("text", CALLS.values(), ids=CALLS.keys())
def test_a_call_that_the_limit_cuts_off_is_the_beginning_of_itself_and_never_whole(text: str) -> None:
    whole = parse([text])[0].calls[0].arguments
    for at in range(1, len(text)):
        answer, events = parse([text[: at // 2], text[at // 2 : at]], is_cut=True)
        if not answer.calls:
            assert answer.content == text[:at], f"cut at {at}"
            continue
        (call,) = answer.calls
        assert answer.content == "", f"cut at {at}"
        assert "".join(event.text for event in events if isinstance(event, CallArguments)) == call.arguments
        if call.cut is None:
            assert call.arguments == whole, f"cut at {at}"
        else:
            assert call.cut == text[:at]
            assert whole.startswith(call.arguments), f"cut at {at}"
            assert call.arguments, "nobody takes it for a call without arguments"


@pytest.mark.parametrize("text", [CALLS["qwen"], CALLS["laguna"]])
def test_a_call_without_its_end_is_whole_where_the_model_ended_and_cut_where_the_limit_came(text: str) -> None:
    closed = text[: text.rindex("\n</")].removesuffix("\n</function>")
    assert simple(parse([closed])[0]) == ("", "", [ROME])
    assert parse([closed], is_cut=True)[0].calls[0].cut == closed


def test_what_stands_before_a_call_that_is_cut_off_is_kept() -> None:
    answer, _ = parse(["I look.\n\n" + CALLS["qwen"] + "\n" + CALLS["qwen"][:60]], is_cut=True)
    assert answer.content == "I look."
    assert [call.cut for call in answer.calls] == [None, "\n" + CALLS["qwen"][:60]]


class Bytes:
    """A tokenizer whose tokens are these pieces."""

    control_ids: frozenset[int] = frozenset()

    def __init__(self, *pieces: bytes) -> None:
        self.token_bytes = pieces.__getitem__
        self.tokens = range(len(pieces))


def texts_of(*pieces: bytes) -> list[str]:
    """As answers reach the parser: through the detokenizer, which holds back halves of characters."""
    tokenizer = Bytes(*pieces)
    detokenizer = Detokenizer(cast(Tokenizer, tokenizer))
    return [*map(detokenizer.push, tokenizer.tokens), detokenizer.finish()]


@pytest.mark.parametrize("text", CALLS.values(), ids=CALLS.keys())
def test_a_call_is_found_wherever_its_bytes_are_cut(text: str) -> None:
    whole = text.replace("Rome", "Zürich 東京 🏔").encode()
    expected = ("", "", [("get_weather", {"city": "Zürich 東京 🏔", "days": 3})])
    for at in range(len(whole) + 1):
        assert simple(parse(texts_of(whole[:at], whole[at:]))[0]) == expected, f"cut at byte {at}"
    assert simple(parse(texts_of(*(bytes([byte]) for byte in whole)))[0]) == expected


@pytest.mark.parametrize("text", [text for name, text in CALLS.items() if "bare" not in name])
@pytest.mark.parametrize("before", ["", "I look.\n\n"])
def test_text_and_thinking_before_a_call_are_kept(text: str, before: str) -> None:
    whole = f"Rome, then.\n</think>\n\n{before}{text}"
    for at in range(len(whole) + 1):
        answer, _ = parse([whole[:at], whole[at:]], thinking=True)
        assert simple(answer) == ("Rome, then.", before.strip(), [ROME]), f"cut at {at}"


@pytest.mark.parametrize("text", [CALLS["qwen"], CALLS["hermes"], CALLS["laguna"], CALLS["named tag"]])
def test_calls_in_a_row_are_calls_each(text: str) -> None:
    answer, _ = parse(f"{text}\n{text}")
    assert simple(answer) == ("", "", [ROME, ROME])
    assert [call.index for call in answer.calls] == [0, 1]


def test_two_functions_in_one_tag_are_two_calls() -> None:
    one = "<function=now>\n</function>\n"
    assert simple(parse(f"<tool_call>\n{one}{one}</tool_call>")[0]) == ("", "", [("now", {}), ("now", {})])


LOOKS = [
    "The tag <tool_call> opens a call.",
    "<tool_call>\n<function=unknown>\n<parameter=a>1</parameter></function></tool_call>",
    '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
    "<tool_call>{not json}</tool_call>",
    "Write <function=NAME> and so on.",
    "<function=get_weather",
    "a < b and b > c <too",
    "I call: you, call:me maybe{",
    "recall:get_weather{city: 'Rome'}",
    '{"city": 5}',
    '{"answer": 42, "list": [1, 2]}',
    '{"name": "Rome", "population": 3}',
    "<get_weather> is the tool's name",
    "<tool_code>print(1)</tool_code>",
    '{"name": "get_weather"',
    "<tool_call>",
    "one\n\n  two \n",
    "",
]


@pytest.mark.parametrize("text", LOOKS)
def test_text_that_only_looks_like_a_call_stays_text(text: str) -> None:
    for at in range(len(text) + 1):
        assert simple(parse([text[:at], text[at:]])[0]) == ("", text, []), f"cut at {at}"


@pytest.mark.parametrize("text", [*CALLS.values(), *LOOKS])
def test_without_tools_everything_is_text(text: str) -> None:
    assert simple(parse(text, tools=())[0]) == ("", text, [])


BROKEN = [
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nRo",
    "<tool_call>\n<function=get_weather>\nsomething else</function>",
    '<tool_call>{"name": "get_weather", "arguments": {"city": Rome}}</tool_call>',
    '<tool_call>{"name": "get_weather", "arguments": {"city": "Ro',
    '<tool_call>{"name": "get_weather", "arguments": {"share": 1e999}}</tool_call>',
    '<tool_call>{"name": "get_weather", "arguments": "{\\"share\\": 1e999}"}</tool_call>',
    "<tool_call>get_weather<arg_key>city</arg_key>nothing</tool_call>",
]


@pytest.mark.parametrize("text", BROKEN)
def test_a_malformed_call_is_text_with_a_note_and_nothing_is_lost(text: str) -> None:
    for at in range(len(text) + 1):
        answer, _ = parse([f"See: {text[:at]}", text[at:]])
        assert simple(answer) == ("", f"See: {text}", [])
        assert answer.notes


def test_a_call_behind_one_that_is_none_is_found() -> None:
    assert simple(parse(f"<tool_call>\n{CALLS['qwen']}")[0]) == ("", "<tool_call>", [ROME])
    assert simple(parse(f"Use <tool_call> so:\n{CALLS['hermes']}")[0]) == ("", "Use <tool_call> so:", [ROME])


def test_arguments_are_passed_on_while_they_are_written() -> None:
    parser, seen = AnswerParser(TOOLS), ""
    parser.push("<tool_call>\n<function=write>\n<parameter=path>\na.py\n</parameter>\n<parameter=text>\n")
    for number in range(20):
        for event in parser.push(f"line {number}\n"):
            assert isinstance(event, CallArguments)
            seen += event.text
        assert f"line {number}" in seen
    parser = AnswerParser(TOOLS)
    assert parser.push('<tool_call>{"name": "write"') == [CallBegun(0, "write")]
    assert parser.push(', "arguments": {"text": "on') == [CallArguments(0, '{"text": "on')]


def test_a_value_may_hold_the_tags_of_calls() -> None:
    value = '<parameter=x>\ny\n</parameter> is how\n</function> is written, "quoted" \\ and\ttabbed\n'
    text = f"<tool_call>\n<function=write>\n<parameter=text>\n{value}\n</parameter>\n</function>\n</tool_call>"
    for at in range(len(text) + 1):
        assert simple(parse([text[:at], text[at:]])[0]) == ("", "", [("write", {"text": value})])


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("city", "7", "7"),
        ("city", '"quoted"', '"quoted"'),
        ("days", "7", 7),
        ("days", "seven", "seven"),
        ("metric", "True", True),
        ("metric", "false", False),
        ("tags", '["a", "b"]', ["a", "b"]),
        ("more", '{"a": {"b": [1.5, null]}}', {"a": {"b": [1.5, None]}}),
        ("share", "0.5", 0.5),
        ("share", "2", 2),
        ("share", "null", None),
        ("share", "1e999", "1e999"),  # no number of JSON
        ("more", '{"a": [-1e999]}', '{"a": [-1e999]}'),
        ("unknown", "[1]", "[1]"),
    ],
)
def test_values_get_the_types_that_the_tool_declares(key: str, written: str, value: object) -> None:
    text = f"<tool_call><function=get_weather><parameter={key}>\n{written}\n</parameter></function></tool_call>"
    assert simple(parse(text)[0])[2] == [("get_weather", {key: value})]


OPTIONAL = Tool(
    "paint",
    {
        "$defs": {
            "Color": {"enum": ["red", "blue"], "type": "string"},
            "Place": {"type": "object", "properties": {"x": {"type": "integer"}}},
            "Either": {"oneOf": [{"$ref": "#/$defs/Place"}, {"type": "integer"}]},
            "Again": {"anyOf": [{"$ref": "#/$defs/Again"}, {"$ref": "#/$defs/Again"}]},
        },
        "properties": {
            "color": {"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]},
            "place": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
            "either": {"allOf": [{"$ref": "#/$defs/Either"}, {"description": "One of both."}]},
            "any": {"anyOf": [{}, {"type": "null"}]},
            "again": {"$ref": "#/$defs/Again"},
        },
    },
)


@pytest.mark.parametrize(
    ("key", "written", "value"),
    [
        ("color", "red", "red"),
        ("color", '"red"', '"red"'),  # a text stands as it is
        ("color", "null", None),
        ("place", '{"x": 1}', {"x": 1}),
        ("place", "null", None),
        ("either", '{"x": 1}', {"x": 1}),
        ("either", "7", 7),
        ("any", '"red"', "red"),
        ("any", "[7]", [7]),
        ("again", "7", 7),
    ],
)
def test_types_are_found_behind_references_inside_choices(key: str, written: str, value: object) -> None:
    text = f"<tool_call><function=paint><parameter={key}>\n{written}\n</parameter></function></tool_call>"
    assert simple(parse([text], [OPTIONAL])[0])[2] == [("paint", {key: value})]


def test_definitions_that_name_each_other_are_read_in_time_that_grows_with_them() -> None:
    names = [f"d{number}" for number in range(40)]
    every = {"anyOf": [{"$ref": f"#/$defs/{name}"} for name in names] + [{"type": "integer"}]}
    tool = Tool("f", {"$defs": dict.fromkeys(names, every), "properties": {"a": every}})
    text = "<tool_call><function=f><parameter=a>\n7\n</parameter></function></tool_call>"
    assert simple(parse([text], [tool])[0])[2] == [("f", {"a": 7})]


def test_the_arguments_of_the_only_tool_are_a_call() -> None:
    text = '{"city": "Rome", "days": 3}'
    assert simple(parse(text, [WEATHER])[0]) == ("", "", [ROME])
    assert simple(parse('{"days": 3}', [WEATHER])[0]) == ("", '{"days": 3}', [])
    assert simple(parse(f"{text} and more", [WEATHER])[0]) == ("", f"{text} and more", [])


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "content"),
    [
        ("I see.\n</think>\n\nIt is red.", True, "I see.", "It is red."),
        ("<think>\nI see.\n</think>\n\nIt is red.", False, "I see.", "It is red."),
        ("\n</think>\n\nIt is red.", True, "", "It is red."),
        ("<|channel>thought\nI see.\n<channel|>It is red.", False, "I see.", "It is red."),
        ("<|channel>thought\n<channel|>It is red.", False, "", "It is red."),
        ("<|channel>think of it", False, "", "<|channel>think of it"),
        ("I see, cut off", True, "I see, cut off", ""),
        ("No thought, a </think> in text", False, "", "No thought, a </think> in text"),
        ("a < b </thin k>\n</think>x", True, "a < b </thin k>", "x"),
    ],
)
@pytest.mark.parametrize("tools", [(), TOOLS])
def test_reasoning_is_apart_from_content(
    text: str, thinking: bool, reasoning: str, content: str, tools: Sequence[Tool]
) -> None:
    for at in range(len(text) + 1):
        answer, _ = parse([text[:at], text[at:]], tools, thinking)
        assert (answer.reasoning, answer.content) == (reasoning, content)


def test_other_json_is_passed_on_as_it_is_written() -> None:
    events = AnswerParser(TOOLS).push('{"answer": [1, 2')
    assert "".join(event.text for event in events if isinstance(event, Content)) == '{"answer": [1, 2'


WORDS = ["<tool_call>", "</tool_call>", "<function=", "get_weather", "now", ">", "<parameter=", "city>", "</parameter>",
         "</function>", "{", "}", '"name"', ":", '"now"', '"arguments"', "{}", ",", "\n", " ", "Rome", "<think>",
         "</think>", "call:", "<arg_key>", "</arg_key>", "<tool_code>", "<now>", "\\", '"']  # fmt: skip


@given(st.lists(st.sampled_from(WORDS), max_size=24), st.data())
def test_pieces_change_nothing_and_no_letter_is_lost(words: list[str], data: st.DataObject) -> None:
    text = "".join(words)
    whole, _ = parse([text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse(pieces)[0] == whole
    assert parse(pieces, is_cut=True)[0] == parse([text], is_cut=True)[0]
    for call in whole.calls:
        assert isinstance(json.loads(call.arguments), dict)
    if not whole.calls and not text.lstrip().startswith("<think>"):
        assert whole.content == text


F = Tool("f", {"type": "object", "properties": {"a": {"type": "string"}}, "required": None})


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("rest", ["<function=g>\n</function>\n", "<function=", "<function=f>\n<parameter=a>\nx"])
def test_a_call_that_was_made_is_not_made_again_when_the_next_one_is_none(rest: str, wrapped: bool) -> None:
    text = ("<tool_call>\n" if wrapped else "") + "<function=f>\n</function>\n" + rest
    for at in range(len(text) + 1):
        answer, _ = parse([text[:at], text[at:]], [F])
        assert [(call.name, call.arguments) for call in answer.calls] == [("f", "{}")]
        assert answer.content.strip() == rest.strip()


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"arguments": {"a": "x"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {}, "parameters": {}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
        '<function=f(a=float("nan"))></function>',
        "<tool_call>" + '{"function":' * 2000,
        '{"a": "x", "b": 1}',
    ],
)
def test_what_is_almost_a_call_is_text(text: str) -> None:
    assert simple(parse([text], [F])[0])[1:] == (text, [])


def test_no_way_of_writing_gives_a_number_that_json_does_not_have() -> None:
    for text in ("call:get_weather{share: 1e999}", '{"name": "get_weather", "arguments": {"share": 1e999}}'):
        for call in parse([text])[0].calls:
            json.dumps(json.loads(call.arguments), allow_nan=False)


def test_odd_schemas_and_half_characters_do_no_harm() -> None:
    assert simple(parse(['{"a": "x"}'], [F])[0]) == ("", "", [("f", {"a": "x"})])
    for text in ('{"name": "f", "arguments": {"a": "\\ud83d"}}', "call:f{a: '\\ud83d'}"):
        (call,) = parse([text], [F])[0].calls
        call.arguments.encode()
        assert json.loads(call.arguments) == {"a": "\ufffd"}


def test_text_that_keeps_opening_calls_is_read_in_time_that_grows_with_it() -> None:
    for text in ("call:f{" * 4000, "call:f{a:'" + "}" * 20_000, "call:g{" * 4000):
        answer, _ = parse([text[at : at + 7] for at in range(0, len(text), 7)], [F])
        assert answer.content == text

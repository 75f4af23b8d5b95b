"""What the grammar of a call lets through, and what it refuses to keep."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from rekindle.errors import BadRequest
from rekindle.grammar.calls import CallableTool, CallFormat, calls_only
from rekindle.grammar.compiler import Compiler, Vocabulary
from rekindle.grammar.frame import ThinkingFrame, whole

STOP = 256
OPTIONAL = {
    "$defs": {"Color": {"enum": ["red", "blue"], "type": "string"}},
    "properties": {
        "letter": {"anyOf": [{"enum": ["a", "b"], "type": "string"}, {"type": "null"}]},
        "color": {"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]},
        "code": {"oneOf": [{"type": "string", "pattern": "^[a-z]{2}$"}, {"const": "none"}, {"type": "boolean"}]},
    },
}


@cache
def compiler() -> Compiler:
    tokens = [*(bytes([byte]) for byte in range(256)), b"<stop>"]
    return Compiler(lambda: Vocabulary(tokens, [STOP], [STOP], lambda text: list(text.encode())))


def tool(schema: Any, strict: bool = True) -> CallableTool:
    return CallableTool("f", schema, strict, "tools[0].function.parameters")


def is_taken(schema: Any, key: str, value: str) -> bool:
    """Whether a call with this one parameter keeps to the grammar."""
    rules = compiler().compile(whole(ThinkingFrame.NONE, calls_only([tool(schema)], CallFormat.XML, False)), "tools")
    call = f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>".encode()
    matcher = rules.matcher.deep_copy()
    return matcher.try_consume_tokens(list(call)) == len(call)


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("letter", ["a", "b", "null"], ["c", "ab", "None", '"a"', ""]),
        ("color", ["red", "blue", "null"], ["green", "Null"]),
        ("code", ["it", "none", "true", "false"], ["ita", "True", "null"]),
    ],
)
def test_a_strict_text_of_several_choices_keeps_to_one_of_them(key: str, good: list[str], bad: list[str]) -> None:
    assert [value for value in good + bad if is_taken(OPTIONAL, key, value)] == good


@pytest.mark.parametrize(
    "value",
    [
        {"type": "string", "anyOf": [{"pattern": "^a"}, {"maxLength": 2}]},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "maxLength": 2},
        {"type": "string", "not": {"const": "a"}},
        {"allOf": [{"type": "string", "maxLength": 2}, {"type": "string", "pattern": "^a"}]},
    ],
    ids=["choices beside a type", "a limit beside choices", "not", "allOf"],
)
def test_what_a_strict_text_cannot_keep_is_refused_by_name(value: Any) -> None:
    with pytest.raises(BadRequest, match="leave out strict") as caught:
        calls_only([tool({"properties": {"a": value}})], CallFormat.XML, False)
    assert caught.value.field == "tools[0].function.parameters"
    calls_only([tool({"properties": {"a": value}}, strict=False)], CallFormat.XML, False)


@pytest.mark.parametrize("form", CallFormat)
def test_a_grammar_that_grows_too_large_is_refused_while_it_grows(form: CallFormat) -> None:
    """Definitions stand in the grammar of every parameter that may refer to them, and in that of every tool."""
    properties = {f"p{number}": {"type": "integer"} for number in range(100)}
    large = tool({"$defs": {"long": {"const": "x" * 100_000}}, "properties": properties})
    with pytest.raises(BadRequest, match="at most 524,288") as caught:
        calls_only([large] * 6, form, False)
    assert caught.value.field == "tools[0].function.parameters"

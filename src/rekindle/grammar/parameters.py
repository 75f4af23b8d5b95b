"""One parameter of a call in the XML format, from its tag to the end of its closing tag.

A text stands as it is, so that it ends at the first closing tag; every other value is JSON. Which of the two a value is
follows from the declared types, as it does where answers are parsed. A text of several choices keeps to one of them.
`format` is not kept in texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from llguidance import regex_to_lark

from rekindle.errors import BadRequest
from rekindle.grammar.frame import literal, with_options
from rekindle.text.parsing.coerce import Arguments, types_by_itself

END = "</parameter>\n"
TEXT = r"/(?s:.*)/ & ~/(?s:.*)<\/parameter>(?s:.*)/"  # any text without the closing tag
WORDS = {"null": ("null", "None"), "boolean": ("true", "false", "True", "False")}  # that are no text beside these types
MOST_CHOICES = 1024  # of one text
MOST_DEPTH = 8  # of choices in choices
TOGETHER = ("allOf", "not", "if", "minLength", "maxLength", "pattern")  # that hold beside every choice
NOT_KEPT = ("$ref", "anyOf", "oneOf", "allOf", "not", "if")  # in a text


def parameter(arguments: Arguments, key: str, strict: bool, rule: str, field: str) -> str:
    """The rule of this name and those that it needs. Raises BadRequest, naming the field of the body."""
    opening, types = literal(f"<parameter={key}>\n"), arguments.types_of(key)
    if types - {"string", "null", "boolean"} or (types and "string" not in types):
        value = json.dumps(_with_definitions(arguments, key, strict))
        return f"{rule}: {opening} %json {value} {literal(chr(10) + END)}\n"
    choices = list(islice(_choices(arguments, arguments.property_of(key)), MOST_CHOICES + 1))
    _check(choices, key, strict, field)
    texts = " | ".join(text for choice in choices for text in _texts(choice, types))
    # A text and its closing tag are one lexeme: any letter is text, so that a lexeme of its own would not end.
    terminal = rule.upper()
    return f"{rule}: {opening} {terminal}\n{terminal}: ({texts}) {literal(chr(10) + END)}\n"


def _choices(arguments: Arguments, schema: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """The schemas one of which a value keeps to. One that says more than its choices is left whole."""
    found = arguments.resolved(schema)
    schema = found if isinstance(found, Mapping) else {}
    several = [] if depth == MOST_DEPTH else _only_choices(schema)
    if not several:
        yield schema
    for choice in several:
        yield from _choices(arguments, choice, depth + 1)


def _only_choices(schema: Mapping[str, Any]) -> list[Any]:
    """None where it is anything else than a choice."""
    if types_by_itself(schema) is not None or any(name in schema for name in TOGETHER):
        return []
    several = [schema[name] for name in ("anyOf", "oneOf") if name in schema]
    return several[0] if len(several) == 1 and isinstance(several[0], list) else []


def _check(choices: list[Mapping[str, Any]], key: str, strict: bool, field: str) -> None:
    if len(choices) > MOST_CHOICES:
        raise BadRequest(f"{field}: {key[:80]!r} has more than {MOST_CHOICES:,} choices", field)
    not_kept = next((name for choice in choices for name in NOT_KEPT if name in choice), None)
    if strict and not_kept is not None:
        raise BadRequest(
            f"{field}: {not_kept!r} cannot be kept in the text {key[:80]!r} of this model's calls; leave out strict, "
            "or write the parameter as one anyOf of plain texts",
            field,
        )


def _texts(schema: Mapping[str, Any], types: frozenset[str]) -> list[str]:
    """The texts that are values of it, and the words for its other values.

    types: of all the choices, whose words are no texts."""
    listed = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(listed, list):
        return [literal(value if isinstance(value, str) else json.dumps(value)) for value in listed]
    own = types_by_itself(schema) or types or {"string"}
    words = [literal(word) for kind in sorted(own - {"string"}) for word in WORDS[kind] if word.islower()]
    return [_free(schema, types), *words] if "string" in own else words


def _free(schema: Mapping[str, Any], types: frozenset[str]) -> str:
    others = [word for kind in sorted(types - {"string"}) for word in WORDS[kind]]
    not_these = [f"~/[ \\n\\t]*({'|'.join(others)})[ \\n\\t]*/"] if others else []
    return "(" + " & ".join([TEXT, *_limits(schema), *not_these]) + ")"


def _limits(schema: Mapping[str, Any]) -> list[str]:
    least, most = (found if type(found := schema.get(name)) is int else None for name in ("minLength", "maxLength"))
    pattern = schema.get("pattern")
    limits = []
    if least is not None or most is not None:
        limits.append(f"/(?s:.{{{least or 0},{'' if most is None else most}}})/")
    if isinstance(pattern, str):
        limits.append(f"/{_anywhere(pattern)}/")
    return limits


def _anywhere(pattern: str) -> str:
    """A pattern of a schema may match anywhere; an expression here matches the whole."""
    begins, ends = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begins : len(pattern) - ends]
    expression = f"{'' if begins else '(?s:.*)'}(?:{inner}){'' if ends else '(?s:.*)'}"
    return regex_to_lark(expression, "dw").replace("\n", "\\n")


def _with_definitions(arguments: Arguments, key: str, strict: bool) -> dict[str, Any]:
    """Of a value by itself, with what it may refer to."""
    shared = {name: arguments.schema[name] for name in ("$defs", "definitions") if name in arguments.schema}
    schema = arguments.property_of(key)
    return with_options({**shared, **schema} if isinstance(schema, Mapping) else schema, strict)

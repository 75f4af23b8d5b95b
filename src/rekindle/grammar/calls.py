"""Grammars of tool calls, in the format that the model's own template shows it.

    XML     <tool_call>\\n<function=NAME>\\n<parameter=K>\\nV\\n</parameter>\\n</function>\\n</tool_call>   Qwen 3.5 on
    HERMES  <tool_call>\\n{"name": "NAME", "arguments": {…}}\\n</tool_call>                             Qwen 2.5, 3

Parameters come in the order in which they are declared. What the XML format cannot write is refused for strict tools:
what depends on several parameters at once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rekindle.errors import BadRequest
from rekindle.grammar.frame import literal, with_options
from rekindle.grammar.parameters import parameter
from rekindle.grammar.types import check_size
from rekindle.text.parsing.coerce import Arguments

OPENS = "<tool_call>"
SEVERAL = ("anyOf", "oneOf", "allOf", "not", "if", "patternProperties", "dependentRequired", "dependentSchemas",
           "minProperties", "maxProperties", "propertyNames")  # fmt: skip


class CallFormat(Enum):
    XML = "xml"
    HERMES = "hermes"

    @classmethod
    def of_template(cls, source: str) -> CallFormat | None:
        """None: a format that has no grammar here."""
        if OPENS not in source or "<arg_key>" in source:
            return None
        if "<function=" in source and "<parameter=" in source:
            return cls.XML
        return cls.HERMES if "arguments" in source else None


@dataclass(frozen=True, slots=True)
class CallableTool:
    name: str
    schema: Mapping[str, Any]  # of its arguments
    strict: bool
    field: str  # of the body; errors name it


def calls_only(tools: Sequence[CallableTool], form: CallFormat, parallel: bool) -> dict[str, Any]:
    """An answer of one call, or of several."""
    more = f'("\\n" {literal(OPENS)} call)*' if parallel else ""
    return {"lark_grammar": f"start: {literal(OPENS)} call {more}\n{_call(tools, form)}"}


def calls_amid_text(tools: Sequence[CallableTool], form: CallFormat) -> dict[str, Any]:
    """Any text; wherever it opens a call, a call follows."""
    return {
        "lark_grammar": "start: (lead call)* TEXT\n"
        f"lead[lazy]: LEAD\nLEAD: /(?s:.*){OPENS}/ & ~/[ \\n]*<think>(?s:.*)/\nTEXT: /(?s:.*)/\n{_call(tools, form)}"
    }


def _call(tools: Sequence[CallableTool], form: CallFormat) -> str:
    """The rule `call`: what follows the opening tag."""
    choice = " | ".join(f"tool{number}" for number in range(len(tools)))
    return f'call: "\\n" ({choice}) "</tool_call>"\n{"".join(_rules(tools, form))}'


def _rules(tools: Sequence[CallableTool], form: CallFormat) -> Iterator[str]:
    """Of all tools, as long as they are not too large together: definitions are repeated for each parameter."""
    size = 0
    for number, tool in enumerate(tools):
        for rule in _xml(tool, number) if form is CallFormat.XML else _hermes(tool, number):
            size += len(rule)
            check_size(size, tool.field)
            yield rule


def _hermes(tool: CallableTool, number: int) -> Iterator[str]:
    opening = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
    schema = {"type": "object", **tool.schema}
    yield f'tool{number}: {literal(opening)} %json {json.dumps(with_options(schema, tool.strict))} "}}\\n"\n'


def _xml(tool: CallableTool, number: int) -> Iterator[str]:
    _check(tool)
    keys = _keys(tool)
    rules = [f"tool{number}x{place}" for place in range(len(keys))]
    parts = [rule if needed else f"{rule}?" for rule, (_, needed) in zip(rules, keys, strict=True)]
    yield " ".join([f"tool{number}:", literal(f"<function={tool.name}>\n"), *parts, '"</function>\\n"\n'])
    arguments = Arguments(tool.schema)
    for rule, (key, _) in zip(rules, keys, strict=True):
        yield parameter(arguments, key, tool.strict, rule, tool.field)


def _keys(tool: CallableTool) -> list[tuple[str, bool]]:
    """Parameters, and whether each is required."""
    properties, required = tool.schema.get("properties"), tool.schema.get("required")
    declared = list(properties) if isinstance(properties, Mapping) else []
    needed = dict.fromkeys(key for key in required if isinstance(key, str)) if isinstance(required, list) else {}
    keys = dict.fromkeys([*declared, *needed])
    if bad := next((key for key in needed if not _is_writable(key)), None):
        raise BadRequest(f"{tool.field}: a parameter {bad[:80]!r} cannot be written in this model's calls", tool.field)
    return [(key, key in needed) for key in keys if _is_writable(key)]


def _check(tool: CallableTool) -> None:
    if not _is_writable(tool.name) or "(" in tool.name:
        raise BadRequest(
            f"{tool.field}: the name {tool.name[:80]!r} cannot be written in this model's calls", tool.field
        )
    several = [keyword for keyword in SEVERAL if keyword in tool.schema]
    if tool.strict and several:
        raise BadRequest(
            f"{tool.field}: {several[0]!r} at the top of the parameters cannot be kept in this model's calls, "
            "which write one parameter after the other; leave out strict, or move it into a parameter",
            tool.field,
        )


def _is_writable(name: str) -> bool:
    return bool(name) and name == name.strip() and not set(name) & set("<>\n\r") and len(name) <= 256

"""Lines that clients change: those of every call say nothing to the model, and would end every shared prefix; before
those that change with the clock a snapshot is worth its place."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class VolatileLine:
    """Lines of messages with this role that begin like this (whatever the case) are removed."""

    role: str
    beginning: str
    reason: str


VOLATILE_LINES: tuple[VolatileLine, ...] = (
    VolatileLine("system", "x-anthropic-billing-header:", "Claude Code writes a new value for each call"),
)


def normalise_messages(
    messages: Sequence[Mapping[str, Any]], rules: Sequence[VolatileLine] = VOLATILE_LINES
) -> list[dict[str, Any]]:
    """The messages without volatile lines. A part or message that held nothing else goes too. `()` removes nothing."""
    normalised = []
    for message in messages:
        beginnings = tuple(rule.beginning.lower() for rule in rules if rule.role == message.get("role"))
        content = message.get("content")
        kept = _without(content, beginnings) if beginnings else content
        if kept != content and not kept:
            continue
        normalised.append(dict(message) if kept is content else {**message, "content": kept})
    return normalised


LEAST_BEFORE_DATE = 256  # tokens: to compute fewer again costs less than to keep them
# A short line with a day or a time. Tools are lines of JSON, whose examples have dates too.
_DATE = r"\b(?:20\d\d-\d\d-\d\d|\d{1,2},? 20\d\d|\d{1,2}:\d\d)\b"
_DATED = re.compile(rf"^(?![^\S\n]*\{{)(?=.{{1,160}}$).*{_DATE}", re.MULTILINE)


def dated_line(text: str) -> list[int]:
    """Where the first line of a system prompt begins that changes with the clock; none where there is none."""
    found = _DATED.search(text)
    return [] if found is None else [found.start()]


def sorted_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[Mapping[str, Any]] | None:
    """Tools by name: clients name them in the order in which their servers happened to answer."""
    return None if tools is None else sorted(tools, key=_tool_name)


def _tool_name(tool: Mapping[str, Any]) -> str:
    function = tool.get("function")
    return str(function.get("name", "")) if isinstance(function, Mapping) else ""


def _without(content: Any, beginnings: tuple[str, ...]) -> Any:
    if isinstance(content, str):
        lines = content.split("\n")
        return "\n".join(line for line in lines if not line.lower().startswith(beginnings))
    if isinstance(content, list):
        return [part for part in (_part_without(part, beginnings) for part in content) if part is not None]
    return content


def _part_without(part: Any, beginnings: tuple[str, ...]) -> Any:
    """None for a part of which nothing is left."""
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        return part
    text = _without(part["text"], beginnings)
    if text == part["text"]:
        return part
    return {**part, "text": text} if text else None

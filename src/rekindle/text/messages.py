"""Messages in the form that templates read, from the form that clients send."""

from __future__ import annotations

from typing import Any

from rekindle.errors import BadRequest
from rekindle.text.parsing.jsonish import sent_back
from rekindle.text.sentinels import check_depth, plain


def readable(message: Any, index: int) -> dict[str, Any]:
    """A message as templates read it: an object with a role, tool-call arguments as objects, a content that is text.
    Clients send null beside tool calls, to which some templates would try to add text."""
    where = f"messages[{index}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f"{where} must be an object with a role", field=where)
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    if message.get("content") is None:
        message = message | {"content": ""}
    return message | {"tool_calls": [_with_arguments(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]}


def _with_arguments(call: Any, where: str) -> Any:
    """The call with its arguments as an object; the OpenAI dialect sends them as a JSON string."""
    if not isinstance(call, dict):
        raise BadRequest(f"{where} must be an object", field=where)
    if isinstance(call.get("function"), dict):
        return call | {"function": _with_arguments(call["function"], f"{where}.function")}
    if not isinstance(call.get("arguments"), str):
        return call
    try:
        arguments = sent_back(call["arguments"] or "{}")
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{where}.arguments is not JSON: {error}", field=f"{where}.arguments") from error
    if not isinstance(arguments, dict):
        raise BadRequest(f"{where}.arguments must be an object", field=f"{where}.arguments")
    check_depth(arguments, f"{where}.arguments")
    return call | {"arguments": plain(arguments, f"{where}.arguments")}


def with_joined_parts(message: dict[str, Any], index: int) -> dict[str, Any]:
    """For templates that take no parts: the text parts as lines of one text."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    for i, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            where = f"messages[{index}].content[{i}]"
            raise BadRequest(f"{where} is not text, and this model's template takes only text", field=where)
    return message | {"content": "\n".join(part["text"] for part in content)}

"""The input of OpenAI's Responses API as the messages and tools that templates read.

An answer comes back as several items: reasoning, a message, calls. Together they are one assistant's message again.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rekindle.api.dialects.base import Json
from rekindle.api.dialects.responses_output import CUSTOM_ARGUMENT, unseal
from rekindle.api.parsing import kind_of
from rekindle.errors import BadRequest
from rekindle.text.parsing.jsonish import sent_back

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
LEFT_OUT = "[{} left out: this model reads text only]"  # stands where a tool returned something else


@dataclass(slots=True)
class Messages:
    """Messages as they grow, item by item."""

    made: list[Json] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)  # parts of items that the model does not see

    def add(self, item: Any, where: str) -> None:
        if not isinstance(item, dict):
            raise BadRequest(f"{where}: must be an object, got {kind_of(item)}", where)
        kind = item.get("type", "message")
        match kind:
            case "message":
                self._message(item, where)
            case "reasoning":
                self._reasoning(item, where)
            case "function_call":
                self._function_call(item, where)
            case "custom_tool_call":
                given = {CUSTOM_ARGUMENT: _string(item, "input", where)}
                self._call(item, json.dumps(given, ensure_ascii=False), where)
            case "function_call_output" | "custom_tool_call_output":
                self._result(item, where)
            case _:
                raise BadRequest(f"{where}.type: {str(kind)[:40]!r} is not supported; {KNOWN}", f"{where}.type")

    def _message(self, item: Json, where: str) -> None:
        role = ROLES.get(_string(item, "role", where))
        if role is None:
            known = ", ".join(ROLES)
            raise BadRequest(f"{where}.role: must be one of {known}, got {item['role'][:40]!r}", f"{where}.role")
        if role == "assistant":
            turn = self._turn(lambda said: said["content"] and not said.get("tool_calls"))
            turn["content"] += "".join(_texts(item.get("content"), f"{where}.content"))
            return
        self.instruct_or_ask(role, "\n".join(_texts(item.get("content"), f"{where}.content")))

    def instruct_or_ask(self, role: str, text: str) -> None:
        """What is said before the conversation begins is one message: templates take one system message, the first."""
        if role == "system" and len(self.made) == 1 and self.made[0]["role"] == "system":
            self.made[0]["content"] += "\n\n" + text
        else:
            self.made.append({"role": role, "content": text})

    def _reasoning(self, item: Json, where: str) -> None:
        turn = self._turn(lambda said: said["content"] or said.get("tool_calls"))
        text = _reasoning_of(item, where)
        if text:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text

    def _function_call(self, item: Json, where: str) -> None:
        """Of a call that broke, the message beside it has the text; as a call it cannot be rendered. One that was cut
        off can."""
        arguments = _string(item, "arguments", where)
        if _are_arguments(arguments):
            self._call(item, arguments, where)
        else:
            self.ignored.append(f"{where} (a call without arguments in JSON)")
            self._turn()

    def _call(self, item: Json, arguments: str, where: str) -> None:
        function = {"name": _string(item, "name", where), "arguments": arguments}
        call = {"id": _string(item, "call_id", where), "type": "function", "function": function}
        self._turn().setdefault("tool_calls", []).append(call)

    def _result(self, item: Json, where: str) -> None:
        output = item.get("output")
        texts: list[str] = []
        for i, part in enumerate(output if isinstance(output, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if kind in ("input_image", "input_file"):
                texts.append(LEFT_OUT.format(kind.removeprefix("input_")))
                self.ignored.append(f"{where}.output[{i}] ({kind})")
            else:
                texts += _texts([part], f"{where}.output")
        texts = texts if isinstance(output, list) else _texts(output, f"{where}.output")
        call_id = _string(item, "call_id", where)
        self.made.append({"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)})

    def _turn(self, is_over: Any = lambda said: False) -> Json:
        """The assistant's message that is being put together; a new one where the last message `is_over`."""
        if not self.made or self.made[-1]["role"] != "assistant" or is_over(self.made[-1]):
            self.made.append({"role": "assistant", "content": ""})
        return self.made[-1]


KNOWN = "known are message, reasoning, function_call, function_call_output, custom_tool_call, custom_tool_call_output"


def _are_arguments(text: str) -> bool:
    try:
        return isinstance(sent_back(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False


def _string(item: Json, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{where}.{name}: must be a string, got {kind_of(value)}", f"{where}.{name}")
    return value


def _texts(content: Any, where: str) -> list[str]:
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise BadRequest(f"{where}: must be a string or a list of parts, got {kind_of(content)}", where)
    return [_text(part, f"{where}[{i}]") for i, part in enumerate(content)]


def _text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise BadRequest(f"{where}: a part must be an object with a type", where)
    if kind == "refusal":
        return _string(part, "refusal", where)
    if kind not in TEXTS:
        raise BadRequest(f"{where}: parts of type {kind[:40]!r} are not supported, only text", where)
    return _string(part, "text", where)


def _reasoning_of(item: Json, where: str) -> str:
    """As we sealed it, or as it was shown."""
    sealed = item.get("encrypted_content")
    opened = unseal(sealed) if isinstance(sealed, str) else None
    if opened is not None:
        return opened
    return "".join(text for name in ("content", "summary") for text in _texts(item.get(name) or [], f"{where}.{name}"))


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a body in the form that templates read."""

    functions: list[Json]
    custom: frozenset[str]  # names of those that are custom tools
    skipped: list[str]  # which ones, and why


def tools_of(tools: Sequence[Json]) -> Tools:
    functions: list[Json] = []
    custom: set[str] = set()
    skipped: list[str] = []
    for i, tool in enumerate(tools):
        kind = tool.get("type")
        if kind not in ("function", "custom"):
            skipped.append(f"tools[{i}] ({str(kind)[:40]})")
            continue
        name = _string(tool, "name", f"tools[{i}]")
        functions.append({"type": "function", "function": _function(tool) if kind == "function" else _custom(tool)})
        if kind == "custom":
            custom.add(name)
    return Tools(functions, frozenset(custom), skipped)


def _function(tool: Json) -> Json:
    kept = ("name", "description", "parameters", "strict")
    return {name: tool[name] for name in kept if tool.get(name) is not None}


def _custom(tool: Json) -> Json:
    """A function of one text. A grammar of the text is told to the model in words."""
    form = tool.get("format")
    grammar = form.get("definition") if isinstance(form, dict) else None
    about = [tool.get("description"), f"Its {CUSTOM_ARGUMENT} must match this grammar:\n{grammar}" if grammar else None]
    argument = {"type": "string", "description": "The tool's whole input, as plain text."}
    parameters = {"type": "object", "properties": {CUSTOM_ARGUMENT: argument}, "required": [CUSTOM_ARGUMENT]}
    description = "\n\n".join(each for each in about if isinstance(each, str))
    return {"name": tool["name"], "description": description, "parameters": parameters}


def choice_of(choice: Any) -> str | Json | None:
    """`tool_choice` in the form of the chat dialect, which templates read."""
    if isinstance(choice, dict) and choice.get("type") in ("function", "custom"):
        return {"type": "function", "function": {"name": _string(choice, "name", "tool_choice")}}
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        return choice.get("mode") if choice.get("mode") in ("auto", "required") else "auto"
    if choice in (None, "none", "auto", "required"):
        return choice if isinstance(choice, str) else None
    raise BadRequest(
        "tool_choice: must be none, auto, required, or name a function, a custom tool or allowed_tools", "tool_choice"
    )

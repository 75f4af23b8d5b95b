"""The ways in which models write tool calls, one reading function each.

    tool_call   <tool_call>{"name": …, "arguments": {…}}</tool_call>                             Hermes, Qwen 2.5, 3
                <tool_call><function=NAME><parameter=K>V</parameter></function></tool_call>      Qwen 3.5 on, Coder
                <tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value></tool_call>          GLM, Laguna
    function    <function=NAME>…</function>, or <function=NAME(k="v")></function>
    named_tag   <NAME><parameter=K>V</parameter></NAME>
    tool_code   <tool_code>{"name": …, "arguments": {…}}</tool_code>
    relaxed     call:NAMESPACE:NAME{key: value}                                                  Gemma
    bare_json   an answer that is nothing but {"name": …, "arguments": {…}}, or the arguments of the only tool

A call begins (CallBegun) as soon as its name is complete and is a tool's; from there its arguments are passed on as
they are written. Arguments that are written as text become JSON by the types that the tool declares.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from rekindle.text.parsing.coerce import Arguments
from rekindle.text.parsing.jsonish import object_in, read_value
from rekindle.text.parsing.reader import SPACE, Reader, Steps, overlap
from rekindle.text.parsing.relaxed import read_relaxed
from rekindle.text.parsing.types import CallArguments, CallBegun, CallDone, Event, Tool

MOST_NAME = 256  # characters of a tool's or a parameter's name
END = "</parameter>"
SURROGATES = re.compile("[\ud800-\udfff]")  # halves of characters, which no client could be sent
NAME_KEYS, ARGUMENT_KEYS = ("name", "tool", "tool_name"), ("arguments", "parameters", "args")
OTHER_KEYS = ("id", "type", "function")


class NoCall(Exception):
    """What was read is not a call, and why."""


class CallReader:
    """Reads calls of one answer and emits their events."""

    def __init__(self, reader: Reader, tools: Mapping[str, Tool], emit: Callable[[Event], None]) -> None:
        self.reader = reader
        self.tools = tools
        self.begun = False  # the call being read has been announced
        self.index = -1
        self._emit = emit
        self._arguments: dict[str, Arguments] = {}  # by tool
        self._first = True  # no argument has been written yet

    # Events

    def begin(self, name: str) -> None:
        if name not in self.tools:
            raise NoCall(f"there is no tool called {name[:80]!r}")
        self.index += 1
        self.begun, self._first = True, True
        self._emit(CallBegun(self.index, name))

    def arguments(self, text: str) -> None:
        self._emit(CallArguments(self.index, SURROGATES.sub("\ufffd", text)))

    def end(self) -> None:
        self._emit(CallDone(self.index))
        self.begun = False

    def cut(self) -> None:
        """The limit came inside it. Nobody shall take it for a call without arguments."""
        if self._first:
            self.arguments("{")
        self.begun = False

    def _key(self, name: str) -> None:
        self.arguments(("{" if self._first else ", ") + json.dumps(name, ensure_ascii=False) + ": ")
        self._first = False

    def _close(self) -> None:
        self.arguments("{}" if self._first else "}")
        self.end()

    def _declared(self, tool: str) -> Arguments:
        if tool not in self._arguments:
            self._arguments[tool] = Arguments(self.tools[tool].schema)
        return self._arguments[tool]

    # Ways of writing

    def tool_call(self) -> Steps[None]:
        yield from self.reader.skip_space()
        opened = yield from self.reader.literal("<function=", "{")
        if opened == "{":
            yield from self._named_object()
        elif opened is not None:
            yield from self._functions()
        else:
            yield from self._key_value_tags()
        yield from self.reader.skip_space()
        yield from self.reader.closing("</tool_call>")

    def function(self) -> Steps[None]:
        yield from self._functions()
        yield from self.reader.skip_space()
        yield from self.reader.closing("</tool_call>")

    def tool_code(self) -> Steps[None]:
        yield from self.reader.skip_space()
        if (yield from self.reader.literal("{")) is None:
            raise NoCall("no JSON object follows <tool_code>")
        yield from self._named_object()
        yield from self.reader.skip_space()
        yield from self.reader.closing("</tool_code>")

    def named_tag(self, name: str) -> Steps[None]:
        yield from self.reader.skip_space()
        if (yield from self.reader.literal("<parameter=")) is None:
            raise NoCall(f"no parameter follows <{name}>")
        self.begin(name)
        yield from self._parameters(name, (f"</{name}>",), opened=True)
        self._close()

    def relaxed(self) -> Steps[None]:
        name = yield from self.reader.until("{", *SPACE, most=MOST_NAME)
        if not name or not self.reader.rest.startswith("{"):
            raise NoCall("no name and { follow call:")
        name = name if name in self.tools else name.rpartition(":")[2]
        if name not in self.tools:  # before anything is read on its behalf
            raise NoCall(f"there is no tool called {name[:80]!r}")
        found = yield from read_relaxed(self.reader)
        if found is None:
            raise NoCall("what follows call: is no object")
        self.begin(name)
        self.arguments(json.dumps(found, ensure_ascii=False))
        self.end()

    def bare_json(self) -> Steps[None]:
        """The answer so far is blank, and { comes next."""
        pieces: list[str] = []
        if not (yield from self._may_be_call()) or not (yield from read_value(self.reader, pieces.append)):
            raise NoCall("the object is no call")
        yield from self.reader.skip_space()
        found = object_in("".join(pieces))
        if found is None or self.reader.rest:
            raise NoCall("more than an object was written")
        name, arguments = self._call_in(found)
        self.begin(name)
        self.arguments(json.dumps(arguments, ensure_ascii=False))
        self.end()

    # Tags

    def _functions(self) -> Steps[None]:
        """One call after the other; `<function=` has been read."""
        while True:
            name = yield from self.reader.until(">", "(", most=MOST_NAME)
            if name is None:
                raise NoCall("a function's name does not end")
            if self.reader.take(1) == "(":
                yield from self._python_style(name.strip())
            else:
                self.begin(name.strip())
                yield from self._parameters(name.strip(), ("</function>",))
                self._close()
            self.reader.mark()  # a call that is made is not read again if the next one is none
            yield from self.reader.skip_space()
            if (yield from self.reader.literal("<function=")) is None:
                return

    def _python_style(self, name: str) -> Steps[None]:
        """k="v", n=3) is next."""
        text = yield from self._tagged(")>")
        keywords = _keywords(text)
        if keywords is None:
            raise NoCall("the arguments in parentheses do not read")
        self.begin(name)
        self.arguments(json.dumps(keywords, ensure_ascii=False))
        yield from self.reader.skip_space()
        yield from self.reader.closing("</function>")
        self.end()

    def _parameters(self, tool: str, closings: tuple[str, ...], opened: bool = False) -> Steps[None]:
        """Up to and with the closing tag; a call that lacks it where the model ended the answer is complete too."""
        while True:
            if not opened:
                yield from self.reader.skip_space()
                tag = yield from self.reader.literal("<parameter=", *closings)
                if tag in closings:
                    return
                if tag is None:
                    if self._may_end:
                        return
                    raise NoCall("neither a parameter nor the end of the call follows")
            opened = False
            key = yield from self.reader.until(">", most=MOST_NAME)
            if key is None:
                raise NoCall("a parameter's name does not end")
            self.reader.take(1)
            yield from self._value(tool, key.strip(), closings)

    @property
    def _may_end(self) -> bool:
        """Whether the model ended the answer here: it may have left out what closes the call."""
        return self.reader.ended and not self.reader.rest and not self.reader.is_cut

    def _value(self, tool: str, key: str, closings: tuple[str, ...]) -> Steps[None]:
        declared = self._declared(tool)
        yield from self.reader.literal("\r\n", "\n")
        self._key(key)
        if declared.is_text(key):
            self.arguments('"')
            yield from self._value_text(closings, lambda text: self.arguments(_escaped(text)))
            self.arguments('"')
            return
        pieces: list[str] = []
        yield from self._value_text(closings, pieces.append)
        self.arguments(declared.as_json(key, "".join(pieces)))

    def _value_text(self, closings: tuple[str, ...], on_text: Callable[[str], None]) -> Steps[None]:
        """A value may hold </parameter> itself: the one that ends it has another tag of the call behind it."""
        reader = self.reader
        while True:
            at = reader.rest.find(END)
            if at < 0:
                keep = overlap(reader.rest, ("\r\n" + END, "\n" + END, END))
                if text := reader.take(len(reader.rest) - keep):
                    on_text(text)
                if not (yield from reader.more()):
                    raise NoCall("the answer ends inside a parameter")
            elif (yield from self._ends_at(at, closings)):
                text = reader.take(at)
                reader.take(len(END))
                if text := text.removesuffix("\n").removesuffix("\r"):
                    on_text(text)
                return
            else:
                on_text(reader.take(at + len(END)))

    def _ends_at(self, at: int, closings: tuple[str, ...]) -> Steps[bool]:
        tags = ("<parameter=", "</tool_call>", *closings)
        while True:
            follows = self.reader.rest[at + len(END) :].lstrip(SPACE)
            if follows.startswith(tags):
                return True
            if follows and not any(tag.startswith(follows) for tag in tags):
                return False
            if not (yield from self.reader.more()):
                return not follows or self.reader.is_cut  # amid the next tag

    def _key_value_tags(self) -> Steps[None]:
        name = yield from self.reader.until("<", "\n", most=MOST_NAME)
        if name is None:
            raise NoCall("neither a function nor an object follows <tool_call>")
        self.begin(name.strip())
        while True:
            yield from self.reader.skip_space()
            if (yield from self.reader.literal("<arg_key>")) is None:
                break
            key = yield from self._tagged("</arg_key>")
            yield from self.reader.skip_space()
            if (yield from self.reader.literal("<arg_value>")) is None:
                raise NoCall(f"no value follows the key {key[:80]!r}")
            self._key(key.strip())
            text = yield from self._tagged("</arg_value>")
            self.arguments(self._declared(name.strip()).as_json(key.strip(), text))
        if not self.reader.rest.startswith("</tool_call>"):
            yield from self._expect_end()
        self._close()

    def _expect_end(self) -> Steps[None]:
        while "</tool_call>".startswith(self.reader.rest) and (yield from self.reader.more()):
            pass
        if not self.reader.rest.startswith("</tool_call>") and not self._may_end:
            raise NoCall("neither a key nor the end of the call follows")

    def _tagged(self, end: str) -> Steps[str]:
        while (at := self.reader.rest.find(end)) < 0:
            if not (yield from self.reader.more()):
                raise NoCall(f"the answer ends before {end}")
        text = self.reader.take(at)
        self.reader.take(len(end))
        return text

    # JSON

    def _named_object(self) -> Steps[None]:
        """A name and arguments, in either order; { has been read."""
        early = yield from self._members(None)
        if not self.begun:
            raise NoCall("the object has no name")
        if early is not None:  # the arguments came before the name
            self.arguments(early)
        elif self._first:
            self.arguments("{}")
        self.end()

    def _members(self, early: str | None, inside: bool = False) -> Steps[str | None]:
        """inside: of the object under "function"."""
        while True:
            yield from self.reader.skip_space()
            if (yield from self.reader.literal("}")) is not None:
                return early
            key = yield from self._string()
            yield from self.reader.skip_space()
            if (yield from self.reader.literal(":")) is None:
                raise NoCall("no colon follows a key")
            yield from self.reader.skip_space()
            if key in NAME_KEYS and not self.begun:
                self.begin((yield from self._string()))
            elif key in ARGUMENT_KEYS:
                if early is not None or (self.begun and not self._first):
                    raise NoCall("the arguments come twice")
                early = yield from self._argument_object()
            elif key == "function" and not inside and (yield from self.reader.literal("{")) is not None:
                early = yield from self._members(early, inside=True)
            else:
                yield from self._skipped()
            yield from self.reader.skip_space()
            yield from self.reader.literal(",")

    def _argument_object(self) -> Steps[str | None]:
        """Passed on where the call has begun, else given back. Some models write the object as a string."""
        pieces: list[str] = []
        if not self.reader.rest and not (yield from self.reader.more()):
            raise NoCall("the answer ends before the arguments")
        if self.reader.rest.startswith('"'):
            text = yield from self._string()
            if object_in(text) is None:
                raise NoCall("the arguments are no object")
            pieces.append(text)
        elif not self.reader.rest.startswith("{"):
            raise NoCall("the arguments are no object")
        elif not (yield from read_value(self.reader, self._passed_on if self.begun else pieces.append)):
            raise NoCall("the arguments do not read as JSON")
        if not self.begun:
            return "".join(pieces)
        if pieces:
            self._passed_on(pieces[0])
        return None

    def _passed_on(self, text: str) -> None:
        self._first = False
        self.arguments(text)

    def _string(self) -> Steps[str]:
        pieces: list[str] = []
        if (not self.reader.rest and not (yield from self.reader.more())) or not self.reader.rest.startswith('"'):
            raise NoCall("a string was expected")
        if not (yield from read_value(self.reader, pieces.append)):
            raise NoCall("a string does not end")
        return str(json.loads("".join(pieces)))

    def _skipped(self) -> Steps[None]:
        """A member that says nothing about the call: a string, an object or a list; or a short word or number."""
        if not self.reader.rest and not (yield from self.reader.more()):
            raise NoCall("the answer ends inside the object")
        if self.reader.rest[0] in '"{[':
            if not (yield from read_value(self.reader, lambda _: None)):
                raise NoCall("a member does not read as JSON")
        elif (yield from self.reader.until(",", "}", most=MOST_NAME)) is None:
            raise NoCall("a member does not end")

    # A whole answer

    def _may_be_call(self) -> Steps[bool]:
        """Whether the first key can be one of a call, so that other JSON is passed on as it is written."""
        keys = {*NAME_KEYS, *ARGUMENT_KEYS, *OTHER_KEYS, *self._only_properties()}
        openings = [json.dumps(key, ensure_ascii=False) for key in keys]
        while True:
            inside = self.reader.rest[1:].lstrip(SPACE)
            if any(inside.startswith(opening) for opening in openings):
                return True
            if inside and not any(opening.startswith(inside) for opening in openings):
                return False
            if not (yield from self.reader.more()):
                return False

    def _only_properties(self) -> Mapping[str, Any]:
        if len(self.tools) != 1:
            return {}
        properties = next(iter(self.tools.values())).schema.get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def _call_in(self, found: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        inner = found.get("function")
        named = inner if isinstance(inner, dict) else found
        name = next((named[key] for key in NAME_KEYS if isinstance(named.get(key), str)), None)
        arguments = next((named[key] for key in ARGUMENT_KEYS if key in named), None)
        if isinstance(arguments, str):
            arguments = object_in(arguments)
        if name is not None and isinstance(arguments, dict):
            return name, arguments
        if self._only_properties() and _satisfies(found, next(iter(self.tools.values())).schema):
            return next(iter(self.tools)), found
        raise NoCall("the object names no tool, and is not the arguments of the only one")


def _satisfies(value: Mapping[str, Any], schema: Mapping[str, Any]) -> bool:
    """Every required property is there, no other than declared ones are, and their types are as declared."""
    properties, required = schema.get("properties", {}), schema.get("required")
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set[str]()
    if not value or not needed <= value.keys() <= properties.keys():
        return False
    declared = Arguments(schema)
    return all(_is_of(item, declared.types_of(key)) for key, item in value.items())


def _is_of(value: Any, types: frozenset[str]) -> bool:
    kinds: dict[str, type | tuple[type, ...]] = {
        "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
        "null": type(None),
    }  # fmt: skip
    if isinstance(value, bool):
        return not types or "boolean" in types
    return not types or any(isinstance(value, kinds[name]) for name in types if name in kinds)


def _keywords(text: str) -> dict[str, Any] | None:
    """k="v", n=3 as a mapping."""
    try:
        call = ast.parse(f"_({text})", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        found = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg}
        json.dumps(found, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    return found


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]

"""JSON that arrives in pieces, or not whole: where an object ends, whether it is one so far, what it holds so far."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any, Literal, NoReturn

from pydantic_core import from_json

from rekindle.text.parsing.reader import Reader, Steps

MOST_DEPTH = 64
_NUMBER = frozenset("+-0123456789.eE")
_WORDS = ("true", "false", "null")
# An escaped surrogate, or a pair of them, after an even number of backslashes: after an odd number, the backslash of
# `\u` is itself escaped.
_SURROGATE = re.compile(rb"(?<!\\)((?:\\\\)*)\\u([dD][89abAB]..\\u[dD][c-fC-F]..|[dD][89a-fA-F]..)", re.DOTALL)


class JsonScanner:
    """Follows one value character by character. `push` says whether the character can stand there."""

    def __init__(self) -> None:
        self._stack: list[str] = []  # of { and [
        self._want = "value"  # value, value or ], key or }, key, colon, comma
        self._word = ""  # a number or a name under way
        self._string = False
        self._escape = ""  # "\\" or "\\u" and its digits
        self._key = False  # the string under way is a key
        self.done = False

    def push(self, char: str) -> bool:
        if self.done:
            return char.isspace()
        if self._string:
            return self._in_string(char)
        if self._word:
            if char in _NUMBER or char.isalpha():
                self._word += char
                return self._word_may_be_one()
            if not self._word_is_one():
                return False
            self._word = ""
            self._after_value()
        if char in " \t\r\n":
            return True
        return self._structure(char)

    def _in_string(self, char: str) -> bool:
        if self._escape:
            return self._in_escape(char)
        if char == "\\":
            self._escape = "\\"
        elif char == '"':
            self._string = False
            if self._key:
                self._want = "colon"
            else:
                self._after_value()
        return char >= " "

    def _in_escape(self, char: str) -> bool:
        if self._escape == "\\":
            self._escape = "\\u" if char == "u" else ""
            return char in '"\\/bfnrtu'
        self._escape = "" if len(self._escape) == 5 else self._escape + char
        return char in "0123456789abcdefABCDEF"

    def _structure(self, char: str) -> bool:
        want = self._want
        if want == "comma":
            if char == "," and self._stack:
                self._want = "key" if self._stack[-1] == "{" else "value"
                return True
            return self._close(char)
        if want == "colon":
            self._want = "value"
            return char == ":"
        if want.startswith("key"):
            if char == '"':
                self._string = self._key = True
                return True
            return want == "key or }" and self._close(char)
        if char == "]" and want == "value or ]":
            return self._close(char)
        return self._value(char)

    def _value(self, char: str) -> bool:
        if char == '"':
            self._string, self._key = True, False
        elif char in "{[":
            self._stack.append(char)
            self._want = "key or }" if char == "{" else "value or ]"
            return len(self._stack) <= MOST_DEPTH
        elif char == "-" or char.isdigit() or char in "tfn":
            self._word = char
        else:
            return False
        return True

    def _close(self, char: str) -> bool:
        if not self._stack or char != {"{": "}", "[": "]"}[self._stack[-1]]:
            return False
        self._stack.pop()
        self._after_value()
        return True

    def _after_value(self) -> None:
        self._want = "comma"
        self.done = not self._stack

    def _word_may_be_one(self) -> bool:
        return self._word[0] in _NUMBER or any(word.startswith(self._word) for word in _WORDS)

    def _word_is_one(self) -> bool:
        try:
            loads(self._word)
        except ValueError:
            return False
        return True


def read_value(reader: Reader, on_text: Callable[[str], None]) -> Steps[bool]:
    """Consume one JSON object or array, handing its characters on as they come; False where it breaks off or is none.
    The characters before the fault have been handed on and consumed."""
    scanner, sound = JsonScanner(), True
    while not scanner.done:
        if not reader.rest and not (yield from reader.more()):
            return False
        count = 0
        for char in reader.rest:
            sound = scanner.push(char)
            if not sound:
                break
            count += 1
            if scanner.done:
                break
        if text := reader.take(count):
            on_text(text)
        if not sound:
            return False
    return True


def object_in(text: str) -> dict[str, Any] | None:
    """The object that the text is, if it is one."""
    try:
        value = loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def sent_back(text: str) -> Any:
    """What a client sends back as the arguments of a call. Beside JSON the beginning of an object is read, as far as it
    goes, for the answer's limit may have come inside the call; and either of them within a string, for some clients
    send what they could not read so. ValueError for everything else."""
    try:
        value = loads(text)
    except ValueError:
        scanner = JsonScanner()
        if not text.lstrip().startswith("{") or not all(map(scanner.push, text)) or scanner.done:
            raise
        return so_far(text, "trailing-strings")
    return sent_back(value) if isinstance(value, str) else value


def whole(text: str) -> Any:
    """What a JSON value of a model holds, with U+FFFD for half a character, so that it can be sent. ValueError as
    `loads`."""
    return loads(mend_surrogates(text.encode()).decode())


def so_far(text: str, partial: Literal[True, "trailing-strings"] = True) -> Any:
    """What the beginning of a JSON value holds, with or without the string that it ends in. ValueError as `loads`."""
    data = mend_surrogates(text.encode("utf-8", "surrogatepass"))
    return loads(json.dumps(from_json(data, allow_partial=partial)))


def mend_surrogates(data: bytes) -> bytes:
    """Halves of surrogate pairs become U+FFFD. Agents cut text in the middle of an emoji, and no tokenizer takes it."""
    if b"\\" not in data or (b"\\ud" not in data and b"\\uD" not in data):  # one letter is found much faster than three
        return data
    return _SURROGATE.sub(lambda found: found[1] + rb"\ufffd" if len(found[2]) == 4 else found[0], data)


def loads(text: str) -> Any:
    """As json.loads, but for numbers that JSON cannot write again: NaN, the infinities, and 1e999, which becomes one.
    They raise ValueError."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text)


def _refuse(number: str) -> NoReturn:
    raise ValueError(f"{number} is no number of JSON")

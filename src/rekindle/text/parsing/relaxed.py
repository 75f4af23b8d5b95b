"""Objects as Gemma writes them: keys without quotes, strings in quotes of several kinds.

{city: <|"|>Rome<|"|>, days: 3, tags: ['a', "b"], deep: {on: true}}
"""

from __future__ import annotations

import json
from typing import Any

from rekindle.text.parsing.jsonish import loads
from rekindle.text.parsing.reader import SPACE, Reader, Steps

QUOTES = ('<|"|>', '"', "'")
MOST_DEPTH = 32
MOST_TEXT = 1 << 14  # characters of an object: it is read again whenever it may be complete
_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}


class _Unreadable(Exception):
    pass


def read_relaxed(reader: Reader) -> Steps[dict[str, Any] | None]:
    """Consume the object that comes next; None, and nothing is consumed, where there is none or the text ends first."""
    seen = 0
    while True:
        while reader.rest.find("}", seen, MOST_TEXT) < 0:  # not complete: there is nothing to read yet
            seen = len(reader.rest)
            if seen >= MOST_TEXT or not (yield from reader.more()):
                return None
        seen = len(reader.rest)
        try:
            value, end = _value(reader.rest[:MOST_TEXT], 0, 0)
        except _Unreadable:
            return None
        except IndexError:  # more text may complete it
            continue
        if not isinstance(value, dict):
            return None
        reader.take(end)
        return value


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    at = _skip(text, at)
    if depth > MOST_DEPTH:
        raise _Unreadable
    if text[at] == "{":
        return _object(text, at + 1, depth + 1)
    if text[at] == "[":
        return _array(text, at + 1, depth + 1)
    quote = _quote(text, at)
    return _string(text, at, quote) if quote else _word(text, at)


def _object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    while True:
        at = _skip(text, at)
        if text[at] == "}":
            return found, at + 1
        quote = _quote(text, at)
        key, at = _string(text, at, quote) if quote else _key(text, at)
        at = _skip(text, at)
        if text[at] != ":":
            raise _Unreadable
        found[key], at = _value(text, at + 1, depth)
        at = _after_item(text, at, "}")


def _array(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    found: list[Any] = []
    while True:
        at = _skip(text, at)
        if text[at] == "]":
            return found, at + 1
        value, at = _value(text, at, depth)
        found.append(value)
        at = _after_item(text, at, "]")


def _after_item(text: str, at: int, closing: str) -> int:
    at = _skip(text, at)
    if text[at] == ",":
        return at + 1
    if text[at] != closing:
        raise _Unreadable
    return at


def _quote(text: str, at: int) -> str | None:
    for quote in QUOTES:
        if text.startswith(quote, at):
            return quote
        if quote.startswith(text[at:]):  # the text ends inside it
            raise IndexError
    return None


def _string(text: str, at: int, quote: str) -> tuple[str, int]:
    at += len(quote)
    if len(quote) > 1:  # nothing is escaped inside
        end = text.find(quote, at)
        if end < 0:
            raise IndexError
        return text[at:end], end + len(quote)
    end = at
    while text[end] != quote:
        end += 2 if text[end] == "\\" else 1
    inside = text[at:end].replace("\\'", "'")
    if quote == "'":
        inside = inside.replace('"', '\\"')
    try:
        return str(json.loads(f'"{inside}"', strict=False)), end + 1
    except ValueError:
        raise _Unreadable from None


def _key(text: str, at: int) -> tuple[str, int]:
    end = at
    while text[end].isalnum() or text[end] in "_-.$":
        end += 1
    if end == at:
        raise _Unreadable
    return text[at:end], end


def _word(text: str, at: int) -> tuple[Any, int]:
    """A number or a name; other bare words are strings."""
    end = at
    while text[end] not in ",]}\n":
        end += 1
    word = text[at:end].strip(SPACE)
    if not word:
        raise _Unreadable
    if word in _WORDS:
        return _WORDS[word], end
    try:
        return loads(word), end
    except ValueError:
        return word, end


def _skip(text: str, at: int) -> int:
    while text[at] in SPACE:
        at += 1
    return at

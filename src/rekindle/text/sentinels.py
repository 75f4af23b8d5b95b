"""Keeping what a client wrote apart from what the template writes.

A template is free to trim, split, join and JSON-encode the strings it gets, so their places in its output are unknown.
Instead the strings are changed before rendering, such that no special token can be read out of them afterwards:

- behind every character that begins the text of some special token (in practice every `<`) comes `broken`. A token's
  text that begins inside a client's string is thus never whole, however strings are cut or joined;
- before a string that could be the rest of a token's text which the template began (`think>`) comes `broken` too;
- in an assistant's content, markup the model may have written itself is left whole. Where it opens a tool call,
  `written` stands before it: a real token, but no boundary. Reasoning and tool-call arguments are not excepted: had the
  model written `</think>` or `</tool_call>` there as a token, they would have ended;
- `here` and `next` stand behind text that the client marked with `cache_control`;
- `begin` and `end` stand around a system message that is rendered as another (`late_system`).

Sentinels are private-use characters that occur neither in the request nor in the template, in no spelling; they lie on
the inner side of outer whitespace, so trimming works; they are removed before anything is encoded or shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rekindle.errors import BadRequest
from rekindle.text.tokenizer import well_formed

CACHE_CONTROL = "cache_control"

# Values under these keys are compared by templates ("role" == "user"), and no template writes them as free text.
_COMPARED_KEYS = frozenset({"role", "type"})

_PRIVATE = range(0xE000, 0xF900)
_PRIVATE_CHARACTER = re.compile("[\ue000-\uf8ff]")
_PRIVATE_ESCAPE = re.compile(r"\\u([ef][0-9a-f]{3})", re.IGNORECASE)  # as JSON in ASCII spells it


@dataclass(frozen=True, slots=True)
class Sentinels:
    """Six characters of one request."""

    broken: str
    written: str
    here: str  # a mark at this place of the text
    next: str  # a mark at the start of the next message
    begin: str  # of a system message that is rendered as another
    end: str

    @classmethod
    def avoiding(cls, used: set[int]) -> Sentinels:
        free = (chr(code) for code in _PRIVATE if code not in used)
        chosen = [character for _, character in zip(range(6), free, strict=False)]
        if len(chosen) < 6:
            raise BadRequest("the request uses every private-use character of Unicode", field="messages")
        return cls(*chosen)

    def pattern(self) -> re.Pattern[str]:
        """Any sentinel, raw or as JSON in ASCII spells it."""
        each = (self.broken, self.written, self.here, self.next, self.begin, self.end)
        return re.compile("|".join(rf"{s}|\\u(?i:{ord(s):04x})" for s in each))

    def meaning(self, found: str) -> str:
        """The sentinel itself, from either spelling."""
        return found if len(found) == 1 else chr(int(found[2:], 16))


def private_codes(strings: Iterable[str]) -> set[int]:
    """Private-use characters in the strings, in either spelling."""
    codes: set[int] = set()
    for text in strings:
        if not text.isascii():  # which a string knows of itself: hardly any is searched
            codes.update(map(ord, _PRIVATE_CHARACTER.findall(text)))
        if "\\" in text:
            codes.update(int(digits, 16) for digits in _PRIVATE_ESCAPE.findall(text))
    return codes


def strings_of(value: Any) -> Iterator[str]:
    """Every string anywhere in plain data, keys too, in no order."""
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            left += each
            left += each.values()
        elif isinstance(each, list):
            left += each


MAX_DEPTH = 64  # levels of lists and objects in what clients send; JSON schemas of tools have a dozen


def check_depth(value: Any, field: str) -> None:
    if is_deep(value):
        raise BadRequest(f"{field}: is nested more than {MAX_DEPTH} levels deep", field)


def is_deep(value: Any) -> bool:
    """Templates, encoders and our own walks go down one call a level, so there must not be too many."""
    level = _filled([value])
    for _ in range(MAX_DEPTH - 1):
        contents = (outer.values() if isinstance(outer, dict) else outer for outer in level)
        level = [inner for values in contents for inner in _filled(values)]
        if not level:
            return False
    return True


def _filled(values: Collection[Any]) -> list[Any]:
    """The lists and objects among them that hold something. Without a look at each where there are none: a prompt may
    be a hundred thousand numbers."""
    if not any(issubclass(kind, dict | list) for kind in set(map(type, values))):
        return []
    return [value for value in values if isinstance(value, dict | list) and value]


def plain(value: Any, field: str) -> Any:
    """A copy made of JSON types only, which is all a template may see; every string well-formed."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return well_formed(str(value))
    if isinstance(value, Mapping):
        return {well_formed(str(key)): plain(item, field) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, field) for item in value]
    raise BadRequest(f"{field} holds a {type(value).__name__}, which is not JSON", field=field)


class Escaper:
    """Changes strings as the module's first lines say. One per request."""

    def __init__(self, special: Iterable[str], allowed: Iterable[str], openers: Iterable[str], marks: Sentinels):
        """`special`: texts of all special tokens; `allowed`: those an assistant may have written; `openers` among them
        begin a tool call."""
        special = [text for text in special if text]
        self._marks = marks
        self._openers = frozenset(openers)
        firsts = "".join(sorted({text[0] for text in special}))
        allowed_first = sorted(allowed, key=len, reverse=True)
        first = f"[{re.escape(firsts)}]" if firsts else "(?!)"
        self._first = re.compile(first)
        self._allowed_or_first = re.compile("|".join([*map(re.escape, allowed_first), first]))
        self._rests = tuple({text[i:] for text in special for i in range(1, len(text))})
        self._insides = "\0".join(text[1:] for text in special)

    def compared(self, value: Any) -> Any:
        """Template options: strings that templates compare, so only tokens' beginnings are broken."""
        return self._walk(value, self._break, self._break)

    def tool(self, value: Any) -> Any:
        return self._walk(value, self._free, self._break)

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        """One message, its marks turned into sentinels."""
        marked = self._marked(message)
        escaped: dict[str, Any] = self._walk(marked, self._free, self._break)
        if message.get("role") == "assistant" and "content" in marked:
            escaped["content"] = self._walk(marked["content"], self._assistant, self._break)
        return escaped

    def _walk(self, value: Any, text: Callable[[str], str], key: Callable[[str], str]) -> Any:
        if isinstance(value, str):
            return text(value)
        if isinstance(value, dict):
            return {
                key(name): self._walk(item, self._break if name in _COMPARED_KEYS else text, key)
                for name, item in value.items()
            }
        if isinstance(value, list):
            return [self._walk(item, text, key) for item in value]
        return value

    def _break(self, text: str) -> str:
        return self._first.sub(lambda found: found.group() + self._marks.broken, text)

    def _free(self, text: str) -> str:
        return self._not_a_rest(text, self._break(text))

    def _assistant(self, text: str) -> str:
        return self._not_a_rest(text, self._allowed_or_first.sub(self._keep_or_break, text))

    def _keep_or_break(self, found: re.Match[str]) -> str:
        token = found.group()
        if len(token) == 1:
            return token + self._marks.broken
        return self._marks.written + token if token in self._openers else token

    def _not_a_rest(self, text: str, escaped: str) -> str:
        """`escaped`, with `broken` in front if `text` could be the rest, or an inner piece, of a token's text."""
        core = text.strip()
        if not core or not (core.startswith(self._rests) or core in self._insides):
            return escaped
        blank = len(text) - len(text.lstrip())
        return escaped[:blank] + self._marks.broken + escaped[blank:]

    def _marked(self, message: dict[str, Any]) -> dict[str, Any]:
        marked = CACHE_CONTROL in message
        message = {name: item for name, item in message.items() if name != CACHE_CONTROL}
        content = message.get("content")
        if isinstance(content, str) and marked:
            message["content"] = _behind_text(content, self._marks.next)
        elif isinstance(content, list):
            message["content"] = [self._marked_part(p, i + 1 == len(content), marked) for i, p in enumerate(content)]
        return message

    def _marked_part(self, part: Any, last: bool, message_marked: bool) -> Any:
        if not isinstance(part, dict):
            return part
        marked = CACHE_CONTROL in part or (last and message_marked)
        part = {name: item for name, item in part.items() if name != CACHE_CONTROL}
        if marked and isinstance(part.get("text"), str):
            part["text"] = _behind_text(part["text"], self._marks.next if last else self._marks.here)
        return part


def _behind_text(text: str, sentinel: str) -> str:
    """The sentinel behind the last character that is not blank; a blank text has no place to mark."""
    end = len(text.rstrip())
    return text[:end] + sentinel + text[end:] if end else text


def without_cache_control(tool: Any) -> Any:
    """A tool without its mark. Templates print whole tools, and clients move marks from call to call."""
    if not isinstance(tool, dict):
        return tool
    kept = {name: item for name, item in tool.items() if name != CACHE_CONTROL}
    if isinstance(kept.get("function"), dict):
        kept["function"] = {name: item for name, item in kept["function"].items() if name != CACHE_CONTROL}
    return kept

"""System messages behind the first message, which agents send after tool results, keep their place.

Moved to the front they would change the beginning of every prompt. Many templates refuse them where they are, so one of
these ways is found by probing, the first that the template allows:

    AS_IS    the template writes them in their place
    TURN     a turn of the user's is rendered, and its opening becomes that of a system turn
    USER     a turn of the user's whose text says what it is
    APPENDED the same text at the end of the message before

In a TURN the text stands in <tool_response> while it is rendered, which is taken off again: templates drop thinking
before the user's last question, and a response is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rekindle.text.sentinels import Sentinels

_OPEN, _CLOSE = "<tool_response>", "</tool_response>"
_WORDS = ("kwzsystem", "kwzfirst", "kwzsecond", "kwzlate", "kwzlast")  # that no template writes by itself

Message = dict[str, Any]
Render = Callable[[list[Message]], str | None]  # None where the template refuses the messages


class LateSystemWay(StrEnum):
    AS_IS = "as it is"
    TURN = "turn"
    USER = "user"
    APPENDED = "appended"


@dataclass(frozen=True, slots=True)
class LateSystem:
    """What one template allows."""

    way: LateSystemWay = LateSystemWay.AS_IS
    user: str = ""  # how the template opens a turn of the user's
    system: str = ""  # and how it opens one of the system's

    @classmethod
    def probe(cls, render: Render, role_starts: Sequence[str], marks: Sentinels) -> LateSystem:
        """role_starts: the texts of the tokens that begin messages."""
        if _in_order(render(_conversation("system"))):
            return cls()
        opening = render(_conversation("system")[:2]) or ""
        before, _, rest = opening.partition(_WORDS[0])
        for start in role_starts:
            user = start + rest.partition(_WORDS[1])[0].rpartition(start)[2]
            system = user.replace("user", "system")
            found = cls(LateSystemWay.TURN, user, system)
            if "user" in user and system in before and found._works(render, marks):
                return found
        takes_two = any(_in_order(render(_conversation("user")[first:]), first) for first in (0, 1))
        return cls(LateSystemWay.USER if takes_two else LateSystemWay.APPENDED)

    def _works(self, render: Render, marks: Sentinels) -> bool:
        asked = [self._placed(message, marks) if i == 3 else message for i, message in enumerate(_conversation("user"))]
        text = render(asked)
        if text is None:
            return False
        written = self.written(text, marks)
        return _in_order(written) and f"{self.system}{_WORDS[3]}" in written and _OPEN not in written

    def place(self, messages: Sequence[Message], marks: Sentinels) -> list[Message]:
        """The messages in a form that the template takes."""
        placed: list[Message] = []
        for message in messages:
            if self.way is LateSystemWay.AS_IS or not placed or message.get("role") != "system":
                placed.append(message)
            elif self.way is LateSystemWay.APPENDED and placed[-1].get("role") in ("user", "tool"):
                placed[-1] = _appended(placed[-1], _said(message))
            else:
                placed.append(self._placed(message, marks))
        return placed

    def _placed(self, message: Message, marks: Sentinels) -> Message:
        text = _text(message)
        if self.way is LateSystemWay.TURN:
            return {"role": "user", "content": f"{_OPEN}{marks.begin}{text}{marks.end}{_CLOSE}"}
        return {"role": "user", "content": _said(message)}

    def written(self, text: str, marks: Sentinels) -> str:
        """What the template wrote, with the turns that stood for the system's as the system's."""
        if self.way is not LateSystemWay.TURN or marks.begin not in text:
            return text
        text = re.sub(re.escape(f"{self.user}{_OPEN}{marks.begin}"), lambda _: self.system, text)
        return text.replace(f"{marks.end}{_CLOSE}", "")


def _conversation(role: str) -> list[Message]:
    roles = ("system", "user", "assistant", role, "user")
    return [{"role": each, "content": word} for each, word in zip(roles, _WORDS, strict=True)]


def _in_order(text: str | None, first: int = 0) -> bool:
    """Whether every word, from the first that was said on, stands in its place."""
    places = [text.find(word) for word in _WORDS[first:]] if text is not None else [-1]
    return -1 not in places and places == sorted(places)


def _text(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(part.get("text", "") for part in content if isinstance(part, dict))
    return (content if isinstance(content, str) else "").strip()


def _said(message: Message) -> str:
    return f"<system-message>\n{_text(message)}\n</system-message>"


def _appended(message: Message, said: str) -> Message:
    content = message.get("content")
    if isinstance(content, list):
        return message | {"content": [*content, {"type": "text", "text": f"\n\n{said}"}]}
    return message | {"content": f"{content or ''}\n\n{said}"}

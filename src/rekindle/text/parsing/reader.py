"""Text that arrives in pieces, read as if it were whole.

A parser is written as a generator that reads from a `Reader` and yields wherever it needs more text. Where the pieces
are cut cannot change what it finds, because it only ever decides on text that it has, or on the end of all text.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]  # yields for more text, returns a value

SPACE = " \t\r\n"


class Reader:
    def __init__(self) -> None:
        self.rest = ""  # not consumed yet
        self.ended = False  # nothing follows `rest` …
        self.is_cut = False  # … since the limit came, and not because the model was done
        self._taken: list[str] | None = None  # consumed since `mark`

    def feed(self, text: str) -> None:
        assert not self.ended, "text after the end"
        self.rest += text

    def more(self) -> Steps[bool]:
        """Wait until `rest` has grown; False at the end of all text."""
        before = len(self.rest)
        while len(self.rest) == before and not self.ended:
            yield
        return len(self.rest) > before

    def take(self, count: int) -> str:
        text, self.rest = self.rest[:count], self.rest[count:]
        if self._taken is not None:
            self._taken.append(text)
        return text

    def mark(self) -> None:
        """From here on what is consumed is remembered, until `unmark` gives it."""
        self._taken = []

    def unmark(self) -> str:
        taken, self._taken = "".join(self._taken or ()), None
        return taken

    def skip_space(self) -> Steps[None]:
        while True:
            self.take(len(self.rest) - len(self.rest.lstrip(SPACE)))
            if self.rest or not (yield from self.more()):
                return

    def literal(self, *options: str) -> Steps[str | None]:
        """Consume the one of these that comes next; None, and nothing is consumed, where none does. No option begins
        another."""
        while True:
            for option in options:
                if self.rest.startswith(option):
                    return self.take(len(option))
            if not any(option.startswith(self.rest) for option in options) or not (yield from self.more()):
                return None

    def closing(self, tag: str) -> Steps[None]:
        """Consume the tag, or as much of it as there is before the limit; it may be missing."""
        if (yield from self.literal(tag)) is None and self.is_cut and tag.startswith(self.rest):
            self.take(len(self.rest))

    def until(self, *ends: str, most: int) -> Steps[str | None]:
        """Consume the text before the first of these characters, which stays; None where it does not come within
        `most` characters."""
        while True:
            at = min((place for end in ends if (place := self.rest.find(end)) >= 0), default=-1)
            if 0 <= at <= most:
                return self.take(at)
            if at > most or len(self.rest) > most or not (yield from self.more()):
                return None


def overlap(text: str, markers: Sequence[str]) -> int:
    """Characters at the end of `text` with which one of the markers begins."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0

"""What a client changed that cost it the prefix, in words it can act on. Only its own words are shown."""

from __future__ import annotations

import re
from itertools import pairwise

from rekindle.api.ports import TextPort
from rekindle.engine.types import Divergence
from rekindle.prompt import BoundaryKind, Prompt

SHOWN = 80  # characters of the line
END = re.compile(r"<\|\w+\|>$")  # what templates write behind a message's last line
STARTS = (BoundaryKind.MESSAGE, BoundaryKind.SYSTEM, BoundaryKind.MARK)  # kinds that a message's start may have

# What changes on every call, by how it looks; the first that fits is named.
GUESSES = tuple(
    (re.compile(pattern, re.IGNORECASE), name)
    for pattern, name in (
        (r"billing|x-[a-z-]+header", "a header of the client's"),
        (r"token|remaining|budget|\bused\b|usage", "a counter"),
        (r"\b20\d\d-\d\d-\d\d|\b\d{1,2}:\d\d\b|\bdate\b|\btime\b|\btoday\b", "a date or a time"),
        (r"\b(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]* \d", "a date or a time"),
        (r"\b[0-9a-f]{8}-[0-9a-f]{4}-|\b[0-9a-f]{12,}\b|\b(?:id|session|uuid|nonce)\b", "an id"),
        (r"\bgit\b|branch|commit|\bcwd\b|directory", "the state of the working directory"),
    )
)


def changed(prompt: Prompt, divergence: Divergence | None, text: TextPort) -> str | None:
    """Which line of a message of the past is another than before; None where the prompt only grew, or where the
    assistant's turns differ, which templates rewrite themselves."""
    if divergence is None or divergence.seen is None:
        return None
    at, starts = divergence.position, _starts(prompt)
    number = next((i for i, (start, stop) in enumerate(pairwise(starts)) if start <= at < stop), None)
    if number is None or number >= len(starts) - 2:
        return None  # in the newest message, or behind it
    said = _decoded(prompt, starts[number], starts[number + 1], text)
    before = _decoded(prompt, starts[number], at, text)
    role = said.partition("\n")[0].strip()
    if role not in ("system", "developer", "user", "tool"):
        return None
    place = before.count("\n")
    line = END.sub("", said.split("\n")[place]).strip()
    where = "the system prompt" if number == 0 and role in ("system", "developer") else f"message {number + 1} ({role})"
    if number == 0 and line.startswith('{"'):
        where = "the list of tools"
    guess = _guess(line)
    shared = before.partition("\n")[2]
    if number == 0 and place <= 1 and not (guess and shared) and where != "the list of tools":
        return None  # at the first line of all: another conversation, most likely, of which nothing was changed
    return f"{where} changed at line {max(1, place)}{guess}: {line[:SHOWN]!r}"


def _guess(line: str) -> str:
    name = next((name for pattern, name in GUESSES if pattern.search(line)), None)
    return "" if name is None else f" ({name}?)"


def _starts(prompt: Prompt) -> list[int]:
    """Where messages begin, the answer's opening last. The first one begins behind its own role start."""
    found = sorted({b.position for b in prompt.boundaries if b.kind in STARTS and _begins(prompt, b.position)})
    return [min(1, len(prompt.tokens)), *(at for at in found if at > 1)]


def _begins(prompt: Prompt, position: int) -> bool:
    """A role start stands there: a mark may lie inside a message as well."""
    return prompt.tokens[position - 1] == prompt.tokens[0]


def _decoded(prompt: Prompt, start: int, stop: int, text: TextPort) -> str:
    return b"".join(text.token_bytes(token) for token in prompt.tokens[start:stop]).decode(errors="replace")

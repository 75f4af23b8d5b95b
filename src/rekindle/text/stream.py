"""Tokens to text as they come, and stop strings."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from rekindle.errors import BadRequest
from rekindle.text.tokenizer import Tokenizer


class Detokenizer:
    """Text of one answer, piece by piece: what `push` gave, joined, plus `finish`, is `decode` of all tokens."""

    def __init__(self, tokenizer: Tokenizer, skip_control: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_control = skip_control
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that this token completes; a character still missing bytes waits."""
        if self._skip_control and token in self._tokenizer.control_ids:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What waited; a character that never got its bytes becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopText:
    """Lets text through, up to the first stop string. Nothing that may still become one is let out.

    The first stop string to be complete counts; of two that are complete at the same character, the longer.
    So the outcome does not depend on how the text was cut into pieces.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        if any(not stop for stop in stop_strings):
            raise BadRequest("a stop string must not be empty", field="stop")
        self._stops = tuple(sorted(stop_strings, key=len, reverse=True))
        self._held = ""
        self.met: str | None = None  # the stop string that was found

    def push(self, text: str) -> str:
        """The text that may be shown now."""
        if not self._stops:
            return text
        if self.met is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), -len(stop), stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, _, self.met = min(found)
            self._held = ""
            return text[: end - len(self.met)]
        keep = self._longest_beginning_at_end_of(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The answer is over: what was held is text after all."""
        held, self._held = self._held, ""
        return held

    def _longest_beginning_at_end_of(self, text: str) -> int:
        longest = len(self._stops[0]) - 1
        for length in range(min(longest, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class StopWatcher:
    """For the engine's `stop_when`: sees every token once and says when a stop string is complete."""

    def __init__(self, detokenizer: Detokenizer, stop_strings: Sequence[str]) -> None:
        self._detokenizer = detokenizer  # a fresh one, its own
        self._stop = StopText(stop_strings)

    def push(self, token: int) -> bool:
        self._stop.push(self._detokenizer.push(token))
        return self._stop.met is not None

    __call__ = push

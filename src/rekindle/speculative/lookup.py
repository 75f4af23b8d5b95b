"""Prompt lookup: what followed the last few tokens when they stood in the text before. It needs no model.

Coding agents write much that they have just read: a file with one line changed, a name, an error message. The index
knows where every run of SHORTEST tokens ended the last few times; of the places where the text's end stood before, the
one that agrees with it furthest back proposes what followed there.
"""

from __future__ import annotations

from collections.abc import Sequence

SHORTEST = 3  # tokens of the run that must be equal
LONGEST = 16  # tokens up to which a longer agreement counts for more
PLACES = 8  # of one run that are remembered, the newest


class PromptLookup:
    """The tokens of one sequence, prompt and answer, and where runs of them ended."""

    def __init__(self, tokens: Sequence[int] = ()) -> None:
        self._tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """A run is entered when the token behind it is known, so the run at the end of the text never finds itself."""
        for token in tokens:
            end = len(self._tokens)
            if end >= SHORTEST:
                places = self._ends.setdefault(tuple(self._tokens[end - SHORTEST : end]), [])
                places.append(end)
                del places[:-PLACES]
            self._tokens.append(token)

    def propose(self, most: int) -> tuple[int, ...]:
        """At most so many tokens that may follow; none where the end of the text is new."""
        places = self._ends.get(tuple(self._tokens[-SHORTEST:]))
        if not places:
            return ()
        return self._repeated(max(places, key=lambda place: (self._agreement(place), place)), most)

    def _agreement(self, place: int) -> int:
        """Tokens before `place` that are equal to those at the end of the text."""
        longest = min(LONGEST, place)
        for back in range(1, longest + 1):
            if self._tokens[place - back] != self._tokens[-back]:
                return back - 1
        return longest

    def _repeated(self, start: int, most: int) -> tuple[int, ...]:
        """What stands from `start` on; text that repeats itself goes on repeating."""
        period = len(self._tokens) - start
        return tuple(self._tokens[start + index % period] for index in range(most))

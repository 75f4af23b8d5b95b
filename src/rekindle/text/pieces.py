"""Long texts in pieces, so that encoding can stop at a limit, and other threads run between two pieces.

A text may be cut where every pre-tokenizer we know ends a word in any case: between a letter or a digit and a blank or
a sentence mark. A word never goes on there, so the ids of the pieces, one after the other, are the ids of the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rekindle.errors import BadRequest

UNLIMITED = 1 << 62  # tokens
PIECE = 1 << 15  # characters, about; encoding one takes some ten milliseconds
BATCH = 8  # pieces that are encoded together
LONGEST_WORD = 1 << 20  # characters without a place to cut; merging a word takes memory for each of its letters

_CUT = re.compile(r"(?<=[^\W_])(?=[\s.,;:!?。，、；：？！])")


class TooManyTokens(Exception):
    """The text has more tokens than the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"more than {limit} tokens")
        self.limit = limit


def batched_pieces(text: str) -> Iterator[list[str]]:
    """The pieces of a text in order, up to BATCH at a time."""
    batch: list[str] = []
    for piece in _pieces(text):
        batch.append(piece)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE:
        cut = _CUT.search(text, start + PIECE, start + LONGEST_WORD)
        if cut is None:
            break
        yield text[start : cut.start()]
        start = cut.start()
    if len(text) - start > LONGEST_WORD:
        raise BadRequest(f"the text has {LONGEST_WORD} characters in a row in which no word ends")
    yield text[start:]

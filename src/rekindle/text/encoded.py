"""Texts that were encoded before.

An agent sends its whole history with every turn, and to encode it again would take longer than all else that is done
before the device gets the few new tokens: 50 ms for 100 KB. Long texts are known by their hash, so that what is kept of
them is their tokens only.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from rekindle.text.lru import Lru
from rekindle.text.pieces import UNLIMITED, TooManyTokens
from rekindle.text.tokenizer import Tokenizer

LONG = 128  # characters from which a text is known by its hash
OVERHEAD = 200  # bytes of bookkeeping per text, roughly


@dataclass(frozen=True, slots=True)
class _Encoded:
    ids: array[int]
    ends: array[int] | None  # the character position where each token ends; None where nobody has asked for it


class EncodedTexts:
    """Of one tokenizer and one name space: how long it takes to encode a text must not tell that others have sent it.
    Bounded; safe to share between threads."""

    def __init__(self, budget: int) -> None:
        """budget: bytes."""
        self._lock = threading.Lock()
        self._texts: Lru[bytes | str, _Encoded] = Lru(budget)

    @property
    def size(self) -> int:
        """Bytes held."""
        with self._lock:
            return self._texts.size

    def encode(self, text: str, tokenizer: Tokenizer, limit: int = UNLIMITED) -> Sequence[int]:
        """As the tokenizer does it."""
        name = _name(text)
        known = self._known(name, limit)
        return self._keep(name, tokenizer.encode(text, limit)).ids if known is None else known.ids

    def encode_with_ends(
        self, text: str, tokenizer: Tokenizer, limit: int = UNLIMITED
    ) -> tuple[Sequence[int], Sequence[int]]:
        """As the tokenizer does it."""
        name = _name(text)
        known = self._known(name, limit)
        if known is None or known.ends is None:
            known = self._keep(name, *tokenizer.encode_with_ends(text, limit))
        assert known.ends is not None
        return known.ids, known.ends

    def _known(self, name: bytes | str, limit: int) -> _Encoded | None:
        with self._lock:
            known = self._texts.get(name)
        if known is not None and len(known.ids) > limit:
            raise TooManyTokens(limit)
        return known

    def _keep(self, name: bytes | str, ids: Sequence[int], ends: Sequence[int] | None = None) -> _Encoded:
        encoded = _Encoded(array("i", ids), None if ends is None else array("i", ends))
        items = len(ids) * (1 if ends is None else 2)
        with self._lock:
            self._texts.put(name, encoded, items * encoded.ids.itemsize + len(name) + OVERHEAD)
        return encoded


def _name(text: str) -> bytes | str:
    """A text may hold halves of surrogate pairs, which the tokenizer mends."""
    return text if len(text) < LONG else blake3(text.encode("utf-8", "surrogatepass")).digest(16)

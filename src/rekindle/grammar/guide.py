"""One answer on its way through a grammar: which tokens may follow, as bits over the vocabulary.

The matcher is the library's; what is added here is what an engine needs of it: the masks of all answers of a step are
made together, on as many cores as there are, drafted tokens are tried and taken back, and a way that leads nowhere is
told in words.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from numpy.typing import NDArray

T = TypeVar("T")
Mask = NDArray[np.int32]  # [words]; bit b of word w is the token 32 w + b

SLOW = 0.010  # seconds of processor time that a mask may take on average: everyone in the batch waits for it …
PATIENT = 16  # … once so many have been made
TRUSTED = 2  # masks of an answer that are made by themselves in any case
SEVERAL = 4  # masks, and cores, from which on they are made at the same time
SUSPECT = 0.005  # seconds that masks made at the same time may take: beyond, each is made and timed by itself next
SOME = 64  # words of a mask that are looked at first


@dataclass(frozen=True, slots=True)
class Rules:
    """A compiled grammar. Answers begin from copies of it, on any thread."""

    matcher: LLMatcher  # at the beginning of an answer
    vocabulary: LLTokenizer

    def begin(self, stop_tokens: frozenset[int] = frozenset()) -> Guide:
        """For an answer that these tokens end, besides the vocabulary's own."""
        return Guide(self.matcher.deep_copy(), self.vocabulary, stop_tokens)


class Guide:
    """Belongs to one sequence and its thread.

    mask  tokens that may follow those accepted so far; tokens that end the answer only where the grammar does
    stuck  why no token may follow although the grammar is not at its end; None as long as one may. Asked for once
           `make_masks` has seen to the guide, or its mask has been asked for
    """

    def __init__(self, matcher: LLMatcher, vocabulary: LLTokenizer, stop_tokens: frozenset[int]) -> None:
        self._matcher = matcher
        self._words = -(-vocabulary.vocab_size // 32)
        self._stops = sorted(stop_tokens - set(vocabulary.eos_tokens))
        self._ahead: list[tuple[int, Mask]] = []  # drafted tokens, and what may follow each
        self._seconds, self._masks = 0.0, 0
        self.suspect = True  # its next mask is made and timed by itself
        self.stuck: str | None = None
        self._mask: Mask | None = None
        self.make_mask()

    @property
    def mask(self) -> Mask:
        if self._mask is None:
            self.make_mask()
        assert self._mask is not None, "where none can be made nothing may follow, and that is a mask too"
        return self._mask

    @property
    def lacks_mask(self) -> bool:
        return self._mask is None

    def accept(self, token: int) -> None:
        """The answer has this token, which is not one that ends it. The mask of the next one is made later."""
        try:
            guarded(lambda: self._accept(token))
        except LibraryFailed as error:
            self._fail(str(error))

    def _accept(self, token: int) -> None:
        known = self._ahead.pop(0) if self._ahead else None
        if not self._matcher.consume_token(token):
            self._fail(f"the grammar does not allow the token {token}: {first_line(self._matcher.get_error())}")
        elif known is not None and known[0] == token:
            self._mask = known[1]
        else:
            self._ahead.clear()
            self._mask = None

    def make_mask(self) -> None:
        """By itself, and timed."""
        self._take(lambda: self._mask_of(self._matcher))
        self.suspect = self._masks < TRUSTED or self._seconds / self._masks > SLOW / 8

    def take_mask(self, mask: Mask) -> None:
        """Made with those of others."""
        self._take(lambda: self._with_stops(self._matcher, mask))

    def _take(self, make: Callable[[], Mask]) -> None:
        """Whatever goes wrong is this guide's alone."""
        try:
            self._mask = mask = guarded(make)
            self.stuck = guarded(lambda: self._why_stuck(self._matcher, mask))
        except LibraryFailed as error:
            self._fail(str(error))
        except Exception as error:
            self._fail(f"the grammar's library failed: {first_line(str(error))}")

    def _fail(self, why: str) -> None:
        """Nothing may follow."""
        self.stuck, self._mask = why, np.zeros(self._words, dtype=np.int32)

    def admit(self, drafted: Sequence[int]) -> tuple[int, ...]:
        """Those drafted tokens that the grammar allows, from the first on, and after which it can go on.

        They are tried on a copy, which takes microseconds: a matcher that has met an error cannot be brought back.
        """
        self._ahead.clear()
        with suppress(LibraryFailed):
            guarded(lambda: self._try(self._matcher.deep_copy(), drafted))
        return tuple(token for token, _ in self._ahead)

    def _try(self, trial: LLMatcher, drafted: Sequence[int]) -> None:
        for token in drafted:
            if not _allows(self.mask_after(len(self._ahead)), token) or not trial.consume_token(token):
                break
            mask = self._mask_of(trial)
            if self._why_stuck(trial, mask) is not None:
                break
            self._ahead.append((token, mask))

    def mask_after(self, drafted: int) -> Mask:
        """What may follow so many of the tokens that were admitted last."""
        return self._ahead[drafted - 1][1] if drafted else self.mask

    def _mask_of(self, matcher: LLMatcher) -> Mask:
        began = time.thread_time()
        mask = np.empty(self._words, dtype=np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._with_stops(matcher, mask)
        self._seconds += time.thread_time() - began
        self._masks += 1
        return mask

    def _with_stops(self, matcher: LLMatcher, mask: Mask) -> Mask:
        """The mask, whose bits of tokens that end the answer are set where the grammar is at its end."""
        accepts = bool(self._stops) and matcher.is_accepting()
        for token in self._stops:
            bit = np.uint32(1 << token % 32).view(np.int32)
            mask[token // 32] = mask[token // 32] | bit if accepts else mask[token // 32] & ~bit
        return mask

    def _why_stuck(self, matcher: LLMatcher, mask: Mask) -> str | None:
        if matcher.is_error():  # the mask would let the answer end
            return f"the grammar cannot go on: {first_line(matcher.get_error())}"
        if not (mask[:SOME].any() or mask.any()):
            return "no token of the vocabulary goes on with the grammar"
        if self._masks >= PATIENT and self._seconds / self._masks > SLOW:
            mean = 1000 * self._seconds / self._masks
            return f"the grammar takes {mean:.0f} ms per token, at most {1000 * SLOW:.0f} are allowed"
        return None


def make_masks(guides: Sequence[Guide]) -> None:
    """The masks that are missing after the tokens of a step: at the same time where that is worth it, each by itself
    where a guide has been slow, so that it is found."""
    quick = [guide for guide in guides if guide.lacks_mask and not guide.suspect]
    if len(quick) >= SEVERAL and cores() >= SEVERAL:
        _make_together(quick)
    for guide in guides:
        if guide.lacks_mask:
            guide.make_mask()


def _make_together(guides: Sequence[Guide]) -> None:
    """None is made where something fails: it is not said for whom."""
    masks = np.empty((len(guides), guides[0]._words), dtype=np.int32)  # of one model, one vocabulary
    pairs = [(guide._matcher, number) for number, guide in enumerate(guides)]
    began = time.perf_counter()
    try:
        guarded(lambda: _executor().unsafe_compute_mask_ptr(pairs, masks.ctypes.data, masks[0].nbytes, len(guides)))
    except Exception:  # each by itself says what is wrong, and with which
        return
    slow = time.perf_counter() - began > SUSPECT
    for guide, mask in zip(guides, masks, strict=True):
        guide.take_mask(mask)
        guide.suspect = slow


@cache
def cores() -> int:
    return len(os.sched_getaffinity(0))


@cache
def _executor() -> LLExecutor:
    return LLExecutor(num_threads=min(8, cores()))


class LibraryFailed(Exception):
    """The library met a fault of its own."""


def guarded(call: Callable[[], T]) -> T:
    """A panic of the library is no `Exception`, and would end its thread; here it is one."""
    try:
        return call()
    except BaseException as error:
        if type(error).__name__ == "PanicException":
            raise LibraryFailed(f"the grammar's library failed: {first_line(str(error))}") from error
        raise


def first_line(message: str) -> str:
    """Of what the library says, and the cause where it is told apart: what follows shows its inner state."""
    first, *others = message.strip().split("\n")
    causes = [line.removeprefix("error: ") for line in others if line.startswith("error: ")]
    return " ".join([first, *causes[:1]] if first.endswith(":") else [first])[:500]


def _allows(mask: Mask, token: int) -> bool:
    return token // 32 < len(mask) and bool((int(mask[token // 32]) >> (token % 32)) & 1)

"""From the text of a grammar to rules over one vocabulary."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from rekindle.errors import BadRequest
from rekindle.grammar import check_worker
from rekindle.grammar.guide import LibraryFailed, Rules, first_line, guarded
from rekindle.grammar.types import check_size
from rekindle.text import Tokenizer
from rekindle.workers import WorkerEnded, Workers

SECONDS = 1.0  # of processor time to read a grammar; those of large agents take some hundredths
LIMITS = LLParserLimits(verbose_errors=False)

_checks = Workers(Path(check_worker.__file__))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the library has to know of a tokenizer."""

    tokens: Sequence[bytes]  # by id; none stands for an id without a token
    special: Sequence[int]  # tokens of structure, which no text contains
    stops: Sequence[int]  # tokens that end an answer
    encode: Callable[[str], list[int]]  # text as the model writes it: what a grammar leaves no choice about

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Vocabulary:
        """Markup is text to a grammar: a model may write it as a token or letter by letter."""
        tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        special = sorted(tokenizer.control_ids | tokenizer.stop_ids)
        return cls(tokens, special, sorted(tokenizer.stop_ids), tokenizer.encode_markup)


class Compiler:
    """Compiles grammars for one vocabulary, on any thread. Its table takes up to a second for 248,000 tokens, so that
    it is made in the background, and the first grammar waits for it."""

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._table: Future[LLTokenizer] = Future()
        self._thread = threading.Thread(target=self._make_table, args=(vocabulary,), name="grammar-table", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Compiler | None:
        """None where no token ends an answer, as a grammar has to."""
        return cls(partial(Vocabulary.of, tokenizer)) if tokenizer.stop_ids else None

    def wait(self) -> None:
        """Until the table is made or has failed. The library keeps the interpreter's lock all the time, so that a
        request which comes meanwhile would wait for it, whether it has a grammar or not."""
        self._thread.join()

    def compile(self, source: str, field: str) -> Rules:
        """source: in the library's own form (frame.py). Raises BadRequest, naming the field of the body."""
        checked = _checked(source, field)
        try:
            return guarded(lambda: self._rules(checked, field))
        except LibraryFailed as error:
            raise BadRequest(f"{field}: {error}", field) from error

    def _rules(self, source: str, field: str) -> Rules:
        table = self._table.result()
        matcher = LLMatcher(table, source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise BadRequest(f"{field}: {first_line(matcher.get_error())}", field)
        rules = Rules(matcher, table)
        if (stuck := rules.begin().stuck) is not None:
            raise BadRequest(f"{field}: no answer begins so: {stuck}", field)
        return rules

    def _make_table(self, vocabulary: Callable[[], Vocabulary]) -> None:
        try:
            found = vocabulary()
            self._table.set_result(LLTokenizer(_Wrapper(found), eos_token=list(found.stops)))
        except BaseException as error:
            self._table.set_exception(error)


def _checked(source: str, field: str) -> str:
    """The grammar without EBNF, from a process of its own: what gets through compiles here within seconds."""
    data = json.dumps({"source": source, "seconds": SECONDS}).encode()
    check_size(len(data), field)
    try:
        found = _checks.ask(data)
    except WorkerEnded as error:
        why = f"it takes more than {SECONDS:g} seconds to read" if error.was_slow else str(error)
        raise BadRequest(f"{field}: the grammar is too complex: {why}", field) from error
    if found["refused"] is not None:
        raise BadRequest(f"{field}: {first_line(found['refused'])}", field)
    return str(found["source"])


class _Wrapper(TokenizerWrapper):
    """What LLTokenizer asks of a tokenizer; the names are the library's. Where a grammar leaves one way to go on, the
    library allows the first token of this text alone. So that has to be the model's own way of writing it: letter by
    letter a model loses its thread, and an answer has several times as many tokens."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.bos_token_id = None
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = list(vocabulary.special)
        self.eos_token_id = vocabulary.stops[0]
        self._encode = vocabulary.encode
        self._bytes = {token: id for id, token in enumerate(self.tokens) if len(token) == 1}

    def __call__(self, text: str) -> list[int]:
        """Byte by byte where a tokenizer would change the text: some bring characters into a normal form."""
        data, ids = text.encode(), self._encode(text)
        if b"".join(self.tokens[id] for id in ids) == data:
            return ids
        return [self._bytes[data[at : at + 1]] for at in range(len(data)) if data[at : at + 1] in self._bytes]

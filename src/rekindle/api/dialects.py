"""The two OpenAI shapes of an answer. A dialect says what a choice looks like; `answers.py` puts it in its frame."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Any, Protocol

from rekindle.api.generation import Choice, Piece
from rekindle.api.logprobs import chat_logprobs, legacy_logprobs, prompt_logprobs
from rekindle.api.ports import TextPort
from rekindle.api.schema import ChatBody, CompletionBody
from rekindle.engine.types import TokenLogprob
from rekindle.prompt import Prompt

Json = dict[str, Any]


class Dialect(Protocol):
    id_prefix: str
    object_name: str  # of a whole answer
    chunk_name: str  # of one event of a stream

    def opening(self, choice: Choice) -> Json | None:
        """The chunk that opens one answer, before any token."""

    def chunks(self, choice: Choice, piece: Piece) -> Iterator[Json]:
        """What one piece becomes in a stream, each as the only choice of its event."""

    def whole(self, choice: Choice, answer: Piece) -> Json: ...


def _rows(piece: Piece) -> list[TokenLogprob]:
    rows = [token.logprob for token in piece.tokens if token.logprob is not None]
    assert len(rows) == len(piece.tokens), "the engine reports a log-probability for every token or for none"
    return rows


def chat_message(text: str) -> Json:
    """The message that an answer is, as clients get it and send it back."""
    return {"role": "assistant", "content": text}


class Chat:
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, body: ChatBody, text: TextPort) -> None:
        self._text = text
        self._logprobs = bool(body.logprobs)
        self._ids = bool(body.return_token_ids)

    def opening(self, choice: Choice) -> Json:
        extra = {"prompt_token_ids": list(choice.prompt.tokens)} if self._ids else {}
        return self._chunk(choice, {"role": "assistant", "content": ""}) | extra

    def chunks(self, choice: Choice, piece: Piece) -> Iterator[Json]:
        reports = bool(piece.tokens and self._logprobs) or bool(piece.ids and self._ids)
        if piece.text or reports:
            yield self._chunk(choice, {"content": piece.text}) | self._reports(piece)
        if piece.finish is not None:
            yield self._chunk(choice, {}) | {"finish_reason": piece.finish.value}

    def whole(self, choice: Choice, answer: Piece) -> Json:
        assert answer.finish is not None, "a whole answer has finished"
        message = chat_message(answer.text) | {"refusal": None}
        head = {"index": choice.index, "message": message, "logprobs": None, "finish_reason": answer.finish.value}
        extra = {"prompt_token_ids": list(choice.prompt.tokens)} if self._ids else {}
        return head | self._reports(answer) | extra

    def _chunk(self, choice: Choice, delta: Json) -> Json:
        return {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _reports(self, piece: Piece) -> Json:
        reports: Json = {}
        if self._logprobs:
            reports["logprobs"] = chat_logprobs(_rows(piece), self._text)
        if self._ids:
            reports["token_ids"] = list(piece.ids)
        return reports


class Completion:
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, body: CompletionBody, text: TextPort) -> None:
        self._text = text
        self._echo = bool(body.echo)
        self._logprobs = body.logprobs is not None
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._ids = bool(body.return_token_ids)
        self._echoes: dict[int, tuple[str, list[int]]] = {}

    def opening(self, choice: Choice) -> Json | None:
        """An echo without log-probabilities is known before the engine has said anything."""
        extra = {"prompt_token_ids": list(choice.prompt.tokens)} if self._ids else {}
        if self._echo and not self._logprobs:
            return self._chunk(choice, self._echoed(choice)[0]) | extra
        return self._chunk(choice, "") | extra if extra else None

    def chunks(self, choice: Choice, piece: Piece) -> Iterator[Json]:
        if self._echo and self._logprobs and piece.prompt_rows is not None:
            text, offsets = self._echoed(choice)
            logprobs = legacy_logprobs(choice.prompt.tokens, piece.prompt_rows, offsets, self._text)
            yield self._chunk(choice, text) | {"logprobs": logprobs}
        reports = bool(piece.tokens and self._logprobs) or bool(piece.ids and self._ids)
        if piece.text or reports:
            yield self._chunk(choice, piece.text) | self._reports(choice, piece)
        if piece.finish is not None:
            yield self._chunk(choice, "") | {"finish_reason": piece.finish.value}

    def whole(self, choice: Choice, answer: Piece) -> Json:
        assert answer.finish is not None, "a whole answer has finished"
        text = self._echoed(choice)[0] + answer.text if self._echo else answer.text
        head = self._chunk(choice, text) | {"finish_reason": answer.finish.value}
        extra: Json = {"prompt_token_ids": list(choice.prompt.tokens)} if self._ids else {}
        if self._prompt_logprobs and answer.prompt_rows is not None:
            extra["prompt_logprobs"] = prompt_logprobs(answer.prompt_rows, self._text)
        return head | self._reports(choice, answer, with_prompt=self._echo) | extra

    def _echoed(self, choice: Choice) -> tuple[str, list[int]]:
        """The prompt's text and offsets, worked out once per answer."""
        if choice.index not in self._echoes:
            self._echoes[choice.index] = prompt_text(choice.prompt, self._text)
        return self._echoes[choice.index]

    def _chunk(self, choice: Choice, text: str) -> Json:
        return {"index": choice.index, "text": text, "logprobs": None, "finish_reason": None}

    def _reports(self, choice: Choice, piece: Piece, with_prompt: bool = False) -> Json:
        reports: Json = {}
        if self._logprobs:
            reports["logprobs"] = self._legacy(choice, piece, with_prompt)
        if self._ids:
            reports["token_ids"] = list(piece.ids)
        return reports

    def _legacy(self, choice: Choice, piece: Piece, with_prompt: bool) -> Json:
        """The answer's tokens, after the prompt's in a whole echo; offsets count from the start of what is shown."""
        shown = self._echoed(choice) if self._echo else ("", [])
        tokens = [token.token for token in piece.tokens]
        rows: list[TokenLogprob | None] = [*_rows(piece)]
        offsets = [len(shown[0]) + offset for offset in piece.offsets]
        if with_prompt:
            assert piece.prompt_rows is not None, "the engine was asked for the prompt's log-probabilities"
            tokens = [*choice.prompt.tokens, *tokens]
            rows = [*piece.prompt_rows, *rows]
            offsets = [*shown[1], *offsets]
        return legacy_logprobs(tokens, rows, offsets, self._text)


def prompt_text(prompt: Prompt, text: TextPort) -> tuple[str, list[int]]:
    """A prompt as text, special tokens and all, and for each token how many characters lie before it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    pieces: list[str] = []
    offsets: list[int] = []
    length = 0
    for token in prompt.tokens:
        offsets.append(length)
        pieces.append(decoder.decode(text.token_bytes(token)))
        length += len(pieces[-1])
    return "".join(pieces) + decoder.decode(b"", final=True), offsets

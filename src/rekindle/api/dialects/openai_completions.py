"""OpenAI's legacy completions: `POST /v1/completions`."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from rekindle.api.choice import Choice, TextDelta
from rekindle.api.dialects.base import Json
from rekindle.api.dialects.openai import MAX_CHOICES, OpenAIBody, OpenAIDialect, OpenAIWriter
from rekindle.api.dialects.openai_logprobs import legacy_logprobs, prompt_logprobs, rows_of
from rekindle.api.generation import Generation
from rekindle.api.parsing import LARGEST, kind_of, parse, refuse
from rekindle.api.ports import TextPort
from rekindle.api.request import ClientRequest, RawPrompts
from rekindle.api.settings import Settings
from rekindle.engine.types import TokenLogprob
from rekindle.prompt import Prompt, TokenIds


def _prompts(value: Any) -> Any:
    """One string or one list of token ids is a list of one prompt."""
    if isinstance(value, str | TokenIds):
        return [value]
    if not isinstance(value, list):
        raise ValueError(f"must be a string, token ids, or a list of either, got {kind_of(value)}")
    if not value:
        raise ValueError("must not be an empty list")
    if _are_tokens(value):
        return [value]
    if all(isinstance(item, str) for item in value):
        return value
    if all(isinstance(item, list) and item and _are_tokens(item) for item in value):
        return value
    raise ValueError("must hold only strings, only token ids, or only non-empty lists of token ids")


def _are_tokens(values: list[Any]) -> bool:
    """Without a call for each: a prompt may have a hundred thousand."""
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= LARGEST


class CompletionBody(OpenAIBody):
    prompt_field = "prompt"
    token_fields = frozenset({"prompt"})

    prompt: Annotated[list[Any], BeforeValidator(_prompts), Field(max_length=MAX_CHOICES)]  # of str or list[int]
    max_tokens: int | None = Field(None, ge=0, le=LARGEST)  # 0 only scores the prompt
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = Field(None, ge=1, le=LARGEST)
    logprobs: int | None = Field(None, ge=0, le=20)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    add_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _fields_agree(self) -> CompletionBody:
        if self.suffix:
            refuse("suffix", "filling in the middle is not supported")
        if (self.best_of or 1) > 1:
            refuse("best_of", "only 1 is supported; ask for n answers and choose")
        if self.prompt_logprobs is not None and self.stream:
            refuse("prompt_logprobs", "is given in a whole answer only, not in a stream")
        if len(self.prompt) * (self.n or 1) > MAX_CHOICES:
            refuse("n", f"{len(self.prompt)} prompts × {self.n} answers are more than {MAX_CHOICES}")
        return self

    @property
    def answer_limit(self) -> int | None:
        return self.max_tokens

    @property
    def reported_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def reported_prompt_logprobs(self) -> int | None:
        """Those asked for, and those an echo must show."""
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in asked if count is not None), default=None)


class CompletionFormat:
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, body: CompletionBody, text: TextPort) -> None:
        self._text = text
        self._echo = bool(body.echo)
        self._logprobs = body.logprobs is not None
        self._prompt_logprobs = body.prompt_logprobs is not None
        self._ids = bool(body.return_token_ids)
        self.ignored_fields: list[str] = []
        self._echoes: dict[int, tuple[str, list[int]]] = {}

    def opening(self, choice: Choice) -> Json | None:
        """An echo without log-probabilities is known before the engine has said anything."""
        extra = {"prompt_token_ids": list(choice.prompt.tokens)} if self._ids else {}
        if self._echo and not self._logprobs:
            return self._chunk(choice, self._echoed(choice)[0]) | extra
        return self._chunk(choice, "") | extra if extra else None

    def chunks(self, choice: Choice, delta: TextDelta) -> Iterator[Json]:
        if self._echo and self._logprobs and delta.prompt_rows is not None:
            text, offsets = self._echoed(choice)
            logprobs = legacy_logprobs(choice.prompt.tokens, delta.prompt_rows, offsets, self._text)
            yield self._chunk(choice, text) | {"logprobs": logprobs}
        reports = bool(delta.tokens and self._logprobs) or bool(delta.ids and self._ids)
        if delta.text or reports:
            yield self._chunk(choice, delta.text) | self._reports(choice, delta)
        if delta.finish is not None:
            yield self._chunk(choice, "") | {"finish_reason": delta.finish.value}

    def whole(self, choice: Choice, answer: TextDelta) -> Json:
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

    def _reports(self, choice: Choice, delta: TextDelta, with_prompt: bool = False) -> Json:
        reports: Json = {}
        if self._logprobs:
            reports["logprobs"] = self._legacy(choice, delta, with_prompt)
        if self._ids:
            reports["token_ids"] = list(delta.ids)
        return reports

    def _legacy(self, choice: Choice, delta: TextDelta, with_prompt: bool) -> Json:
        """The answer's tokens, after the prompt's in a whole echo; offsets count from the start of what is shown."""
        shown = self._echoed(choice) if self._echo else ("", [])
        tokens = [token.token for token in delta.tokens]
        rows: list[TokenLogprob | None] = [*rows_of(delta)]
        offsets = [len(shown[0]) + offset for offset in delta.offsets]
        if with_prompt:
            assert delta.prompt_rows is not None, "the engine was asked for the prompt's log-probabilities"
            tokens = [*choice.prompt.tokens, *tokens]
            rows = [*delta.prompt_rows, *rows]
            offsets = [*shown[1], *offsets]
        return legacy_logprobs(tokens, rows, offsets, self._text)


def prompt_text(prompt: Prompt, text: TextPort) -> tuple[str, list[int]]:
    """A prompt as text, special tokens and all, and for each token how many characters lie before it."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    texts: list[str] = []
    offsets: list[int] = []
    length = 0
    for token in prompt.tokens:
        offsets.append(length)
        texts.append(decoder.decode(text.token_bytes(token)))
        length += len(texts[-1])
    return "".join(texts) + decoder.decode(b"", final=True), offsets


class OpenAICompletions(OpenAIDialect):
    path = base_path = "/v1/completions"

    def parse(self, data: bytes) -> CompletionBody:
        return parse(CompletionBody, data)

    def request(self, body: CompletionBody) -> ClientRequest:
        return body.client_request(RawPrompts(body.prompt, body.add_special_tokens is not False))

    def writer(self, body: CompletionBody, generation: Generation, settings: Settings) -> OpenAIWriter:
        return OpenAIWriter(body, CompletionFormat(body, generation.text), generation, settings)

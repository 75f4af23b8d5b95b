"""The text room in the shape of `TextPort`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rekindle.errors import BadRequest
from rekindle.prompt import Prompt
from rekindle.text import (
    ChatTemplate,
    Detokenizer,
    StopText,
    StopWatcher,
    Tokenizer,
    boundaries_of_tokens,
    normalise_messages,
)


class ModelText:
    """One model's tokenizer and template. A model without a template takes no messages, only completions."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._role_starts = template.role_starts if template is not None else None

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def stop_tokens(self) -> frozenset[int]:
        return self._tokenizer.stop_ids

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        **kwargs: Any,
    ) -> Prompt:
        if self._template is None:
            raise BadRequest("messages: this model has no chat template; use /v1/completions", "messages")
        return self._template.render(normalise_messages(messages), tools, add_generation_prompt, **kwargs)

    def encode(self, text: str, add_special_tokens: bool) -> Prompt:
        """Whoever sends a whole prompt writes its structure too, so `<|im_start|>` in it is the token."""
        tokens = self._tokenizer.encode_template(text)
        bos = self._tokenizer.bos_id
        if add_special_tokens and self._tokenizer.add_bos and bos is not None and tokens[:1] != [bos]:
            tokens = [bos, *tokens]
        return self.prompt_of(tokens)

    def prompt_of(self, tokens: Sequence[int]) -> Prompt:
        return boundaries_of_tokens(tokens, self._tokenizer, role_starts=self._role_starts)

    def token_bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._tokenizer)

    def stop_watcher(self, stops: Sequence[str]) -> Callable[[int], bool]:
        return StopWatcher(self.detokenizer(), stops)

    def stop_text(self, stops: Sequence[str]) -> StopText:
        return StopText(stops)

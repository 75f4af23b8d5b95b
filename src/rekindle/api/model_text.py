"""The text room in the shape of `TextPort`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rekindle.errors import BadRequest
from rekindle.prompt import Prompt
from rekindle.text import (
    VOLATILE_LINES,
    ChatTemplate,
    Detokenizer,
    StopText,
    StopWatcher,
    Tokenizer,
    TurnMemory,
    VolatileLine,
    before_last_message,
    boundaries_of_tokens,
    normalise_messages,
)


class ModelText:
    """One model's tokenizer and template. A model without a template takes no messages, only completions.

    With a memory, turns that the model wrote keep the ids it wrote; `rules` say which lines of messages are left out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        memory: TurnMemory | None = None,
        rules: Sequence[VolatileLine] = VOLATILE_LINES,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._memory = memory
        self._rules = rules
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
        /,
        **kwargs: Any,
    ) -> Prompt:
        if self._template is None:
            raise BadRequest("messages: this model has no chat template; use /v1/completions", "messages")
        said: Sequence[Mapping[str, Any]] = normalise_messages(messages, self._rules)
        if self._memory is not None:
            said = self._memory.restored(said)
        return self._template.render_with(self._memory, said, tools, add_generation_prompt, kwargs)

    def remember(self, prompt: Prompt, ids: Sequence[int], message: Mapping[str, Any]) -> None:
        start = self._role_starts.last_in(prompt.tokens) if self._role_starts is not None else None
        if self._memory is None or start is None:
            return
        self._memory.remember(prompt.tokens[: start + 1], [*prompt.tokens[start + 1 :], *ids])
        self._memory.remember_message(message)

    def next_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        answer: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
        /,
        **kwargs: Any,
    ) -> Prompt | None:
        if self._role_starts is None:
            return None
        # What the next message says does not matter, only whose it is: templates drop thinking before a user's.
        following = {"role": "tool" if answer.get("tool_calls") else "user", "content": "x"}
        prompt = self.render([*messages, answer, following], tools, False, **kwargs)
        return before_last_message(prompt, self._role_starts)

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

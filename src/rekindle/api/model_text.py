"""`TextPort` for a model: its tokenizer, template and parsers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from rekindle.api.parsing import MAX_PROMPT
from rekindle.errors import BadRequest, PromptTooLong
from rekindle.grammar.calls import CallFormat
from rekindle.grammar.compiler import Compiler
from rekindle.grammar.guide import Rules
from rekindle.prompt import Prompt
from rekindle.text import (
    UNLIMITED,
    VOLATILE_LINES,
    ChatTemplate,
    Detokenizer,
    StopText,
    StopWatcher,
    ThinkingTokens,
    Tokenizer,
    TooManyTokens,
    TurnMemory,
    VolatileLine,
    before_last_message,
    boundaries_of_tokens,
    normalise_messages,
    sorted_tools,
    strings_of,
)
from rekindle.text.parsing.parser import END_THINK

T = TypeVar("T")

NO_MEMORIES: Mapping[str, TurnMemory] = MappingProxyType({})


class ModelText:
    """One model's tokenizer and template. A model without a template takes no messages, only completions.

    With a memory, turns that the model wrote keep the ids that it wrote. Every name space has its own memory, so that a
    prompt's ids do not depend on answers to other clients. `rules` say which lines of messages are left out; with
    rules, tools are sorted too.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        memories: Mapping[str, TurnMemory] = NO_MEMORIES,
        rules: Sequence[VolatileLine] = VOLATILE_LINES,
        context: int = UNLIMITED,
        grammars: Compiler | None = None,
    ) -> None:
        """context: the most tokens of a prompt; a longer one is refused before all of it has been encoded. grammars: of
        this tokenizer, where they were begun before."""
        self._grammars = grammars or Compiler.of(tokenizer)
        self._tokenizer = tokenizer
        self._template = template
        self._memories = memories
        self._rules = rules
        self._context = self._served = context  # tokens that are read at most, and that are answered
        self._role_starts = template.role_starts if template is not None else None

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def stop_tokens(self) -> frozenset[int]:
        return self._tokenizer.stop_ids

    @property
    def takes_tools(self) -> bool:
        return self._template is not None and self._template.takes_tools

    @property
    def efforts(self) -> Sequence[str]:
        return self._template.efforts if self._template is not None else ()

    @property
    def thinking_tokens(self) -> ThinkingTokens | None:
        return self._template.thinking_tokens if self._template is not None else None

    def takes_option(self, name: str) -> bool:
        return self._template is not None and self._template.takes_option(name)

    @property
    def call_format(self) -> CallFormat | None:
        return CallFormat.of_template(self._template.source) if self._template is not None else None

    @property
    def may_think(self) -> bool:
        return self._template is not None and END_THINK in self._template.source

    def compile(self, source: str, field: str) -> Rules:
        if self._grammars is None:
            raise BadRequest(f"{field}: this model has no token that ends an answer where its grammar does", field)
        return self._grammars.compile(source, field)

    @property
    def beyond_context(self) -> ModelText:
        wider = copy(self)
        wider._context = max(self._context, MAX_PROMPT)
        return wider

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        namespace: str = "",
        /,
        **kwargs: Any,
    ) -> Prompt:
        if self._template is None:
            raise BadRequest("messages: this model has no chat template; use /v1/completions", "messages")
        self._check_size(sum(map(len, strings_of([*messages, *(tools or ()), kwargs]))), "messages")
        said: Sequence[Mapping[str, Any]] = normalise_messages(messages, self._rules)
        tools = sorted_tools(tools) if self._rules else tools
        memory = self._memories.get(namespace)
        if memory is not None:
            said = memory.restored(said)
        render = partial(self._template.render_with, memory, said, tools, add_generation_prompt, kwargs)
        return self._within_context(render, lambda prompt: len(prompt.tokens), "messages")

    def _check_size(self, characters: int, field: str) -> None:
        """A text too long for the context however it is encoded is refused before it is rendered or encoded."""
        if characters > self._context * self._tokenizer.longest_token:
            raise self._too_long(f"{characters} characters, which are more tokens", field)

    def _within_context(self, encode: Callable[[int], T], count: Callable[[T], int], field: str) -> T:
        """What `encode` makes, which is given the most tokens there may be. Of a prompt up to twice too long it is said
        how long it is: agents leave so much out before they ask again."""
        try:
            return encode(self._context)
        except TooManyTokens:
            pass
        if self._context > self._served:
            raise self._too_long("more", field)
        try:
            tokens = count(encode(2 * self._context))
        except TooManyTokens:
            least = 2 * self._context + 1
            raise self._too_long(f"at least {least}", field, least) from None
        raise self._too_long(str(tokens), field, tokens, counted=True)

    def _too_long(self, what: str, field: str, tokens: int | None = None, counted: bool = False) -> BadRequest:
        """tokens: of the prompt, or so many at least."""
        if self._context > self._served:
            return BadRequest(f"{field}: at most {self._context} tokens are counted, and these are {what}", field)
        said = f"this model's maximum context length is {self._context} tokens, but the prompt has {what}"
        return PromptTooLong(said, field, tokens or self._context + 1, self._context - 1, counted)

    def remember(self, prompt: Prompt, ids: Sequence[int], message: Mapping[str, Any], namespace: str = "") -> None:
        start = self._role_starts.last_in(prompt.tokens) if self._role_starts is not None else None
        memory = self._memories.get(namespace)
        if memory is None or start is None:
            return
        memory.remember(prompt.tokens[: start + 1], [*prompt.tokens[start + 1 :], *ids])
        memory.remember_message(message)

    def next_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        answer: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
        namespace: str = "",
        /,
        **kwargs: Any,
    ) -> Prompt | None:
        if self._role_starts is None:
            return None
        # What the next message says does not matter, only whose it is: templates drop thinking before a user's.
        following = {"role": "tool" if answer.get("tool_calls") else "user", "content": "x"}
        prompt = self.render([*messages, answer, following], tools, False, namespace, **kwargs)
        return before_last_message(prompt, self._role_starts)

    def encode(self, text: str, add_special_tokens: bool) -> Prompt:
        """A client that sends a whole prompt writes its structure too, so `<|im_start|>` in it is the token."""
        self._check_size(len(text), "prompt")
        tokens = self._within_context(partial(self._tokenizer.encode_template, text), len, "prompt")
        bos = self._tokenizer.bos_id
        if add_special_tokens and self._tokenizer.add_bos and bos is not None and tokens[:1] != [bos]:
            tokens = [bos, *tokens]
        return self.prompt_of(tokens)

    def prompt_of(self, tokens: Sequence[int]) -> Prompt:
        if len(tokens) > self._context:
            raise self._too_long(str(len(tokens)), "prompt", len(tokens), counted=True)
        return boundaries_of_tokens(tokens, self._tokenizer, role_starts=self._role_starts)

    def token_bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._tokenizer)

    def stop_watcher(self, stops: Sequence[str]) -> Callable[[int], bool]:
        return StopWatcher(self.detokenizer(), stops)

    def stop_text(self, stops: Sequence[str]) -> StopText:
        return StopText(stops)

"""Protocols of the engine and of the text package; tests pass fakes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rekindle.engine.types import EngineStatus, Request
from rekindle.grammar.calls import CallFormat
from rekindle.grammar.guide import Rules
from rekindle.prompt import Prompt
from rekindle.text import Detokenizer, StopText, ThinkingTokens


class EnginePort(Protocol):
    """Called from the event loop, so none of these may block."""

    def submit(self, request: Request) -> None:
        """Queue a request; raises QueueFull, PromptTooLong or BadRequest, and then never calls its sink."""

    def cancel(self, request_id: str) -> None:
        """End a request wherever it is. An id that has already ended is no error."""

    def keep(self, prompt: Prompt, seconds: float, namespace: str) -> None:
        """Evict the snapshots at the prompt's marks after all others, for so long."""

    def status(self) -> EngineStatus: ...


class TextPort(Protocol):
    """`ModelText` is the real one. `render`, `encode`, `compile` and `next_prompt` run on worker threads, several at a
    time; `remember` runs on the event loop."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def stop_tokens(self) -> frozenset[int]: ...
    @property
    def takes_tools(self) -> bool:
        """Whether the model's template writes tools into the prompt."""

    @property
    def efforts(self) -> Sequence[str]:
        """The values of `reasoning_effort` that the template accepts; none where it does not read it."""

    @property
    def thinking_tokens(self) -> ThinkingTokens | None:
        """How thinking opens and closes; None where it does so by no tokens of their own."""

    def takes_option(self, name: str) -> bool:
        """Whether the template reads an option of this name."""

    @property
    def call_format(self) -> CallFormat | None:
        """How the model writes calls; None where no grammar knows its format."""

    @property
    def may_think(self) -> bool:
        """Whether an answer may begin with thinking that the prompt has not opened."""

    def compile(self, source: str, field: str) -> Rules:
        """A grammar in the library's form, over the model's vocabulary; raises BadRequest naming the field."""

    @property
    def beyond_context(self) -> TextPort:
        """The same for prompts that are counted and not run, which may be longer than the context."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        namespace: str = "",
        /,
        **kwargs: Any,
    ) -> Prompt:
        """Messages to a prompt by the model's own template; raises BadRequest where the template refuses them."""

    def remember(self, prompt: Prompt, ids: Sequence[int], message: Mapping[str, Any], namespace: str = "") -> None:
        """The model answered `prompt`, which came from `render`, with `ids`; the client got them as `message`."""

    def next_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        answer: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
        namespace: str = "",
        /,
        **kwargs: Any,
    ) -> Prompt | None:
        """What a client that only appends will send after this answer, up to where its new message starts.

        None where the template does not show where messages start; raises BadRequest as `render` does.
        """

    def encode(self, text: str, add_special_tokens: bool) -> Prompt: ...

    def prompt_of(self, tokens: Sequence[int]) -> Prompt:
        """Tokens that the client chose itself, with the boundaries that can be read from them.

        Raises BadRequest for one outside the vocabulary.
        """

    def token_bytes(self, token: int) -> bytes: ...
    def detokenizer(self) -> Detokenizer: ...

    def stop_watcher(self, stops: Sequence[str]) -> Callable[[int], bool]:
        """A function for the engine's thread, called once per token: does this token complete a stop string?"""

    def stop_text(self, stops: Sequence[str]) -> StopText: ...

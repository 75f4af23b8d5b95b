"""What this room needs of its neighbours, and no more. The wiring fits the real rooms to these shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from rekindle.engine.types import Request
from rekindle.prompt import Prompt


class PageCountPort(Protocol):
    @property
    def total(self) -> int: ...
    @property
    def free(self) -> int: ...


class CachePort(Protocol):
    """The prefix cache's counts since the start, and its sizes now. Mappings are by tier or by reason."""

    @property
    def hits(self) -> Mapping[str, int]: ...
    @property
    def restored(self) -> Mapping[str, int]: ...
    @property
    def misses(self) -> Mapping[str, int]: ...
    @property
    def short_hits(self) -> Mapping[str, int]: ...
    @property
    def published(self) -> int: ...
    @property
    def evictions(self) -> Mapping[str, int]:
        """By "tier:what became of it"."""

    @property
    def saves(self) -> int: ...
    @property
    def refused_saves(self) -> Mapping[str, int]: ...
    @property
    def bad_files(self) -> int: ...
    @property
    def ram_entries(self) -> int: ...
    @property
    def ram_bytes(self) -> int: ...
    @property
    def ram_budget(self) -> int: ...
    @property
    def disk_entries(self) -> int: ...
    @property
    def disk_bytes(self) -> int: ...
    @property
    def disk_budget(self) -> int: ...


class EngineStatus(Protocol):
    """The engine at one moment; token counts are totals since it started."""

    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def slots(self) -> int: ...
    @property
    def pages(self) -> PageCountPort: ...
    @property
    def computed_tokens(self) -> int: ...
    @property
    def restored_tokens(self) -> int: ...
    @property
    def generated_tokens(self) -> int: ...
    @property
    def audits(self) -> int: ...
    @property
    def audit_mismatches(self) -> int: ...
    @property
    def cache(self) -> CachePort: ...
    @property
    def work(self) -> Mapping[str, int]:
        """How the stages of this process have worked, by "kind:how"."""

    @property
    def broken(self) -> str | None:
        """Why nothing can run any more."""


class EnginePort(Protocol):
    """Called from the event loop, so none of these may block."""

    def submit(self, request: Request) -> None:
        """Queue a request; raises QueueFull, PromptTooLong or BadRequest, and then never calls its sink."""

    def cancel(self, request_id: str) -> None:
        """End a request wherever it is. An id that has already ended is no error."""

    def status(self) -> EngineStatus: ...


class DetokenizerPort(Protocol):
    """Tokens to text, holding back bytes that do not yet make a character."""

    def push(self, token: int) -> str: ...
    def finish(self) -> str: ...


class StopTextPort(Protocol):
    """Text to the text before the first stop string, holding back what may become one."""

    def push(self, text: str) -> str: ...
    def finish(self) -> str: ...


class TextPort(Protocol):
    """`render`, `encode` and `next_prompt` run on worker threads, several at a time; `remember` runs on the loop."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def stop_tokens(self) -> frozenset[int]: ...

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        /,
        **kwargs: Any,
    ) -> Prompt:
        """Messages to a prompt by the model's own template; raises BadRequest for what it cannot say."""

    def remember(self, prompt: Prompt, ids: Sequence[int], message: Mapping[str, Any]) -> None:
        """To `prompt`, which came from `render`, the model said `ids`, the client was given `message`."""

    def next_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        answer: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None,
        /,
        **kwargs: Any,
    ) -> Prompt | None:
        """What a client that only appends will send after this answer, up to where its new message starts.

        None where that cannot be told; raises BadRequest as `render` does.
        """

    def encode(self, text: str, add_special_tokens: bool) -> Prompt: ...

    def prompt_of(self, tokens: Sequence[int]) -> Prompt:
        """Tokens that the client chose itself, with the boundaries that can be read from them.

        Raises BadRequest for one outside the vocabulary.
        """

    def token_bytes(self, token: int) -> bytes: ...
    def detokenizer(self) -> DetokenizerPort: ...

    def stop_watcher(self, stops: Sequence[str]) -> Callable[[int], bool]:
        """Asked on the engine's thread, once per token: did this token complete a stop string?"""

    def stop_text(self, stops: Sequence[str]) -> StopTextPort: ...

"""What a client asks for, whatever dialect it speaks: every dialect turns its body into one `ClientRequest`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rekindle.api.ports import TextPort
from rekindle.api.thinking import Thinking
from rekindle.grammar import Grammar
from rekindle.prompt import Prompt, TokenIds

FEW_IDS = 256  # of all prompts of a request


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for the model's chat template, in the form that templates read (OpenAI's)."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    template_options: Mapping[str, Any] = field(default_factory=dict)
    thinking: Thinking = field(default_factory=Thinking)
    add_generation_prompt: bool = True  # False: the last message is the beginning of the answer

    callable_tools: bool = True  # False: whatever the answer says, it is no call
    must_call: bool = False  # the answer is a call of one of the tools
    only_tool: str | None = None  # the name of the only one that may be called
    parallel_calls: bool = True  # False: an answer that must be a call is one call
    keep_seconds: int = 0  # what the client marked with cache_control is kept so long before other snapshots

    def render(self, text: TextPort, namespace: str) -> list[Prompt]:
        options = self.options(text)
        return [text.render(self.messages, self.tools, self.add_generation_prompt, namespace, **options)]

    def options(self, text: TextPort) -> dict[str, Any]:
        """For the template: what the client wrote for it, and what its thinking comes to there."""
        return {**self.thinking.options(text), **self.template_options}

    def ignored_fields(self, text: TextPort) -> list[str]:
        """Fields of the body that this model cannot heed."""
        return [*(["tools"] if self.tools and not text.takes_tools else ()), *self.thinking.ignored_fields(text)]


@dataclass(frozen=True, slots=True)
class RawPrompts:
    """Prompts that the client wrote out itself, as text or as token ids."""

    prompts: Sequence[str | list[int]]
    add_special_tokens: bool = True  # to text

    @property
    def are_few_ids(self) -> bool:
        """Whether they are rendered in a moment: nothing is to be encoded, and even ids that each begin a message or a
        call take no longer than to ask a thread."""
        return all(isinstance(each, TokenIds) for each in self.prompts) and sum(map(len, self.prompts)) <= FEW_IDS

    def render(self, text: TextPort, namespace: str) -> list[Prompt]:
        return [self._render_one(each, text) for each in self.prompts]

    def _render_one(self, prompt: str | list[int], text: TextPort) -> Prompt:
        return text.encode(prompt, self.add_special_tokens) if isinstance(prompt, str) else text.prompt_of(prompt)


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One HTTP request for `n` answers to each of its prompts. None stands for the server's default."""

    source: Conversation | RawPrompts
    prompt_field: str  # of the body; errors about the prompt name it
    model: str | None = None  # as the client calls it
    n: int = 1
    sampling: Mapping[str, Any] = field(default_factory=dict)  # the fields of `Sampling` that the client set
    seed: int | None = None
    max_tokens: int | None = None
    stop_strings: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()  # besides the model's own
    ignore_stop_tokens: bool = False
    logprobs: int | None = None  # alternatives to report beside each token of an answer; None reports nothing
    prompt_logprobs: int | None = None  # the same for the prompt's tokens
    grammar: Grammar | None = None  # what the answer has to be, after the thinking
    stream: bool = False

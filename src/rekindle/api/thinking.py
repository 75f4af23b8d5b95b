"""How much a model is to think: one value, whatever a dialect calls it, and what a template takes of it.

Anthropic    thinking {type, budget_tokens}, output_config.effort
OpenAI       reasoning_effort; reasoning.effort in responses; enable_thinking, also in chat_template_kwargs
Ollama       think, a switch or an effort
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rekindle.text import EFFORTS, ThinkingTokens

NONE = ("none", "off", "disabled")  # words for no thinking at all
SPELT = {"x-high": "xhigh", "x_high": "xhigh", "maximum": "max"}
SWITCHES = ("enable_thinking", "thinking")  # options by which templates switch thinking on and off


class ThinkingTemplate(Protocol):
    """What is asked of a model's text."""

    def takes_option(self, name: str) -> bool: ...

    @property
    def efforts(self) -> Sequence[str]: ...

    @property
    def thinking_tokens(self) -> ThinkingTokens | None: ...


@dataclass(frozen=True, slots=True)
class Thinking:
    """None stands for what the template does by itself. The names are those of the client's fields."""

    on: bool | None = None
    effort: str | None = None  # one of EFFORTS
    budget: int | None = None  # tokens of thinking after which the server closes it
    unknown_effort: bool = False  # the client named one that is none of EFFORTS
    on_field: str = "enable_thinking"
    effort_field: str = "reasoning_effort"
    budget_field: str = "thinking_budget"

    def with_effort(self, word: str | None, field: str) -> Thinking:
        """With what the client calls an effort."""
        if word is None:
            return self
        word = SPELT.get(word.lower(), word.lower())
        if word in NONE:
            return replace(self, on=False, on_field=field)
        return replace(
            self, effort=word if word in EFFORTS else None, unknown_effort=word not in EFFORTS, effort_field=field
        )

    def options(self, template: ThinkingTemplate) -> dict[str, Any]:
        """What the template gets."""
        options: dict[str, Any] = {}
        switch = _switch_of(template)
        if self.on is not None and switch is not None:
            options[switch] = self.on
        if self.effort is not None and self.on is not False and template.efforts:
            options["reasoning_effort"] = nearest(self.effort, template.efforts)
        return options

    def ignored_fields(self, template: ThinkingTemplate) -> list[str]:
        """Fields that this model's template cannot heed."""
        ignored = []
        if self.on and _switch_of(template) is None:
            ignored.append(self.on_field)
        if self.unknown_effort or (self.effort is not None and not template.efforts):
            ignored.append(self.effort_field)
        if self.budget is not None and template.thinking_tokens is None:
            ignored.append(self.budget_field)
        return ignored


def _switch_of(template: ThinkingTemplate) -> str | None:
    return next((name for name in SWITCHES if template.takes_option(name)), None)


def nearest(effort: str, accepted: Sequence[str]) -> str:
    """Of the efforts that a template accepts, the one next to what was asked for; of two as near, the lower."""
    wanted = EFFORTS.index(effort)
    return min(accepted, key=lambda each: (abs(EFFORTS.index(each) - wanted), EFFORTS.index(each)))

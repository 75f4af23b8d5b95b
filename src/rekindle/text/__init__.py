"""Messages ↔ tokens: tokenizer, chat template, boundaries, streams of text, stop strings."""

from __future__ import annotations

from rekindle.prompt import Boundary, BoundaryKind, Prompt
from rekindle.text.boundaries import RoleStarts, before_last_message, boundaries_of_tokens
from rekindle.text.history import TURN_BUDGET, TurnMemory
from rekindle.text.normalise import VOLATILE_LINES, VolatileLine, normalise_messages, sorted_tools
from rekindle.text.pieces import UNLIMITED, TooManyTokens
from rekindle.text.sentinels import check_depth, strings_of
from rekindle.text.stream import Detokenizer, StopText, StopWatcher
from rekindle.text.template import EFFORTS, ChatTemplate, ThinkingTokens
from rekindle.text.tokenizer import Tokenizer

__all__ = [
    "EFFORTS",
    "TURN_BUDGET",
    "UNLIMITED",
    "VOLATILE_LINES",
    "Boundary",
    "BoundaryKind",
    "ChatTemplate",
    "Detokenizer",
    "Prompt",
    "RoleStarts",
    "StopText",
    "StopWatcher",
    "ThinkingTokens",
    "Tokenizer",
    "TooManyTokens",
    "TurnMemory",
    "VolatileLine",
    "before_last_message",
    "boundaries_of_tokens",
    "check_depth",
    "normalise_messages",
    "sorted_tools",
    "strings_of",
]

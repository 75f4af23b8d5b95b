"""Messages ↔ tokens: tokenizer, chat template, boundaries, streams of text, stop strings."""

from __future__ import annotations

from rekindle.prompt import Boundary, BoundaryKind, Prompt
from rekindle.text.boundaries import LATTICE, RoleStarts, before_last_message, boundaries_of_tokens
from rekindle.text.history import TurnMemory
from rekindle.text.normalise import VOLATILE_LINES, VolatileLine, normalise_messages
from rekindle.text.stream import Detokenizer, StopText, StopWatcher
from rekindle.text.template import ChatTemplate
from rekindle.text.tokenizer import Tokenizer

__all__ = [
    "LATTICE",
    "VOLATILE_LINES",
    "Boundary",
    "BoundaryKind",
    "ChatTemplate",
    "Detokenizer",
    "Prompt",
    "RoleStarts",
    "StopText",
    "StopWatcher",
    "Tokenizer",
    "TurnMemory",
    "VolatileLine",
    "before_last_message",
    "boundaries_of_tokens",
    "normalise_messages",
]

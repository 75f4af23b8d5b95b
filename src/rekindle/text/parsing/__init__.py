"""Reasoning and tool calls in what a model writes, found while it is written."""

from rekindle.text.parsing.parser import AnswerParser
from rekindle.text.parsing.types import (
    Answer,
    Call,
    CallArguments,
    CallBegun,
    CallBroken,
    CallCut,
    CallDone,
    Content,
    Event,
    NotACall,
    Reasoning,
    Tool,
)

__all__ = [
    "Answer",
    "AnswerParser",
    "Call",
    "CallArguments",
    "CallBegun",
    "CallBroken",
    "CallCut",
    "CallDone",
    "Content",
    "Event",
    "NotACall",
    "Reasoning",
    "Tool",
]

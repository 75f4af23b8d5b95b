"""Grammars that answers keep to: the value every dialect sets, and what turns it into masks over the vocabulary."""

from rekindle.grammar.types import Grammar, GrammarKind

__all__ = ["Grammar", "GrammarKind"]

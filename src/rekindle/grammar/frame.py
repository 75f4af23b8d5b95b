"""Whole answers in the library's own form: what stands before the client's grammar, and where calls may stand."""

from __future__ import annotations

import json
from enum import Enum
from typing import Any

from llguidance import regex_to_lark

from rekindle.grammar.types import Grammar, GrammarKind

# Blanks between the parts of a JSON text: one, or a new line and its indentation. With no end to them a small model
# writes them until its answer is full.
BLANKS = r"\n[ \t]{0,40}|[ \t]"
THINKING = "think[lazy]: /(?s:.*)<\\/think>/\nblank: /[ \\n]{0,4}/\n"


class ThinkingFrame(Enum):
    """How an answer begins."""

    NONE = "start: {}\n"
    OPEN = "start: think blank {}\n" + THINKING  # the prompt has opened it
    FREE = 'start: ("<think>" think blank)? {}\n' + THINKING  # the model may open it


def whole(thinking: ThinkingFrame, *answers: dict[str, Any]) -> str:
    """The grammar of an answer that is one of these, each a grammar in the library's form, after the thinking."""
    named = [{"name": f"answer{number}", **answer} for number, answer in enumerate(answers)]
    choice = "(" + " | ".join(f"@{answer['name']}" for answer in named) + ")"
    return json.dumps({"grammars": [{"name": "whole", "lark_grammar": thinking.value.replace("{}", choice)}, *named]})


def in_library_form(grammar: Grammar) -> dict[str, Any]:
    """Not checked yet. EBNF, as llama.cpp and xgrammar write it with ::=, stays as it is until it is."""
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return {"json_schema": with_options(json.loads(grammar.text), grammar.strict)}
        case GrammarKind.REGEX:
            return {"lark_grammar": f"start: /{regex_to_lark(grammar.text, 'dw').replace(chr(10), chr(92) + 'n')}/"}
        case GrammarKind.CHOICE:
            return {"lark_grammar": "start: CHOICE\nCHOICE: " + " | ".join(map(literal, json.loads(grammar.text)))}
    return {"ebnf" if "::=" in grammar.text else "lark_grammar": grammar.text}


def with_options(schema: Any, strict: bool) -> dict[str, Any]:
    """strict: a keyword that the library cannot keep is an error, else it is left out."""
    options = {"whitespace_pattern": BLANKS, "lenient": not strict}
    if not isinstance(schema, dict):
        schema = {} if schema else {"not": {}}
    return {**schema, "x-guidance": options}


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

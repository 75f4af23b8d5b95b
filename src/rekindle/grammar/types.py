"""What an answer has to be, as the client wrote it. Every dialect turns its own fields into one `Grammar`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rekindle.errors import BadRequest

LARGEST = 1 << 19  # bytes of a whole grammar: the schemas of a few hundred tools


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"  # text: the schema
    REGEX = "regex"  # text: a regular expression that the whole answer matches
    CHOICE = "choice"  # text: a JSON list of strings, one of which is the answer
    LARK = "lark"  # text: a grammar in Lark's notation, beginning at `start`; or EBNF with ::=, beginning at `root`


@dataclass(frozen=True, slots=True)
class Grammar:
    """It says what the answer is after the thinking; not compiled and not checked yet."""

    kind: GrammarKind
    text: str
    field: str  # of the body; errors name it
    strict: bool = True  # a keyword of a schema that cannot be kept is refused, else it is left out

    @classmethod
    def of_schema(cls, schema: Mapping[str, Any] | bool, field: str, strict: bool = True) -> Grammar:
        return cls(GrammarKind.JSON_SCHEMA, json.dumps(schema), field, strict)

    @classmethod
    def of_any_object(cls, field: str) -> Grammar:
        """JSON mode: any object."""
        return cls.of_schema({"type": "object"}, field)

    @classmethod
    def of_choices(cls, choices: Sequence[str], field: str) -> Grammar:
        return cls(GrammarKind.CHOICE, json.dumps(list(choices)), field)


def check_size(size: int, field: str) -> None:
    """Before anything is made of it: a size in bytes, so far, of what the client wants its answers to be."""
    if size > LARGEST:
        raise BadRequest(f"{field}: the grammar has {size:,} bytes or more, at most {LARGEST:,} are taken", field)

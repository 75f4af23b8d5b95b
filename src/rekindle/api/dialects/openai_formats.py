"""What an answer has to be, in OpenAI's field `response_format` and in vLLM's `structured_outputs`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from rekindle.api.parsing import MAX_ALTERNATIVES, Body, kind_of, refuse
from rekindle.grammar import Grammar, GrammarKind


class JsonSchema(Body):
    definition: Any = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: str
    json_schema: JsonSchema | None = None
    definition: Any = Field(None, alias="schema")  # of json_object; llama.cpp's clients send it

    @property
    def grammar(self) -> Grammar | None:
        match self.type:
            case "text":
                return None
            case "json_object" if self.definition is None:
                return Grammar.of_any_object("response_format")
            case "json_object":
                return _of_schema(self.definition, "response_format.schema", strict=False)
            case "json_schema":
                if self.json_schema is None:
                    refuse("response_format.json_schema", "is missing")
                found = self.json_schema
                return _of_schema(found.definition, "response_format.json_schema.schema", bool(found.strict))
        refuse("response_format.type", f"must be text, json_object or json_schema, got {self.type[:40]!r}")


class StructuredOutputs(Body):
    """One of them."""

    definition: Any = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_ALTERNATIVES, fail_fast=True)] | None = None
    grammar: str | None = None

    @property
    def value(self) -> Grammar:
        where = "structured_outputs"
        found = [
            self.definition is not None and _of_schema(self.definition, f"{where}.json", strict=True),
            bool(self.json_object) and Grammar.of_any_object(f"{where}.json_object"),
            self.regex is not None and Grammar(GrammarKind.REGEX, self.regex, f"{where}.regex"),
            self.choice is not None and Grammar.of_choices(self.choice, f"{where}.choice"),
            self.grammar is not None and Grammar(GrammarKind.LARK, self.grammar, f"{where}.grammar"),
        ]
        given = [grammar for grammar in found if grammar]
        if len(given) != 1:
            refuse(where, f"needs one of json, json_object, regex, choice and grammar, got {len(given)}")
        return given[0]


def grammar_of(response_format: ResponseFormat | None, outputs: StructuredOutputs | None) -> Grammar | None:
    """Raises BadRequest for what does not read, and for two of them."""
    formatted = response_format.grammar if response_format is not None else None
    if formatted is not None and outputs is not None:
        refuse("structured_outputs", "does not go with response_format: one of them says what the answer is")
    return outputs.value if outputs is not None else formatted


def _of_schema(schema: Any, field: str, strict: bool) -> Grammar:
    if not isinstance(schema, dict | bool):
        refuse(field, f"must be a schema, got {kind_of(schema)}")
    return Grammar.of_schema(schema, field, strict)

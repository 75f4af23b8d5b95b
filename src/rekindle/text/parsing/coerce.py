"""Arguments that were written as text, as the types that the tool declares."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rekindle.text.parsing.jsonish import loads

MOST_REFERENCES = 8  # from one definition to the next
ANY = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
_WORDS = {"true": True, "True": True, "false": False, "False": False}


class Arguments:
    """What the schema of a tool's arguments says of each. However often a definition is referred to, it is read once
    for each number of references before it."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self.schema = schema
        properties = schema.get("properties")
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._known: dict[tuple[str, int], frozenset[str]] = {}  # types, by reference and references before it

    def resolved(self, schema: Any) -> Any:
        """With the definition that it refers to in its place; the same steps as where types are looked for."""
        for _ in range(MOST_REFERENCES):
            if not isinstance(schema, Mapping) or types_by_itself(schema) is not None:
                break
            match schema:
                case {"$ref": str(reference)} if (found := self._definition(reference)) is not None:
                    schema = found
                case {"$ref": _} | {"anyOf": _} | {"oneOf": _}:
                    break
                case {"allOf": [only]}:
                    schema = only
                case _:
                    break
        return schema

    def property_of(self, name: str) -> Any:
        return self._properties.get(name)

    def types_of(self, name: str) -> frozenset[str]:
        """The JSON types that are allowed; none where the schema does not say."""
        return self._types(self.property_of(name), 0)

    def is_text(self, name: str) -> bool:
        """Whether any text is a value of it as it stands, so that it can be passed on while it is written."""
        types = self.types_of(name)
        return types == {"string"} or not types

    def as_json(self, name: str, text: str) -> str:
        """A value that was written without quotes, as JSON. What does not read as a declared type stays a string."""
        types = self.types_of(name)
        word = text.strip()
        if "null" in types and word in ("null", "None"):
            return "null"
        if "boolean" in types and word in _WORDS:
            return json.dumps(_WORDS[word])
        if types & {"integer", "number", "array", "object"}:
            value = _loads(word)
            if _name_of(value) in types or (_name_of(value) == "integer" and "number" in types):
                return json.dumps(value, ensure_ascii=False)
        return json.dumps(text, ensure_ascii=False)

    def _types(self, schema: Any, references: int) -> frozenset[str]:
        if not isinstance(schema, Mapping):
            return frozenset()
        if (said := types_by_itself(schema)) is not None:
            return said
        match schema:
            case {"$ref": str(reference)}:
                return self._types_of_definition(reference, references)
            case {"anyOf": [_, *_] as choices} | {"oneOf": [_, *_] as choices}:
                return frozenset[str]().union(*(self._types(choice, references) or ANY for choice in choices))
            case {"allOf": [_, *_] as parts}:
                all_of = ANY.intersection(*(self._types(part, references) or ANY for part in parts))
                return frozenset() if all_of == ANY else all_of
        return frozenset({"object"}) if "properties" in schema else frozenset()

    def _types_of_definition(self, reference: str, references: int) -> frozenset[str]:
        if references == MOST_REFERENCES:
            return frozenset()
        place = (reference, references)
        if place not in self._known:
            self._known[place] = self._types(self._definition(reference), references + 1)
        return self._known[place]

    def _definition(self, reference: str) -> Any:
        """Of "#/$defs/NAME"; None where there is none."""
        where, _, name = reference.removeprefix("#/").partition("/")
        definitions = self.schema.get(where)
        return definitions.get(name) if isinstance(definitions, Mapping) else None


def types_by_itself(schema: Mapping[str, Any]) -> frozenset[str] | None:
    """None: only what it refers to or is made of can say."""
    if "const" in schema:
        return frozenset({_name_of(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(_name_of(value) for value in schema["enum"])
    kind = schema.get("type")
    if isinstance(kind, list):
        return frozenset(name for name in kind if isinstance(name, str))
    return frozenset({kind}) if isinstance(kind, str) else None


def _loads(text: str) -> Any:
    try:
        return loads(text)
    except (ValueError, RecursionError):
        return text


def _name_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case None:
            return "null"
    return "object"

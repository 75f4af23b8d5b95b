"""Laws of bodies that hold for every dialect, the next one too: they are read off the schemas and the routes."""

from __future__ import annotations

import json
import select
import socket
import tracemalloc
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx
import pytest
from support.wire import read_message

from rekindle.api.dialects import DIALECTS
from rekindle.api.keys import ApiKeys
from rekindle.api.parsing import MAX_FIELDS, Body, parse
from rekindle.api.utilities import DetokenizeBody
from rekindle.errors import BadRequest

JSON = {"content-type": "application/json"}
PARSERS = {dialect.path: dialect.parse for dialect in DIALECTS} | {"/detokenize": partial(parse, DetokenizeBody)}


def kinds_of(base: type[Body]) -> Iterator[type[Body]]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds_of(kind)


KINDS = sorted({kind for kind in kinds_of(Body) if kind.__module__.startswith("rekindle.")}, key=lambda kind: str(kind))


def inner(schema: Any) -> Iterator[dict[str, Any]]:
    """A schema and all that it holds."""
    if isinstance(schema, dict):
        yield schema
    for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from inner(each)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_list_of_a_schema_has_a_bound_of_its_own(kind: type[Body]) -> None:
    """A bound around "a list or nothing" is looked at after the entries."""
    for name, field in kind.model_json_schema().get("properties", {}).items():
        lists = [each for each in inner(field) if each.get("type") == "array" and each["items"] != {}]
        assert all("maxItems" in each for each in lists), name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_number_of_a_schema_has_bounds(kind: type[Body]) -> None:
    """By the schema that pydantic makes of it, so that a new field cannot forget them."""

    def unbounded(schema: dict[str, Any], name: str, bounds: frozenset[str] = frozenset()) -> list[str]:
        bounds |= {word.removeprefix("exclusive").lower() for word in schema}
        inner = [schema[key] for key in ("items", "additionalProperties") if isinstance(schema.get(key), dict)]
        found = [bad for kind in schema.get("anyOf", ()) for bad in unbounded(kind, name, bounds)]
        found += [bad for kind in inner for bad in unbounded(kind, name)]
        is_number = schema.get("type") in ("integer", "number")
        return [*found, name] if is_number and not {"minimum", "maximum"} <= bounds else found

    fields = kind.model_json_schema().get("properties", {})
    assert [bad for name, schema in fields.items() for bad in unbounded(schema, name)] == []


BAD = {  # each with more bad entries than anyone needs to hear of
    "/v1/chat/completions": ('"messages": [%s]', '{"messages": [{"role": "user", "content": "x"}], "tools": [%s]}'),
    "/v1/messages": ('"max_tokens": 1, "messages": [%s]',),
    "/v1/responses": ('"input": "x", "include": [%s]', '"input": [%s]'),
    "/api/chat": ('"options": {"stop": [%s]}', '"messages": [{"role": "user", "tool_calls": [%s]}]'),
    "/detokenize": ('"tokens": [%s]',),
}


@pytest.mark.parametrize(("path", "body"), [(path, body) for path, bodies in BAD.items() for body in bodies])
def test_of_a_million_bad_entries_the_first_is_named_and_no_list_of_them_is_made(path: str, body: str) -> None:
    data = ("{" + body.removeprefix("{").removesuffix("}") % ("-1," * 300_000 + "-1") + "}").encode()
    tracemalloc.start()
    with pytest.raises(BadRequest):
        PARSERS[path](data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 * len(data), "the entries themselves take eight bytes each"


@pytest.mark.parametrize("path", sorted(PARSERS))
def test_a_body_of_very_many_fields_is_refused(path: str) -> None:
    body = json.dumps(dict.fromkeys(map(str, range(MAX_FIELDS + 1)), 1)).encode()
    with pytest.raises(BadRequest, match=f"{MAX_FIELDS + 1} fields"):
        PARSERS[path](body)


# What no JSON can say


def post(house: Any, path: str, body: bytes) -> httpx.Response:
    return httpx.post(house.url + path, content=body, headers=JSON, timeout=20)


ODD = [
    ("/v1/responses", b'{"input": "x", "instructions": "%s"}'),
    ("/v1/responses", b'{"input": "x", "tools": [{"type": "function", "name": "%s"}]}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "%s"}]}'),
    ("/v1/completions", b'{"prompt": "%s"}'),
    ("/v1/messages", b'{"max_tokens": 1, "messages": [{"role": "user", "content": "%s"}]}'),
    ("/api/generate", b'{"prompt": "%s"}'),
    ("/tokenize", b'{"content": "%s"}'),
    ("/api/show", b'{"model": "%s"}'),
]


@pytest.mark.parametrize(("path", "body"), ODD)
@pytest.mark.parametrize("bytes_", [b"\xed\xa0\x80", b"\xed\xb0\x80", b"\xff", b"\xc0\x80", b"\xf5\x80\x80\x80"])
def test_text_that_is_no_utf8_is_refused_on_every_route(house: Any, path: str, body: bytes, bytes_: bytes) -> None:
    """Half a surrogate pair in UTF-8 passes json's own decoder, and an answer that quotes it could not be sent."""
    response = post(house, path, body % bytes_)
    assert response.status_code == 400 and "error" in response.json(), response.text[:300]


@pytest.mark.parametrize("number", [b"1e999", b"-1e999", b"NaN", b"Infinity"])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", b'{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"a": %s}}]}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "x", "a": %s}]}'),
        ("/api/chat", b'{"format": {"minimum": %s}}'),
    ],
)
def test_numbers_that_json_cannot_write_again_are_refused_at_any_depth(
    house: Any, path: str, body: bytes, number: bytes
) -> None:
    assert post(house, path, body % number).status_code == 400


# Answers before the body


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/nowhere"])
@pytest.mark.parametrize("length", [10, 1 << 20])
def test_a_refusal_that_needs_no_body_leaves_the_connection_to_the_next_request(
    fresh_house: Any, path: str, length: int
) -> None:
    """Clients use a connection again, and an agent's next try would be lost."""
    house = fresh_house(keys=ApiKeys.single("a long key"))
    connection = socket.create_connection(("127.0.0.1", house.port), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
    for _ in range(2):
        connection.sendall(f"{head}\r\n".encode())
        select.select([connection], [], [], 0.3)  # time for an answer that does not wait for the body
        connection.sendall(b"x" * length)
        assert b" 401 " in read_message(connection).first_line or path == "/nowhere"
    connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b" 200 " in read_message(connection).first_line

"""From the bytes of a body to a checked pydantic model, for the schema of any dialect.

A null field is an absent one. Types are strict: "1" is no number and 1 is no boolean.
Fields that the schema does not have are accepted, because clients send novelties, and stay unread: the dialect names
them in the answer's `ignored_fields`.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rekindle.errors import BadRequest
from rekindle.grammar.types import check_size
from rekindle.prompt import TokenIds
from rekindle.text import check_depth
from rekindle.text.parsing.jsonish import loads, mend_surrogates

MAX_STOPS = 16
MAX_STOP_TOKENS = 1024
MAX_BIASES = 1024  # each decode step writes them into a row of logits, and other answers wait for the step
MAX_FIELDS = 1_024  # of a body, known or not
MAX_MESSAGES = 10_000
MAX_TOOLS = 1_000
MAX_ALTERNATIVES = 1_024  # texts of which an answer is one
# Entries by field, checked before the schema: pydantic would list what is wrong with each of a million entries.
MAX_ENTRIES = {
    "messages": MAX_MESSAGES,
    "input": MAX_MESSAGES,
    "tools": MAX_TOOLS,
    "stop": MAX_STOPS,
    "stop_sequences": MAX_STOPS,
    "system": MAX_MESSAGES,
    "stop_token_ids": MAX_STOP_TOKENS,
    "logit_bias": MAX_BIASES,
}
MAX_PROMPT = 1 << 21  # token ids in one body; several times the longest context there is
FORMATS = ("response_format", "structured_outputs", "text", "output_config", "format")  # fields that hold a grammar
MAX_OPTIONS = 1 << 16  # bytes of options for the template
# In all fields together. A list or an object takes some hundred bytes where it took two in the body, a number dozens.
# Texts have brackets and commas too, and these must pass: code of a million tokens has some 200,000.
MAX_BRACKETS = 300_000
MAX_COMMAS = 1_500_000
LARGEST = 2**31 - 1  # of counts and token ids; what lies beyond fits no tensor of ours

Count = Annotated[int, Field(ge=0, le=LARGEST)]
# All lists of schemas are so: they fail fast, and the bound is the list's own and not that of "a list or nothing". Else
# pydantic would list what is wrong with each of a million entries, in a gigabyte, while other threads wait.
Stops = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=4096)]], Field(max_length=MAX_STOPS, fail_fast=True)
]


class Body(BaseModel):
    """The base of every schema."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    token_fields: ClassVar[frozenset[str]] = frozenset()  # that may hold token ids, perhaps a hundred thousand


B = TypeVar("B", bound=Body)


def parse(kind: type[B], body: bytes) -> B:
    """A body of this kind, or BadRequest naming the first bad field."""
    raw = _split(mend_surrogates(body))
    if len(raw) > MAX_FIELDS:
        raise BadRequest(f"the body has {len(raw)} fields, at most {MAX_FIELDS} are taken")
    known = {name: bytes(value) for name, value in raw.items() if name in kind.model_fields}
    _check_counts(known)
    fields = {
        name: _load(name, known[name], name in kind.token_fields) if name in known else _is_null(value)
        for name, value in raw.items()
    }
    try:
        return kind.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        why = first["msg"].removeprefix("Value error, ")
        raise BadRequest(f"{_path(first['loc'])}: {why}", _field(first["loc"])) from None


def _split(body: bytes) -> dict[str, msgspec.Raw]:
    """The fields of the body, not yet decoded: one that the schema does not have costs no memory."""
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError:
        raise BadRequest(f"the body must be a JSON object, got {_kind_of_raw(body)}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not valid JSON: {error}") from None


def _is_null(value: msgspec.Raw) -> bool | None:
    """Stands for the value of a field that the schema does not have: only whether it is null matters."""
    return None if bytes(value).strip() == b"null" else True


def _check_counts(known: dict[str, bytes]) -> None:
    """Refuses, before decoding, values that would take far more memory or time than their bytes."""
    length = sum(map(len, known.values()))  # as many brackets or commas there may be; most bodies have fewer bytes
    if length > MAX_BRACKETS:
        brackets = sum(data.count(b"[") + data.count(b"{") for data in known.values())
        if brackets > MAX_BRACKETS:
            raise BadRequest(f"the body has {brackets} opening brackets, at most {MAX_BRACKETS} are taken")
    if length > MAX_COMMAS:
        commas = {name: data.count(b",") for name, data in known.items()}
        if sum(commas.values()) - commas.get("prompt", 0) > MAX_COMMAS:
            raise BadRequest(f"the body has {sum(commas.values())} commas, at most {MAX_COMMAS} are taken")
        if commas.get("prompt", 0) > MAX_PROMPT and not known["prompt"].lstrip().startswith(b'"'):
            raise BadRequest(
                f"prompt: has more than {commas['prompt']} tokens, at most {MAX_PROMPT} are taken", "prompt"
            )
    if len(known.get("chat_template_kwargs", b"")) > MAX_OPTIONS:
        raise BadRequest(f"chat_template_kwargs: has more than {MAX_OPTIONS} bytes", "chat_template_kwargs")
    for name in FORMATS:
        check_size(len(known.get(name, b"")), name)


def _load(name: str, data: bytes, may_be_ids: bool) -> Any:
    value = _ids(data) if may_be_ids else None
    if value is None:
        try:
            value = loads(data.decode())  # json's own decoding would let halves of surrogate pairs through
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"{_shown(name)}: is not valid JSON: {error}", name) from None
    if isinstance(value, list | dict) and len(value) > MAX_ENTRIES.get(name, MAX_PROMPT):
        raise BadRequest(
            f"{name}: has {len(value)} entries, at most {MAX_ENTRIES.get(name, MAX_PROMPT)} are taken", name
        )
    if not isinstance(value, TokenIds):
        check_depth(value, name)
    return value


_DECODER = msgspec.json.Decoder(list[Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]])


def _ids(data: bytes) -> TokenIds | None:
    """The value, if it is a list of nothing but ids; what else it is, or what is wrong with it, others find out."""
    try:
        ids = _DECODER.decode(data)
    except msgspec.DecodeError:
        return None
    return TokenIds(ids) if ids else None


def refuse(field: str, why: str) -> NoReturn:
    """Refuse one field by a rule over several: pydantic would not know which of them to name."""
    raise BadRequest(f"{field}: {why}", field)


def _path(loc: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") is messages[0].role"""
    name = ""
    for step in loc:
        name += f"[{step}]" if isinstance(step, int) else f".{step}" if name else step
    return name


def _field(loc: tuple[int | str, ...]) -> str:
    """The innermost named field: ("stop", 3) is stop"""
    while loc and isinstance(loc[-1], int):
        loc = loc[:-1]
    return _path(loc)


def _shown(name: str) -> str:
    """A field name that the client made up, cut for a message."""
    return name if len(name) <= 80 else f"{name[:80]}…"


def kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _kind_of_raw(body: bytes) -> str:
    """The kind of a JSON value that is no object, by its first letter."""
    firsts = {b"[": "a list", b'"': "a string", b"t": "a boolean", b"f": "a boolean", b"n": "null"}
    return firsts.get(body.strip()[:1], "a number")

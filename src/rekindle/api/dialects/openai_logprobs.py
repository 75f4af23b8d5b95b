"""Log-probabilities in the shapes of the chat route, the legacy route, and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rekindle.api.choice import TextDelta
from rekindle.api.ports import TextPort
from rekindle.engine.types import TokenLogprob

LEAST = -9999.0  # stands for minus infinity, which JSON cannot say


def rows_of(delta: TextDelta) -> list[TokenLogprob]:
    rows = [token.logprob for token in delta.tokens if token.logprob is not None]
    assert len(rows) == len(delta.tokens), "the engine reports a log-probability for every token or for none"
    return rows


def chat_logprobs(rows: Sequence[TokenLogprob], text: TextPort) -> dict[str, Any]:
    content = [{**_entry(row.token, row.logprob, text), "top_logprobs": _alternatives(row, text)} for row in rows]
    return {"content": content, "refusal": None}


def _alternatives(row: TokenLogprob, text: TextPort) -> list[dict[str, Any]]:
    return [_entry(token, logprob, text) for token, logprob in row.top]


def _entry(token: int, logprob: float, text: TextPort) -> dict[str, Any]:
    piece = text.token_bytes(token)
    return {"token": piece.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(piece)}


def legacy_logprobs(
    tokens: Sequence[int], rows: Sequence[TokenLogprob | None], offsets: Sequence[int], text: TextPort
) -> dict[str, Any]:
    """Parallel lists. A prompt's first token has no row: no token comes before it."""
    assert len(tokens) == len(rows) == len(offsets), "every token has a row and an offset"
    return {
        "tokens": [_name(token, text) for token in tokens],
        "token_logprobs": [None if row is None else _finite(row.logprob) for row in rows],
        "top_logprobs": [None if row is None else _by_name(row, text) for row in rows],
        "text_offset": list(offsets),
    }


def _by_name(row: TokenLogprob, text: TextPort) -> dict[str, float]:
    """The alternatives, and the token itself where it is not among them."""
    ranked = {_name(token, text): _finite(logprob) for token, logprob in row.top}
    return ranked | {_name(row.token, text): _finite(row.logprob)}


def prompt_logprobs(rows: Sequence[TokenLogprob | None], text: TextPort) -> list[dict[str, Any] | None]:
    """By token id, as vLLM gives them; a token outside the reported alternatives has no known rank."""
    return [None if row is None else _by_id(row, text) for row in rows]


def _by_id(row: TokenLogprob, text: TextPort) -> dict[str, Any]:
    ranks = {token: rank for rank, (token, _) in enumerate(row.top, start=1)}
    logprobs = dict(row.top) | {row.token: row.logprob}
    return {
        str(token): {"logprob": _finite(value), "rank": ranks.get(token), "decoded_token": _name(token, text)}
        for token, value in logprobs.items()
    }


def _name(token: int, text: TextPort) -> str:
    """The token's text; for part of a character its bytes, so that different tokens keep different names."""
    piece = text.token_bytes(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _finite(logprob: float) -> float:
    return max(logprob, LEAST)

"""What a request must be before it may wait for a slot. Runs on the client's thread."""

from __future__ import annotations

from rekindle.engine.forcing import Forcing
from rekindle.engine.sequence import Sequence
from rekindle.engine.types import Request
from rekindle.errors import BadRequest, PromptTooLong
from rekindle.spec import PAGE


def make_sequence(request: Request, context: int, pages: int, tokens: int | None) -> Sequence:
    """A sequence that fits the context limit and the KV pool; raises BadRequest or PromptTooLong.

    pages: of the pool, in all; tokens: ids below it stand for a token, None where the vocabulary is not known.
    """
    length = len(request.prompt.tokens)
    if length == 0:
        raise BadRequest("the prompt is empty", field="prompt")
    _check_last(int(request.prompt.key.max()), "prompt", tokens)
    _check_last(max(request.sampling.logit_bias, default=0), "logit_bias", tokens)
    if length >= context:
        said = f"the prompt has {length} tokens, the context holds {context}"
        raise PromptTooLong(said, tokens=length, most=context - 1)
    if -(-(length + 1) // PAGE) > pages:
        said = f"the prompt has {length} tokens, the KV pool holds {pages * PAGE}"
        raise PromptTooLong(said, tokens=length, most=pages * PAGE - 1)
    room = min(context, pages * PAGE) - length
    limit, forcing = min(request.max_tokens, room), Forcing(request.thinking)
    return Sequence(request, list(request.prompt.tokens), limit, prefill_end=length, forcing=forcing)


def _check_last(last: int, field: str, known: int | None) -> None:
    """Refuse ids without a row in the embedding or the logits, and those of padding rows, which stand for no token.
    last: the highest of them."""
    if known is not None and last >= known:
        raise BadRequest(f"{field} has the token {last}, the model's tokens end before {known}", field)

"""What was restored and computed for an answer: the `rekindle` object of a response."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rekindle.api.changes import changed
from rekindle.api.choice import Choice
from rekindle.api.params import GenerationParams
from rekindle.api.ports import TextPort
from rekindle.engine.types import CacheReport, DraftReport, Timings
from rekindle.prompt import Prompt

NOTES = 8  # reasons why something that looked like a call is text, of one answer at most


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one HTTP request. Each prompt counts once, as its first answer met it; answers all count."""

    prompt: int
    cached: int  # of the prompt's
    completion: int
    reasoning: int  # of the answers' tokens
    published: int = 0  # newly covered by snapshots, of prompts and answers


def usage_of(choices: list[Choice], n: int) -> Usage:
    """n: answers per prompt, which lie side by side."""
    firsts = [choice.result for choice in choices[::n]]
    return Usage(
        prompt=sum(it.prompt_tokens for it in firsts),
        cached=sum(it.cache.restored for it in firsts),
        completion=sum(choice.result.completion_tokens for choice in choices),
        reasoning=sum(choice.reasoning_tokens for choice in choices),
        published=sum(it.cache.published for it in firsts),
    )


def account(choice: Choice, params: GenerationParams, text: TextPort) -> dict[str, Any]:
    """How one answer was computed."""
    finished = choice.result
    return {
        **_cache(finished.cache, choice.prompt, text, params.is_alone),
        "draft": _draft(finished.draft),
        "timings_ms": _milliseconds(finished.timings),
        "max_tokens": params.max_tokens[choice.index // params.n],
        "seed": choice.seed,
        **({"grammar": finished.stuck} if finished.stuck is not None else {}),
        **({"thinking_closed_after": params.thinking_budget} if choice.thinking_was_closed else {}),
        **({"calls_as_text": choice.answer.notes[:NOTES]} if choice.answer.notes else {}),
    }


def _cache(cache: CacheReport, prompt: Prompt, text: TextPort, is_alone: bool) -> dict[str, Any]:
    """What was restored and why not more.

    Where several clients share a name space, the position up to which the prompt was seen before would tell one client
    whether it has guessed another's words; such a client learns only how far its prompt was restored.
    """
    found, miss = cache.divergence, cache.miss
    if found is not None and miss is not None and not is_alone:
        further = f"no snapshot reaches further into the prompt than position {cache.restored}"
        found, miss = None, further if cache.restored else "nothing of the prompt could be restored"
    return {
        "restored": dict(cache.restored_from),
        "computed": cache.computed,
        "published": cache.published,
        **({"not_published": cache.not_published} if cache.not_published is not None else {}),
        "sparse": cache.sparse,
        "miss": miss,
        # The token that was seen there instead is another request's, perhaps another client's: only the log has it.
        "divergence": found and {"position": found.position, "ours": _named(found.ours, text)},
        **({"changed": said} if (said := changed(prompt, found, text)) is not None else {}),
    }


def _draft(draft: DraftReport) -> dict[str, Any]:
    return {
        "drafter": draft.drafter,
        "off": draft.off,
        "blocks": draft.blocks,
        "proposed": draft.proposed,
        "accepted": draft.accepted,
        "mean_accepted": round(draft.mean_accepted, 2),
        "cold_from": draft.cold_from,
    }


def _named(token: int | None, text: TextPort) -> dict[str, Any] | None:
    return None if token is None else {"token": token, "text": text.token_bytes(token).decode(errors="replace")}


def _milliseconds(timings: Timings) -> dict[str, float]:
    seconds = {"queued": timings.queued, "prefill": timings.prefill, "decode": timings.decode}
    return {name: round(value * 1000, 3) for name, value in seconds.items()}

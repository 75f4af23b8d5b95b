"""One line of the log per request: who asked which model, what was restored and computed, how long it took.

The line has names, counts and times. Of prompts it has only the line that a client changed in its past, since a user
can act on nothing less; of answers nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rekindle.api.changes import changed
from rekindle.api.choice import Choice
from rekindle.api.generation import Generation
from rekindle.engine.types import CacheReport, DraftReport, Timings

log = logging.getLogger("rekindle.requests")

SPELT = {"ram": "RAM"}  # tiers whose name the text spells in another way


@dataclass(slots=True)
class RequestRecord:
    """One POST, from its arrival to its end. Whoever learns something of it writes it here."""

    path: str  # of the route, or "other": a client must not be able to write into the log
    arrived: float = field(default_factory=time.monotonic)
    began: float = field(default_factory=time.time)  # unix seconds
    client: str = ""
    model: str | None = None  # its id
    generation: Generation | None = None  # None: it was refused before, or asks for no answer of the model
    status: int = 0
    reason: str | None = None  # why it was refused or failed, without what its client wrote
    seconds: float = 0.0  # in all

    def end(self, status: int, client: str) -> None:
        self.status, self.client = status, client
        self.seconds = time.monotonic() - self.arrived

    @property
    def choices(self) -> list[Choice]:
        return self.generation.choices if self.generation is not None else []

    @property
    def cache(self) -> CacheReport | None:
        """Sums: over the prompts, each as its first finished answer met it (as `Usage` has them), of what was restored
        and computed, and over all finished answers of what they published."""
        finished = [choice for choice in self.choices if choice.finished is not None]
        if not finished:
            return None
        each = [choice.result.cache for choice in finished]
        first_of = {id(choice.prompt): choice.result.cache for choice in reversed(finished)}  # what comes last stays
        firsts = list(first_of.values())
        tiers = dict.fromkeys(tier for cache in firsts for tier in cache.restored_from)
        return CacheReport(
            restored_from={tier: sum(cache.restored_from.get(tier, 0) for cache in firsts) for tier in tiers},
            computed=sum(cache.computed for cache in firsts),
            published=sum(cache.published for cache in each),
            miss=each[0].miss,
            divergence=each[0].divergence,
            not_published=next((cache.not_published for cache in each if cache.not_published), None),
        )

    @property
    def changed(self) -> str | None:
        """What the client changed in what it had sent before, in words."""
        cache = self.cache
        if cache is None or self.generation is None:
            return None
        return changed(self.choices[0].prompt, cache.divergence, self.generation.text)

    @property
    def draft(self) -> DraftReport:
        each = [choice.finished.draft for choice in self.choices if choice.finished is not None]
        proposed, accepted = sum(draft.proposed for draft in each), sum(draft.accepted for draft in each)
        return DraftReport(proposed=proposed, accepted=accepted)

    @property
    def timings(self) -> Timings | None:
        """Of the first answer."""
        first = next((choice.finished for choice in self.choices if choice.finished is not None), None)
        return None if first is None else first.timings

    @property
    def first_token(self) -> float | None:
        """Seconds from the arrival to the first token of any answer."""
        at = [choice.first_token_at for choice in self.choices if choice.first_token_at is not None]
        return min(at) - self.arrived if at else None

    @property
    def prompt_tokens(self) -> int:
        each = {id(choice.prompt): len(choice.prompt.tokens) for choice in self.choices}
        return sum(each.values())

    @property
    def finish(self) -> str | None:
        """How its answers ended, each way once."""
        return ", ".join(dict.fromkeys(choice.ending or "cut off" for choice in self.choices)) or None

    def fields(self) -> dict[str, Any]:
        """For machines; times in milliseconds."""
        cache, draft, timings, first = self.cache, self.draft, self.timings, self.first_token
        return {
            "id": self.choices[0].request_id if self.choices else None,
            "client": self.client or None,
            "path": self.path,
            "model": self.model,
            "status": self.status,
            "reason": self.reason,
            "finish": self.finish,
            "prompt_tokens": self.prompt_tokens,
            "restored": dict(cache.restored_from) if cache is not None else {},
            "computed": cache.computed if cache is not None else None,
            "published": cache.published if cache is not None else None,
            "generated": sum(len(choice.ids) for choice in self.choices),
            "queue_ms": None if timings is None else _milliseconds(timings.queued),
            "first_token_ms": None if first is None else _milliseconds(first),
            "total_ms": _milliseconds(self.seconds),
            "draft_proposed": draft.proposed,
            "draft_accepted": draft.accepted,
            "miss": cache.miss if cache is not None else None,
            "not_published": cache.not_published if cache is not None else None,
            "changed": self.changed,
        }

    def line(self) -> str:
        """For people."""
        whose = f"{self.client} " if self.client else ""
        where = f"{whose}{self.path}, {self.status}"
        if not self.choices:
            outcome = "refused" if self.status >= 400 else "answered"
            why = "" if self.reason is None else f"; {self.reason}"
            return f"request {outcome}: {where} in {_milliseconds(self.seconds):g} ms{why}"
        told = self.fields()
        first = "no token" if told["first_token_ms"] is None else f"first token after {told['first_token_ms']:g} ms"
        queued = "" if told["queue_ms"] is None else f"queued {told['queue_ms']:g} ms, "
        cache = self.cache
        return (
            f"request {told['id'][:8]} {self.finish}: {self.prompt_tokens} prompt tokens, "
            + ("" if cache is None else f"restored {_restored_from(cache)}, computed {cache.computed}, ")
            + ("" if cache is None else f"published {cache.published}, ")
            + f"answered {told['generated']}; {where}, {self.model}; {queued}{first}, "
            + f"all {told['total_ms']:g} ms"
            + (f", drafts accepted {self.draft.accepted} of {self.draft.proposed}" if self.draft.proposed else "")
            + "".join(
                f"; {told[name]}" for name in ("reason", "miss", "changed", "not_published") if told[name] is not None
            )
        )


def _restored_from(cache: CacheReport) -> str:
    """Say "0 from device, 384 from RAM and 0 from disk"."""
    *others, last = (f"{tokens} from {SPELT.get(tier, tier)}" for tier, tokens in cache.restored_from.items())
    return f"{', '.join(others)} and {last}" if others else last


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 1)


Listener = Callable[[RequestRecord], None]


def write_line(record: RequestRecord) -> None:
    log.info("%s", record.line(), extra={"request": record.fields()})

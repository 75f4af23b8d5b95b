"""What is counted: for one request, and for all of them since the start."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from rekindle.engine.types import CacheReport, Timings


@dataclass(slots=True)
class Account:
    """One request's cache report and clock; times are seconds of a monotonic clock, 0 while not reached."""

    cache: CacheReport = field(default_factory=CacheReport)  # as of the first admission
    captured: set[int] = field(default_factory=set)  # positions whose snapshots a later request can restore
    unkept: dict[int, str] = field(default_factory=dict)  # positions whose snapshots it cannot, with the reasons
    sparse: bool = False  # attention left pages out while it ran
    submitted_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    first_token_at: float = 0.0

    @property
    def admitted(self) -> bool:
        return self.admitted_at > 0.0

    def note_token(self) -> None:
        if not self.first_token_at:
            self.first_token_at = time.monotonic()

    def lose(self, position: int, why: str) -> None:
        """No snapshot at this position, or none any more."""
        self.captured.discard(position)
        self.unkept[position] = why

    def report(self) -> CacheReport:
        """What was restored, computed and published, at the end."""
        reached, furthest = max(self.captured, default=0), max(self.unkept, default=0)
        return replace(
            self.cache,
            published=max(0, reached - self.cache.restored),
            not_published=self.unkept[furthest] if furthest > reached else None,
            sparse=self.sparse,
        )

    def timings(self, now: float) -> Timings:
        first = self.first_token_at or now
        admitted = self.admitted_at or now
        return Timings(queued=admitted - self.submitted_at, prefill=first - admitted, decode=now - first)


@dataclass(slots=True)
class Totals:
    """Tokens of all requests since the engine started."""

    computed: int = 0  # prompt tokens that ran through a forward
    restored: int = 0
    generated: int = 0

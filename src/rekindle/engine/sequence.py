"""One live request: its tokens, where it stands, and where it will be captured."""

from __future__ import annotations

import time
from bisect import insort
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from rekindle.engine.audit import Audit
from rekindle.engine.chunks import chunk_end
from rekindle.engine.sampler import needs_history
from rekindle.engine.types import CacheReport, Request, Sampling, Timings, TokenLogprob
from rekindle.prefix import Lookup
from rekindle.prompt import Boundary, BoundaryKind
from rekindle.snapshots.types import Snapshot, Stretch
from rekindle.spec import PAGE


class Phase(StrEnum):
    WAITING = "waiting"  # in line for a slot
    PREFILL = "prefill"  # prompt tokens left to run
    DECODE = "decode"  # one token at a time
    ENDING = "ending"  # the answer is out, a step that was handed over ahead is not back yet
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one request inside the engine.

    position  tokens that are in the state, or on their way into it in a batch that was handed to the pipeline
    settled   tokens whose forward has come back; equal to position when nothing is in flight
    In decode the last token is drawn but not in the state: position == len(tokens) - 1 between two steps.
    """

    request: Request
    tokens: list[int]
    max_tokens: int
    prefill_end: int  # tokens in the state before the next draw: the prompt, or after a loss the answer so far too
    phase: Phase = Phase.WAITING
    slot: int = -1
    position: int = 0
    settled: int = 0
    in_flight: int = 0
    cuts: list[int] = field(default_factory=list)
    kinds: dict[int, BoundaryKind] = field(default_factory=dict)
    stretches: list[Stretch] = field(default_factory=list)
    logits: torch.Tensor | None = None  # [vocab] after `settled` tokens, while they may still be needed
    parked: Snapshot | None = None  # all state, while the sequence was set aside for want of pages
    found: Lookup | None = None  # what the index knew, until it is restored: pages may be short
    loading: Future[Lookup] | None = None  # what the index knows, while it is being read from disk
    audit: Audit | None = None  # what this run is compared with; it restores and publishes nothing
    captured: int = 0  # the longest prefix that was captured for this request
    cancelled: bool = False
    sparse: bool = False  # pages were left out while it ran
    cache: CacheReport = field(default_factory=CacheReport)
    prompt_scores: list[TokenLogprob] = field(default_factory=list)  # of the prompt tokens behind the first
    prompt_told: bool = False
    promoted: bool = False  # background work that somebody waits for by now
    submitted_at: float = field(default_factory=time.monotonic)
    admitted_at: float = 0.0
    first_token_at: float = 0.0

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def background(self) -> bool:
        return self.request.background and not self.promoted

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt.tokens)

    @property
    def answer_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def prefill_left(self) -> int:
        return max(0, self.prefill_end - self.position)

    def start_over(self) -> None:
        """Its state is lost. The tokens given out stay given out; what must be in the state is run again."""
        self.phase = Phase.WAITING
        self.slot = -1
        self.position = self.settled = self.in_flight = 0
        self.prefill_end = len(self.tokens)
        self.logits = None
        self.stretches.clear()
        self.cuts.clear()
        self.kinds.clear()

    def add_boundary(self, boundary: Boundary) -> None:
        """Capture here too, if the run has not passed it."""
        if self.position < boundary.position <= self.prefill_end and boundary.position not in self.kinds:
            insort(self.cuts, boundary.position)
            self.kinds[boundary.position] = boundary.kind

    @property
    def may_run_ahead(self) -> bool:
        """Whether its next step can be handed over before the last one's token is known, and will be wanted."""
        left = self.max_tokens - self.answer_length - self.in_flight
        return left > 0 and not needs_history(self.sampling)

    def next_chunk_end(self, grid: int) -> int:
        return chunk_end(self.position, self.prefill_end, grid, self.cuts)

    def pages_needed(self, end: int) -> int:
        """Pages beyond those it has, before positions up to `end` can be stored."""
        return -(-end // PAGE) - -(-self.position // PAGE)

    def how(self, alone: bool) -> str:
        """In a manifest's words, how its next tokens are computed; "prefill", alone in its batch, repeats its bits."""
        if self.phase is not Phase.PREFILL:
            return "decode"
        return "prefill" if alone else "batched"

    def record(self, start: int, stop: int, how: str, grid: int) -> None:
        """Remember how [start, stop) was computed; a prefill edge off the grid is a cut."""
        last = self.stretches[-1] if self.stretches else None
        cut = (stop,) if how in ("prefill", "batched") and stop % grid else ()
        if last is not None and last.how == how and last.stop == start:
            self.stretches[-1] = Stretch(stop, how, last.cuts + cut)
        else:
            self.stretches.append(Stretch(stop, how, cut))

    def timings(self, now: float) -> Timings:
        first = self.first_token_at or now
        admitted = self.admitted_at or now
        return Timings(queued=admitted - self.submitted_at, prefill=first - admitted, decode=now - first)

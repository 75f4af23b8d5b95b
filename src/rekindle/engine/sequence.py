"""One live request: its tokens, its state, and the positions where it will be captured."""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Sequence as Sequential
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch

from rekindle.batch import Ask
from rekindle.engine.account import Account
from rekindle.engine.audit import Audit
from rekindle.engine.chunks import chunk_end
from rekindle.engine.drafting import Draft
from rekindle.engine.forcing import Forcing
from rekindle.engine.sampler import has_penalties
from rekindle.engine.state import Decoding, Ended, Ending, InSlot, Prefilling, State, Waiting, check_transition
from rekindle.engine.token_counts import TokenCounts
from rekindle.engine.types import Event, FinishReason, Request, Sampling, Token, TokenLogprob
from rekindle.grammar.guide import Guide
from rekindle.prompt import Boundary, BoundaryKind, ids_of
from rekindle.snapshots.types import Stretch
from rekindle.spec import PAGE

log = logging.getLogger("rekindle.engine")


class AnswerEnd(NamedTuple):
    reason: FinishReason
    stop_token: int | None = None
    stuck: str | None = None  # why the grammar could not go on


@dataclass(slots=True)
class Boundaries:
    """Positions where prefill chunks end off the grid, and why the state is captured there."""

    cuts: list[int] = field(default_factory=list)  # ascending
    kinds: dict[int, BoundaryKind] = field(default_factory=dict)  # by position; an audit has cuts without a kind

    def add(self, boundary: Boundary) -> None:
        if boundary.position not in self.kinds:
            insort(self.cuts, boundary.position)
            self.kinds[boundary.position] = boundary.kind

    def clear(self) -> None:
        self.cuts.clear()
        self.kinds.clear()


@dataclass(slots=True)
class PromptScores:
    """Log-probabilities of the prompt's tokens from the second on, for a request that asked for them."""

    rows: list[TokenLogprob] = field(default_factory=list)
    reported: bool = False  # the client has them: a prompt that runs again after a loss is not reported twice


@dataclass(slots=True, eq=False)
class Sequence:
    """One request inside the engine.

    position   tokens that are in the state, or on their way into it in a batch that was launched
    collected  tokens whose forward has come back; equal to position when nothing is in flight
    In decode the last token is known but not in the state: position == len(tokens) - 1 between two steps.
    A block to verify runs past the known tokens, and the state goes back to those that are accepted of it.
    """

    request: Request
    tokens: list[int]  # prompt and answer so far
    max_tokens: int
    prefill_end: int  # tokens in the state before the next draw: the prompt, or after a loss the answer so far too
    audit: Audit | None = None  # what this run is compared with; it restores and publishes nothing
    state: State = field(default_factory=Waiting)
    position: int = 0
    collected: int = 0
    in_flight: int = 0  # batches under way with a segment of it
    boundaries: Boundaries = field(default_factory=Boundaries)
    stretches: list[Stretch] = field(default_factory=list)  # how the state was computed, for the manifest
    logits: torch.Tensor | None = None  # [vocab] after `collected` tokens, while they may still be needed
    prompt_scores: PromptScores = field(default_factory=PromptScores)
    account: Account = field(default_factory=Account)
    draft: Draft = field(default_factory=Draft)
    forcing: Forcing = field(default_factory=Forcing)
    token_counts: TokenCounts = field(default_factory=TokenCounts)  # for penalties
    guide: Guide | None = None  # through the grammar that the answer keeps to; it stands after the last token
    verifying: bool = False  # a block of drafted tokens is in flight
    cancelled: bool = False  # ends at the next step that finds nothing of it in flight
    promoted: bool = False  # background work that a request of a client waits for
    ending: AnswerEnd | None = None  # its last token has gone out, and what is left is to say so
    late_capture: BoundaryKind | None = None  # of the prompt's end: it is taken when the last chunk comes back
    held: list[Token] | None = None  # that the client gets a moment later: the device is given its next step first
    _key: np.ndarray | None = None

    def become(self, state: State) -> None:
        """Only the roster calls this, so that line, slots and state agree."""
        check_transition(self.request.id, self.state, state)
        self.state = state

    @property
    def key(self) -> np.ndarray:
        """Its tokens as the index has them, int32, not to be written to: the prompt's, and those of the answer behind
        them when they are asked for. To read a long list takes half a millisecond."""
        key = self.request.prompt.key if self._key is None else self._key
        if len(key) < len(self.tokens):
            key = np.concatenate([key, ids_of(self.tokens[len(key) :])])
        self._key = key
        return key

    @property
    def slot(self) -> int:
        assert isinstance(self.state, InSlot), f"request {self.request.id} is {self.state} and has no slot"
        return self.state.slot

    @property
    def prefilling(self) -> bool:
        return isinstance(self.state, Prefilling)

    @property
    def decoding(self) -> bool:
        return isinstance(self.state, Decoding)

    @property
    def ended(self) -> bool:
        return isinstance(self.state, Ended)

    @property
    def answered(self) -> bool:
        """Whether the client has had its last event."""
        return isinstance(self.state, Ending | Ended)

    @property
    def sampling(self) -> Sampling:
        return self.request.sampling

    @property
    def namespace(self) -> str:
        return self.request.namespace

    @property
    def background(self) -> bool:
        return self.request.background and not self.promoted

    @property
    def scores_prompt(self) -> bool:
        return self.request.prompt_logprobs is not None

    @property
    def repeats_bits(self) -> bool:
        """Whether its chunks are alone in their steps: an audit compares them, and scores are those of a cold run."""
        return self.audit is not None or self.scores_prompt

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt.tokens)

    @property
    def answer_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def prefill_left(self) -> int:
        return max(0, self.prefill_end - self.position)

    @property
    def allows_async_step(self) -> bool:
        """Whether its next step can be launched before the token of the last one is known, and will be needed. What
        follows a block in flight is not known: its drafts may be refused."""
        left = self.max_tokens - self.answer_length - self.in_flight
        is_known = self.forcing.is_known(self.in_flight)
        return left > 0 and not self.verifying and is_known

    @property
    def may_draft(self) -> int:
        """Tokens that a block may hold beside the last known one: the target adds one of its own. A block ends where a
        token may be forced."""
        left, room = self.max_tokens - self.answer_length, self.forcing.room
        return (left if room is None else min(left, room)) - 1

    def forced_at(self, position: int) -> int | None:
        """The token that must stand there, if any; not all of those before it need be known."""
        return self.forcing.at(position - len(self.tokens))

    @property
    def waits_to_draft(self) -> bool:
        """Whether its next step has to wait for the tokens of the last one: a block is verified, or can be drafted."""
        return self.verifying or self.draft.expects(self.tokens, self.may_draft)

    def propose(self) -> tuple[int, ...]:
        """Tokens that may follow the known ones, while nothing of it is in flight."""
        drafted = self.draft.propose(self.tokens, self.may_draft) if self._knows_last else ()
        return self.admit(drafted)

    def admit(self, drafted: tuple[int, ...]) -> tuple[int, ...]:
        """Those of the drafted tokens that the grammar of its answer allows, up to the first that it does not."""
        return self.guide.admit(drafted) if self.guide is not None and drafted else drafted

    @property
    def verifies_unseen(self) -> bool:
        """Whether a step with it may verify blocks before the host knows their tokens: a grammar has to admit them, and
        penalties count them."""
        return self.guide is None and not has_penalties(self.sampling)

    def ask(self) -> Ask | None:
        """What it wants of the pipeline's drafter, if anything."""
        most = self.draft.asks_for(self.tokens, self.may_draft) if self._knows_last else 0
        return Ask(self.slot, self.position, self.tokens[-1], most) if most else None

    @property
    def _knows_last(self) -> bool:
        return self.in_flight == 0 and self.position == len(self.tokens) - 1

    def feature_rows(self, end: int, reach: int) -> int:
        """Last rows of a chunk up to `end` that a drafter has to read: it reads `reach` positions before those where
        the state is captured and where the prompt ends. An audit publishes nothing."""
        if self.audit is not None or not reach:
            return 0
        needed = min((at for at in self.boundaries.kinds if at >= end), default=self.prefill_end)
        return max(0, end - max(self.position, needed - reach))

    def stand_at(self, position: int, stretches: Sequential[Stretch] | None = None) -> None:
        """The state was restored there, and nothing is in flight. stretches: how it was computed, where another run
        did."""
        self.position = self.collected = position
        if stretches is not None:
            self.stretches = list(stretches)

    def start_over(self) -> None:
        """Its state is lost. Tokens that the client has stay; all of them run through a prefill again."""
        self.position = self.collected = self.in_flight = 0
        self.verifying = False
        self.prefill_end = len(self.tokens)
        self.logits = None
        self.late_capture = None
        self.token_counts = TokenCounts()
        self.stretches.clear()
        self.boundaries.clear()

    def add_boundary(self, boundary: Boundary) -> None:
        """Capture here too, if the run has not passed it."""
        if self.position < boundary.position <= self.prefill_end:
            self.boundaries.add(boundary)

    def next_chunk_end(self, grid: int, most: int | None = None) -> int:
        """On the grid or at a cut; before that at a multiple of `most`, if chunks are to be no longer than that."""
        end = chunk_end(self.position, self.prefill_end, grid, self.boundaries.cuts)
        return end if most is None else min(end, (self.position // most + 1) * most)

    def pages_needed(self, end: int) -> int:
        """Pages beyond those it has, before positions up to `end` can be stored."""
        return -(-end // PAGE) - -(-self.position // PAGE)

    def advance(self, end: int, alone: bool, grid: int) -> None:
        """A batch with its tokens [position, end) was launched; alone: no other sequence has rows in that batch."""
        self.in_flight += 1
        self.verifying = self.decoding and end - self.position > 1
        self._record(end, self._how(alone), grid)
        self.position = end

    def come_back(self, end: int) -> None:
        """A batch with its tokens up to `end` came back."""
        self.in_flight -= 1
        self.verifying = False
        self.collected = end

    def drop_flights(self) -> None:
        """The batches under way will not come back."""
        self.in_flight = 0

    def add_token(self, token: int) -> None:
        """The next token of the answer."""
        self.tokens.append(token)
        self.forcing.note(token)

    def cancel(self) -> None:
        self.cancelled = True

    def promote(self) -> None:
        """A request of a client waits for it: it is in the background no more."""
        self.promoted = True

    def go_back(self, position: int) -> None:
        """The stages went back into the last block, which reached further."""
        self.position = self.collected = position
        self.stretches[-1] = replace(self.stretches[-1], stop=position)

    def _how(self, alone: bool) -> str:
        """In a manifest's words, how its next tokens are computed; "prefill", alone in its batch, repeats its bits.
        Single rows between blocks count as blocks, else the manifest would have a line for each."""
        if self.prefilling:
            return "prefill" if alone else "batched"
        follows_block = bool(self.stretches) and self.stretches[-1].how == "verify"
        return "verify" if self.verifying or follows_block else "decode"

    def _record(self, end: int, how: str, grid: int) -> None:
        """Remember how [position, end) was computed; a prefill edge off the grid is a cut."""
        last = self.stretches[-1] if self.stretches else None
        cut = (end,) if how in ("prefill", "batched") and end % grid else ()
        if last is not None and last.how == how and last.stop == self.position:
            self.stretches[-1] = Stretch(end, how, last.cuts + cut)
        else:
            self.stretches.append(Stretch(end, how, cut))

    def emit(self, event: Event) -> None:
        """Give the client an event: a token after those that are held, others at once."""
        if self.held is not None and isinstance(event, Token):
            self.held.append(event)
            return
        self.let_go()
        self._give(event)

    def hold(self) -> None:
        """Keep its next tokens back until `let_go`, or until something else is to be said."""
        if self.held is None:
            self.held = []

    def let_go(self) -> None:
        held, self.held = self.held or (), None
        for token in held:
            self._give(token)

    def _give(self, event: Event) -> None:
        """A sink that raises cancels its own request and disturbs no other."""
        try:
            self.request.sink(event)
        except Exception:
            log.exception("the listener of request %s failed; the request is cancelled", self.request.id)
            self.cancel()

"""What a step brings back: the rows of prefill chunks, and the tokens accepted for each sequence."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

from rekindle.batch import Wanted
from rekindle.engine.account import Totals
from rekindle.engine.audit_runs import AuditRuns
from rekindle.engine.endings import Endings
from rekindle.engine.flight import Flight, Outcome, Result
from rekindle.engine.pace import Pace
from rekindle.engine.publisher import Publisher
from rekindle.engine.roster import Roster
from rekindle.engine.sampler import are_drawable, logprob_of, logprobs_of
from rekindle.engine.sequence import Sequence
from rekindle.engine.to_host import DrawnTokens
from rekindle.engine.types import FinishReason, PromptLogprobs, Token, TokenLogprob
from rekindle.errors import StageLost
from rekindle.grammar.guide import make_masks
from rekindle.speculative.cost import Costs
from rekindle.stages import Pipeline


class AnswerEnd(NamedTuple):
    reason: FinishReason
    stop_token: int | None = None
    stuck: str | None = None  # why the grammar could not go on


class Collector:
    def __init__(
        self,
        pipeline: Pipeline,
        flights: deque[Flight],
        roster: Roster,
        publisher: Publisher,
        audits: AuditRuns,
        endings: Endings,
        totals: Totals,
        pace: Pace | None,
        costs: Costs | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._flights = flights
        self._roster = roster
        self._publisher = publisher
        self._audits = audits
        self._endings = endings
        self._totals = totals
        self._pace = pace
        self._costs = costs  # of steps with and without drafts, where they are measured
        self._last_back = 0.0  # when the last flight came back, by a monotonic clock
        self._holding: tuple[Sequence, ...] = ()  # sequences whose tokens are held

    def collect(self) -> None:
        """The oldest flight's results, if one is under way. Raises StageLost if it was lost with a stage."""
        if self._flights:
            self._collect(self._flights.popleft())
        if self._flights:
            self._flights[0].enqueue_draw(self._pipeline.logits_device)

    def let_go(self) -> None:
        """Clients get the tokens that were held: the device has its next step by now."""
        for sequence in self._holding:
            sequence.let_go()
        self._holding = ()

    def collect_all(self) -> None:
        while self._flights:
            self.collect()

    def collect_first(self, sequence: Sequence, first: DrawnTokens | None) -> None:
        """The first token of a prompt that was restored whole: its logits were captured with it, no forward runs."""
        assert sequence.logits is not None, "a hit as long as the prompt brings its logits"
        if sequence.max_tokens == 0:
            self._endings.finish(sequence, FinishReason.LENGTH)
        else:
            assert first is not None, "the first token is drawn before the state is restored"
            ending = self._accept_token(sequence, *first.on_host())
            make_masks([] if sequence.guide is None else [sequence.guide])
            self._end_answer(sequence, ending or _end_of_grammar(sequence))

    def _collect(self, flight: Flight) -> None:
        error = flight.output.exception()
        if isinstance(error, StageLost):
            raise error
        if isinstance(error, Exception):
            self._endings.fail(flight.owners, error)
            return
        flight.draw()
        flight.wait()
        self._note_pace(flight)
        if flight.ahead is not None or self._next_waits:  # the device may stand still until the host has gone on
            self._holding += flight.owners
            for owner in flight.owners:
                owner.hold()
        skipping = flight.output.result().skipping
        for result in flight.results():
            result.owner.account.sparse |= result.segment.slot in skipping
            self._collect_rows(result)
        collected = [(outcome.owner, self._collect_tokens(outcome)) for outcome in flight.outcomes()]
        make_masks([owner.guide for owner, _ in collected if owner.guide is not None and owner.decoding])
        for sequence, ending in collected:  # an end is captured: no client waits for that of another one
            with self._endings.isolated(sequence):
                self._end_answer(sequence, ending or _end_of_grammar(sequence))

    @property
    def _next_waits(self) -> bool:
        """Whether the next flight's draws wait for the tokens of this one, and its forward is under way."""
        return bool(self._flights) and self._flights[0].waits

    def _note_pace(self, flight: Flight) -> None:
        """Flights follow one another on the device: each began when it was launched, or when the last came back."""
        launched, began = max(flight.launched, self._last_back), max(flight.began, self._last_back)
        self._last_back = time.monotonic()
        if self._costs is not None and all(owner.decoding for owner in flight.owners):
            seconds = self._last_back - launched
            if flight.ahead is not None:
                drafting = flight.ahead.seconds()
                self._costs.note_pass(flight.ahead.counts, drafting)
                seconds = max(0.0, seconds - drafting)
            self._costs.note_step(len(flight.owners), flight.batch.rows, seconds)
        if self._pace is not None:
            if flight.batch.rows == len(flight.batch.segments):
                self._pace.note_step(self._last_back - began)
            elif not flight.batch.rewindable:
                self._pace.note_chunk(flight.batch.rows, self._last_back - began)

    # Rows

    def _collect_rows(self, result: Result) -> None:
        segment, sequence, rows, _ = result
        sequence.come_back(segment.end)
        with self._endings.isolated(sequence):
            if sequence.prefilling:
                self._collect_chunk(result)
            if len(rows) and segment.end >= sequence.prefill_end:
                sequence.logits = rows[-1]
            if sequence.answered and not sequence.ended and sequence.in_flight == 0:
                self._endings.capture_answer(sequence)

    def _collect_chunk(self, result: Result) -> None:
        segment, sequence, rows, _ = result
        if sequence.audit is not None:
            if segment.end == sequence.prompt_length and not sequence.cancelled:
                self._audits.conclude(sequence, sequence.audit, rows[-1])
            return
        self._totals.computed += len(segment)
        if not _are_numbers(result):
            self._endings.fail_for_logits(sequence, segment.end)
            return
        if (kind := sequence.late_capture) is not None:
            sequence.late_capture = None
            self._publisher.capture(sequence, segment.end, kind)
        if len(rows) and segment.end in sequence.boundaries.kinds:
            self._publisher.give_logits(sequence, segment.end, rows[-1])
        if sequence.scores_prompt:
            self._score_prompt(result)
        if segment.end == sequence.prefill_end:
            self._end_prefill(result)

    def _end_prefill(self, result: Result) -> None:
        sequence = result.owner
        self._roster.decode(sequence)
        sequence.logits = result.rows[-1]
        if sequence.max_tokens == 0:
            self._endings.finish(sequence, FinishReason.LENGTH)

    def _score_prompt(self, result: Result) -> None:
        """Each row scores the prompt token that follows it. The client gets them once, when they are complete."""
        segment, sequence, *_ = result
        new = _scores_of(result)
        # new[i] is of the token at segment.position + 1 + i; those of a chunk that runs again are there already.
        scores, stop = sequence.prompt_scores, sequence.prompt_length - 1 - segment.position
        scores.rows += new[len(scores.rows) - segment.position : max(0, stop)]
        if segment.end == sequence.prefill_end and not scores.reported:
            scores.reported = True
            sequence.emit(PromptLogprobs((None, *scores.rows)))

    # Tokens

    def _collect_tokens(self, outcome: Outcome) -> AnswerEnd | None:
        """How the answer ends, if it does."""
        sequence = outcome.owner
        if sequence.decoding and not sequence.cancelled:
            with self._endings.isolated(sequence):
                if outcome.failure is not None:
                    raise outcome.failure
                return self._accept(outcome)
        return None

    def _accept(self, outcome: Outcome) -> AnswerEnd | None:
        """The step's tokens in order, up to the one that ends the answer; how it ends, if it does. The state goes back
        to before the last of them, so that nothing is captured which the answer does not hold."""
        sequence, taken, ending = outcome.owner, 0, None
        for row, token in zip(outcome.rows, outcome.accepted, strict=False):
            sequence.logits = row
            taken += 1
            ending = self._accept_token(sequence, token)
            if ending is not None or not sequence.decoding:
                break
        if sequence.decoding and outcome.segment.wanted is Wanted.ALL:
            self._close_block(outcome, taken)
        return ending

    def _close_block(self, outcome: Outcome, taken: int) -> None:
        """The answer has taken so many tokens of the block: that is how far the state goes, on every stage."""
        segment, sequence, agreed = outcome.segment, outcome.owner, len(outcome.accepted) - 1
        sequence.draft.note(len(sequence.tokens), len(segment) - 1, min(taken, agreed))
        if (position := segment.position + taken) < segment.end:
            self._pipeline.rewind(segment.slot, position)
            sequence.go_back(position)

    def _end_answer(self, sequence: Sequence, ending: AnswerEnd | None) -> None:
        if ending is not None:
            self._endings.finish(sequence, ending.reason, ending.stop_token, ending.stuck)

    def _accept_token(self, sequence: Sequence, token: int) -> AnswerEnd | None:
        """How the answer ends, if this token ends it."""
        request = sequence.request
        if token < 0:  # the sampler's word for logits that are no numbers
            self._endings.fail_for_logits(sequence, len(sequence.tokens))
            return None
        sequence.account.note_token()
        self._totals.generated += 1
        if token in request.stop_tokens and not request.ignore_stop_tokens:
            return AnswerEnd(FinishReason.STOP, token)
        sequence.add_token(token)
        sequence.emit(Token(token, _logprob(sequence, token)))
        if request.stop_when is not None and request.stop_when(token):
            return AnswerEnd(FinishReason.STOP)
        if sequence.guide is not None:
            sequence.guide.accept(token)
            if sequence.guide.stuck is not None:
                return _end_of_grammar(sequence)
        return AnswerEnd(FinishReason.LENGTH) if sequence.answer_length >= sequence.max_tokens else None


def _end_of_grammar(sequence: Sequence) -> AnswerEnd | None:
    """Where the grammar of its answer cannot go on."""
    if sequence.guide is None or sequence.guide.stuck is None or not sequence.decoding:
        return None
    return AnswerEnd(FinishReason.LENGTH, stuck=sequence.guide.stuck)


def _are_numbers(result: Result) -> bool:
    """Whether the rows can be drawn from and scored. Not asked if a token is drawn: the sampler returns -1 then."""
    _, sequence, rows, scores = result
    draws = sequence.max_tokens > 0 and not sequence.scores_prompt
    return draws or not len(rows) or (are_drawable(rows) and not bool(scores.isnan().any()))


def _scores_of(result: Result) -> list[TokenLogprob]:
    """Of the tokens that follow the segment's rows; after its last row comes the next chunk's first token."""
    segment, sequence, rows, scores = result
    found = logprobs_of(scores, segment.tokens[1:], segment.top)
    if segment.end < sequence.prompt_length:
        found.append(logprob_of(rows[-1], sequence.tokens[segment.end], segment.top))
    return found


def _logprob(sequence: Sequence, token: int) -> TokenLogprob | None:
    top, row = sequence.sampling.logprobs, sequence.logits
    return logprob_of(row, token, top) if top is not None and row is not None else None

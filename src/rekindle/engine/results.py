"""What a step brings back: the rows of prefill chunks, and the tokens accepted for each sequence."""

from __future__ import annotations

import time
from collections.abc import Sequence as Sequential

from rekindle.batch import Wanted
from rekindle.engine.account import Totals
from rekindle.engine.ahead import PassBehind
from rekindle.engine.audit_runs import AuditRuns
from rekindle.engine.endings import Endings
from rekindle.engine.flight import ChunkSection, Flight, Flights, Outcome, Result
from rekindle.engine.pace import Pace
from rekindle.engine.publisher import Publisher
from rekindle.engine.roster import Roster
from rekindle.engine.sampler import are_drawable, logprob_of, logprobs_of
from rekindle.engine.sequence import AnswerEnd, Sequence
from rekindle.engine.shared_pace import SharedPace
from rekindle.engine.to_host import DrawnTokens
from rekindle.engine.types import FinishReason, PromptLogprobs, Token, TokenLogprob
from rekindle.errors import StageLost
from rekindle.grammar.guide import make_masks
from rekindle.speculative.cost import Costs
from rekindle.stages import Pipeline
from rekindle.stages.layout import fills_its_step


class Collector:
    def __init__(
        self,
        pipeline: Pipeline,
        flights: Flights,
        roster: Roster,
        publisher: Publisher,
        audits: AuditRuns,
        endings: Endings,
        totals: Totals,
        pace: Pace | SharedPace | None,
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
        self._last_back = 0.0  # when the last flight came back, by a monotonic clock …
        self._was_over = False  # … or rather when somebody looked, since it was over before
        self._behind: PassBehind | None = (
            None  # launched behind the last flight: the next one waits for it, used or not
        )
        self._holding: tuple[Sequence, ...] = ()  # sequences whose tokens are held

    def collect(self) -> None:
        """The oldest flight's results, if one is under way. Raises StageLost if it was lost with a stage."""
        if self._flights:
            oldest = self._flights.popleft()
            self._pass(oldest) if isinstance(oldest, ChunkSection) else self._collect(oldest)
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
            sequence.ending = self._accept_token(sequence, *first.on_host())
            self._go_on([sequence])

    def _pass(self, section: ChunkSection) -> None:
        self._was_over = section.wait()
        began, self._last_back = max(section.began, self._last_back), time.monotonic()
        self._note_chunk(section, self._last_back - began, self._was_over)

    def _collect(self, flight: Flight) -> None:
        error = flight.output.exception()
        if isinstance(error, StageLost):
            raise error
        if isinstance(error, Exception):
            self._endings.fail(flight.owners, error)
            return
        flight.draw()
        was_over = flight.wait()
        self._note_pace(flight, was_over)
        if flight.ahead is not None or self._next_waits:  # the device may stand still until the host has gone on
            self._holding += flight.owners
            for owner in flight.owners:
                owner.hold()
        skipping = flight.output.result().skipping
        for result in flight.results():
            result.owner.account.sparse |= result.segment.slot in skipping
            self._collect_rows(result)
        for outcome in flight.outcomes():
            self._collect_tokens(outcome)
            self._note_behind(flight.behind, outcome)
        if any(owner.ending is not None or owner.late_capture is not None for owner in flight.owners):
            self.let_go()  # a capture may take longer than the step that the tokens are held for
        for result in flight.results():
            if _draws(result):
                with self._endings.isolated(result.owner):
                    self._give_logits(result)
            self._capture_late(result)
        self._go_on(flight.owners)

    def _go_on(self, sequences: Sequential[Sequence]) -> None:
        """Their tokens are out: masks for the next ones, and ends, which are captured. No token waits for either."""
        decoding = [sequence for sequence in sequences if sequence.decoding]
        make_masks([sequence.guide for sequence in decoding if sequence.guide is not None])
        for sequence in decoding:
            with self._endings.isolated(sequence):
                _note_grammar(sequence)
                if sequence.ending is not None:
                    self._endings.finish(sequence, *sequence.ending)

    @property
    def _next_waits(self) -> bool:
        """Whether the next flight's draws wait for the tokens of this one, and its forward is under way."""
        return bool(self._flights) and self._flights[0].waits

    def _note_pace(self, flight: Flight, was_over: bool) -> None:
        """Flights follow one another on the device: each began when it was launched, or when the last came back. What a
        block holds depends on what came back, so the device has stood still meanwhile, and that is the block's cost."""
        last, began = self._last_back, max(flight.began, self._last_back)
        launched = last if last and flight.batch.rows > len(flight.owners) else max(flight.launched, last)
        # Nobody knows when it began, if it was launched before and the last one was over before somebody looked.
        begin_known = flight.began >= last or not self._was_over
        self._last_back, self._was_over = time.monotonic(), was_over
        after_wasted, self._behind = self._behind is not None and not self._behind.used, flight.behind
        if flight.behind_chunk:
            return
        if self._costs is not None and not after_wasted and all(owner.decoding for owner in flight.owners):
            seconds = self._last_back - launched
            if flight.ahead is not None:
                drafting = flight.ahead.seconds()
                self._costs.note_pass(flight.ahead.counts, drafting)
                seconds = max(0.0, seconds - drafting)
            self._costs.note_step(len(flight.owners), flight.batch.rows, seconds)
        if self._pace is None or flight.batch.rewindable:
            return
        if isinstance(self._pace, SharedPace):
            chunks = sum(len(segment) for segment in flight.batch.segments if len(segment) > 1)
            self._pace.note(chunks, self._last_back - flight.launched)
        elif flight.batch.rows > len(flight.batch.segments):
            self._note_chunk(flight, self._last_back - began, was_over)
        elif begin_known:
            self._pace.note_step(self._last_back - began, at_most=was_over)

    def _note_chunk(self, chunk: Flight | ChunkSection, seconds: float, was_over: bool) -> None:
        """Of sections as of a whole; what the stage itself had run before has taken no time. A chunk with padding takes
        as long as the whole step that serves it, so it says nothing where it ran whole."""
        if isinstance(self._pace, Pace) and chunk.share and (chunk.share < 1 or fills_its_step(chunk.batch)):
            self._pace.note_chunk(chunk.batch.rows, seconds, chunk.share, at_most=was_over)

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
        if not _draws(result):
            self._give_logits(result)
        if sequence.scores_prompt:
            self._score_prompt(result)
        if segment.end == sequence.prefill_end:
            self._end_prefill(result)

    def _give_logits(self, result: Result) -> None:
        """To the capture at the chunk's end, if there is one."""
        segment, sequence, rows, _ = result
        captured = segment.end in sequence.boundaries.kinds and sequence.audit is None and not sequence.ended
        if captured and len(rows) and not _is_late(result):
            self._publisher.give_logits(sequence, segment.end, rows[-1])

    def _capture_late(self, result: Result) -> None:
        sequence, position, kind = result.owner, result.segment.end, result.owner.late_capture
        if kind is not None and _is_late(result):
            sequence.late_capture = None
            if sequence.decoding:
                with self._endings.isolated(sequence):
                    self._publisher.capture(sequence, position, kind)
                    self._publisher.give_logits(sequence, position, result.rows[-1])

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

    def _collect_tokens(self, outcome: Outcome) -> None:
        sequence = outcome.owner
        if sequence.decoding and not sequence.cancelled:
            with self._endings.isolated(sequence):
                if outcome.failure is not None:
                    raise outcome.failure
                self._accept(outcome)

    def _accept(self, outcome: Outcome) -> None:
        """The step's tokens in order, up to the one that ends the answer. The state goes back to before the last of
        them, so that nothing is captured which the answer does not hold."""
        sequence, taken = outcome.owner, 0
        for row, token in zip(outcome.rows, outcome.accepted, strict=False):
            sequence.logits = row
            taken += 1
            sequence.ending = self._accept_token(sequence, token)
            if sequence.ending is not None or not sequence.decoding:
                break
        if sequence.decoding and outcome.segment.wanted is Wanted.ALL:
            self._close_block(outcome, taken)

    def _close_block(self, outcome: Outcome, taken: int) -> None:
        """The answer has taken so many tokens of the block: that is how far the state goes, on every stage."""
        segment, sequence, agreed = outcome.segment, outcome.owner, len(outcome.accepted) - 1
        sequence.draft.note(len(sequence.tokens), len(segment) - 1, min(taken, agreed))
        if (position := segment.position + taken) < segment.end:
            self._pipeline.rewind(segment.slot, position)
            sequence.go_back(position)

    def _note_behind(self, behind: PassBehind | None, outcome: Outcome) -> None:
        """What follows the block was drafted as if the answer took all that the target and the drafter agree on, up to
        a token that ends it. Where it took less, as when its client has left, that pass was for nothing."""
        if behind is None:
            return
        segment, ends = outcome.segment, outcome.owner.request.ends
        taken = next((n for n, token in enumerate(outcome.accepted, 1) if token in ends), len(outcome.accepted))
        position = segment.position + taken
        agrees = outcome.owner.position == position
        if agrees:
            behind.note(position, outcome.accepted[taken - 1])
        self._pipeline.note_behind(segment.slot, position if agrees else None)

    def _accept_token(self, sequence: Sequence, token: int) -> AnswerEnd | None:
        """How the answer ends, if this token ends it."""
        request = sequence.request
        if token < 0:  # the sampler's word for logits that are no numbers
            self._endings.fail_for_logits(sequence, len(sequence.tokens))
            return None
        sequence.account.note_token()
        self._totals.generated += 1
        if token in request.ends:
            return AnswerEnd(FinishReason.STOP, token)
        sequence.add_token(token)
        sequence.emit(Token(token, _logprob(sequence, token)))
        if request.stop_when is not None and request.stop_when(token):
            return AnswerEnd(FinishReason.STOP)
        if sequence.guide is not None:
            sequence.guide.accept(token)
            if (stuck := sequence.guide.stuck) is not None:
                return AnswerEnd(FinishReason.LENGTH, stuck=stuck)
        return AnswerEnd(FinishReason.LENGTH) if sequence.answer_length >= sequence.max_tokens else None


def _draws(result: Result) -> bool:
    """Whether the prompt ends with it, and a token is drawn there, which waits for nothing else."""
    return result.segment.end == result.owner.prefill_end and result.owner.max_tokens > 0


def _is_late(result: Result) -> bool:
    """Whether the prompt ends with it, and the state there is yet to be captured."""
    return result.owner.late_capture is not None and result.segment.end == result.owner.prefill_end


def _note_grammar(sequence: Sequence) -> None:
    """An answer ends where its grammar cannot go on, and says so where its length ends it just there."""
    if sequence.guide is not None and (stuck := sequence.guide.stuck) is not None:
        ending = sequence.ending or AnswerEnd(FinishReason.LENGTH)
        sequence.ending = ending._replace(stuck=stuck) if ending.reason is FinishReason.LENGTH else ending


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

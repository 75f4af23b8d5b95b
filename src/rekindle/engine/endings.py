"""How a request ends: finished, failed or released, always with a last event and an empty slot."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from collections.abc import Sequence as Sequential
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from rekindle.engine.inbox import Inbox
from rekindle.engine.kept_slots import Kept
from rekindle.engine.loader import drop_lookup
from rekindle.engine.publisher import Publisher
from rekindle.engine.roster import Roster
from rekindle.engine.sequence import AnswerEnd, Sequence
from rekindle.engine.state import InSlot
from rekindle.engine.types import Failed, Finished, FinishReason
from rekindle.errors import BadLogits, RekindleError, StageLost
from rekindle.prompt import BoundaryKind
from rekindle.stages import Pipeline

log = logging.getLogger("rekindle.engine")


class Endings:
    def __init__(self, pipeline: Pipeline, publisher: Publisher, roster: Roster, inbox: Inbox) -> None:
        self._pipeline = pipeline
        self._publisher = publisher
        self._roster = roster
        self._inbox = inbox

    @contextmanager
    def isolated(self, sequence: Sequence) -> Iterator[None]:
        """What goes wrong for one row of a step ends that row's request and no other. A lost stage concerns all."""
        try:
            yield
        except StageLost:
            raise
        except Exception as error:
            self.fail([sequence], error)

    def finish(
        self, sequence: Sequence, reason: FinishReason, stop_token: int | None = None, stuck: str | None = None
    ) -> None:
        if sequence.answered:
            return
        completion_tokens = sequence.answer_length + (stop_token is not None)
        if sequence.in_flight:
            # The step that was launched before this one came back consumes the last token, even a stop token: it is
            # part of the state's key.
            self._roster.await_last_step(sequence)
            sequence.tokens += [stop_token] if stop_token is not None else []
        elif sequence.decoding and reason is not FinishReason.CANCELLED:
            try:
                self.capture_answer(sequence)
            except Exception:
                if sequence.ended:  # its slot is kept, and nobody else would tell its client
                    sequence.emit(_finished(sequence, AnswerEnd(reason, stop_token, stuck), completion_tokens))
                raise
        else:
            self.release_or_break(sequence)
        sequence.emit(_finished(sequence, AnswerEnd(reason, stop_token, stuck), completion_tokens))

    def say_end(self, sequence: Sequence) -> None:
        """Of an answer whose last token is out, where the state that would be captured is lost."""
        if sequence.ending is not None and not sequence.answered:
            completion_tokens = sequence.answer_length + (sequence.ending.stop_token is not None)
            self._roster.await_last_step(sequence)
            sequence.emit(_finished(sequence, sequence.ending, completion_tokens))

    def capture_answer(self, sequence: Sequence) -> None:
        """Capture the state after the answer, where a client that only appends goes on, and keep the slot, or release
        it where none is kept."""
        assert sequence.logits is not None, "a finished answer has the logits after its last token"
        self._publisher.capture(sequence, sequence.position, BoundaryKind.ANSWER, will_be_kept=self._roster.kept.is_on)
        if self._roster.kept.is_on:
            logits = self._publisher.bring(sequence.logits)
            self._publisher.give_logits(sequence, sequence.position, logits)
            self._keep(sequence, logits)
        else:
            self._publisher.give_logits(sequence, sequence.position, sequence.logits)
            self.release_or_break(sequence)

    def _keep(self, sequence: Sequence, logits: Future[torch.Tensor]) -> None:
        """What stands at the same tokens since before gives way to it, and so do the oldest if they take too much."""
        tokens = sequence.key[: sequence.position].copy()
        before = self._roster.kept.longest(tokens, sequence.namespace)
        kept = Kept(sequence.slot, tokens, sequence.namespace, tuple(sequence.stretches), logits)
        self._roster.keep(sequence, kept)
        if before is not None and before.position == kept.position:
            self._publisher.forget_owed(before.slot)  # it is the same state, and captured from the other slot
            self.give_up(before)
        while self._roster.kept.too_many:
            self.make_room()

    def make_room(self, sequence: Sequence | None = None) -> bool:
        """Give up a kept slot, for that sequence. False if none is kept."""
        victim = self._roster.kept.victim(sequence, self._roster.line)
        if victim is not None:
            self.give_up(victim)
        return victim is not None

    def give_up(self, kept: Kept) -> None:
        self._publisher.capture_kept(kept.slot)
        self.close_or_break(self._roster.give_up(kept))

    def give_up_kept(self) -> None:
        """All of them: what their slots hold is lost, or not to be trusted, or the engine ends."""
        while self.make_room():
            pass

    def cancel_marked(self) -> None:
        """End the requests that were cancelled and have nothing in flight."""
        for sequence in self._roster.everyone():
            if sequence.cancelled and sequence.in_flight == 0:
                self.finish(sequence, FinishReason.CANCELLED)

    def cancel_all(self) -> None:
        for sequence in self._roster.everyone():
            self.finish(sequence, FinishReason.CANCELLED)

    def fail(self, sequences: Sequential[Sequence], error: Exception) -> None:
        if not isinstance(error, RekindleError):
            log.error("a request failed", exc_info=error)
        for sequence in sequences:
            self.say_end(sequence)
            if not sequence.answered:
                sequence.emit(Failed(error))
            if not sequence.ended:
                self.release_or_break(sequence)

    def fail_for_logits(self, sequence: Sequence, position: int) -> None:
        """The sampler found no number in the logits after `position` tokens; a stage may know why."""
        elsewhere = "".join(f"; or the shard of {stage}, see its log" for stage in self._pipeline.elsewhere)
        error: Exception = BadLogits(
            f"the logits after {position} tokens are no numbers, so no token can be drawn or scored: "
            f"the weights are damaged, or a device is at fault{elsewhere}"
        )
        try:
            self._pipeline.poll_experts()
        except RekindleError as known:
            error = known
        log.error("request %s failed: %s", sequence.request.id, error)
        self.fail([sequence], error)

    def release(self, sequence: Sequence) -> None:
        """Out of the line or its slot, with all it held. Raises if a stage cannot close the slot."""
        if not sequence.account.admitted:
            self._inbox.count_out(sequence.request.namespace)
        former = self._roster.remove(sequence)
        drop_lookup(former)
        if isinstance(former, InSlot):
            self._publisher.forget_owed(former.slot)  # where it failed on its way into a kept slot
            self._pipeline.close(former.slot)

    def release_or_break(self, sequence: Sequence) -> None:
        """Release it; if a stage cannot close its slot the engine is broken, says so, and takes no more requests."""
        try:
            self.release(sequence)
        except Exception as error:
            self._break(error)

    def close_or_break(self, slot: int) -> None:
        try:
            self._pipeline.close(slot)
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        log.error("a slot could not be closed; the engine takes no more requests", exc_info=error)
        self._inbox.refuse_for_good(str(error))


def _finished(sequence: Sequence, ending: AnswerEnd, completion_tokens: int) -> Finished:
    return Finished(
        reason=ending.reason,
        stop_token=ending.stop_token,
        prompt_tokens=sequence.prompt_length,
        completion_tokens=completion_tokens,
        cache=sequence.account.report(),
        timings=sequence.account.timings(time.monotonic()),
        draft=sequence.draft.report(),
        stuck=ending.stuck,
    )

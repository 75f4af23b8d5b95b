"""A stage is lost, or a step fails: what is brought back, what runs again, what ends."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rekindle.engine.endings import Endings
from rekindle.engine.flight import Flights
from rekindle.engine.inbox import Inbox
from rekindle.engine.publisher import Publisher
from rekindle.engine.roster import Roster
from rekindle.engine.sequence import Sequence
from rekindle.errors import RekindleError, StageLost
from rekindle.stages import Pipeline

log = logging.getLogger("rekindle.engine")


class Recovery:
    def __init__(
        self,
        pipeline: Pipeline,
        flights: Flights,
        roster: Roster,
        publisher: Publisher,
        endings: Endings,
        inbox: Inbox,
    ) -> None:
        self._pipeline = pipeline
        self._flights = flights
        self._roster = roster
        self._publisher = publisher
        self._endings = endings
        self._inbox = inbox

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """The engine's loop goes on after whatever is raised inside."""
        try:
            try:
                yield
            except StageLost as error:
                self.recover_stage(error)
        except Exception as error:
            self.fail_everything(error)

    def recover_stage(self, error: StageLost) -> None:
        """A stage is gone, and with it a part of every live state: bring it back and run again what was lost."""
        self._flights.clear()
        if self._inbox.stopping:
            self.abandon_stage(error)
            return
        try:
            self._pipeline.recover()
            self._publisher.abandon()
            self._endings.give_up_kept()
        except Exception as failure:
            self._publisher.abandon()
            self._endings.give_up_kept()
            self._fail_for_good(error, failure)
            return
        running = self._roster.running
        log.warning("%s; its layers run again, %d requests go on from their newest snapshot", error, len(running))
        for sequence in sorted(running, key=lambda s: s.account.submitted_at, reverse=True):
            self._start_over(sequence)

    def abandon_stage(self, error: StageLost) -> None:
        """A stage was lost while the server stops, and is not needed again: every request ends as cancelled."""
        log.warning("%s; it is not brought back, since the server is stopping", error)
        self._publisher.abandon()
        for sequence in self._roster.running:
            sequence.drop_flights()
        self._endings.cancel_all()
        self._endings.give_up_kept()

    def fail_everything(self, error: Exception) -> None:
        log.error("the engine's step failed; ending the requests it held", exc_info=error)
        self._flights.clear()
        self._endings.fail(self._roster.everyone(), error)
        self._publisher.forget_owed()
        self._endings.give_up_kept()

    def _start_over(self, sequence: Sequence) -> None:
        self._endings.say_end(sequence)
        if sequence.answered:
            self._endings.release(sequence)
        else:
            self._pipeline.close(self._roster.start_over(sequence))

    def _fail_for_good(self, error: StageLost, failure: Exception) -> None:
        lost = StageLost(f"{error}; it could not be brought back: {failure}")
        log.error("%s", lost, exc_info=None if isinstance(failure, RekindleError) else failure)
        self._endings.fail(self._roster.everyone(), lost)

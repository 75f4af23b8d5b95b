"""Sequences from the line into free slots."""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager

from rekindle.engine.account import Totals
from rekindle.engine.endings import Endings
from rekindle.engine.inbox import Inbox
from rekindle.engine.restore import Placement, Postponed, Restored, Restorer
from rekindle.engine.results import Collector
from rekindle.engine.roster import Roster
from rekindle.engine.sequence import Sequence
from rekindle.engine.state import Loading
from rekindle.engine.to_host import DrawnTokens
from rekindle.engine.twins import Twins
from rekindle.engine.types import Started
from rekindle.errors import PoolFull, PromptTooLong, StageLost

Firsts = deque[tuple[Sequence, DrawnTokens | None]]  # prompts restored whole, and their first tokens on their way


class Admission:
    def __init__(
        self,
        roster: Roster,
        inbox: Inbox,
        restorer: Restorer,
        twins: Twins,
        collector: Collector,
        endings: Endings,
        totals: Totals,
        hurrying: AbstractContextManager[object],
    ) -> None:
        """hurrying: in which the token loop fills slots."""
        self._roster = roster
        self._inbox = inbox
        self._restorer = restorer
        self._twins = twins
        self._collector = collector
        self._endings = endings
        self._totals = totals
        self._hurrying = hurrying
        self._looked = set[str]()  # requests in line of which it is known whether a read has to begin
        self._short: Sequence | None = None  # whose turn it was when pages were short

    def enqueue(self, sequence: Sequence) -> None:
        """Background work gives up its slot to a client's request if no slot is free; its snapshots stay published."""
        self._roster.enqueue(sequence)
        background = self._roster.background
        if not sequence.background and not self._roster.slots_left and background:
            background[-1].cancel()

    def take_loaded(self, sequence: Sequence) -> None:
        """A loader thread has read its snapshot, or failed to."""
        try:
            self._restorer.take_loaded(sequence)
        except Exception as error:
            self._endings.fail([sequence], error)

    def ask_twins(self) -> None:
        """Before a prompt is launched: where others in line, that have slots, will part from it is a boundary."""
        for sequence in tuple(self._roster.line)[: self._roster.slots_left]:
            if not isinstance(sequence.state, Loading):
                self._twins.is_ahead_of(sequence)

    def admit(self, most: int | None = None) -> None:
        """Fill free slots, or so many of them at most. A first token is drawn behind the state of the prompt before,
        which travels for a while: the next prompt is handed over meanwhile."""
        firsts: Firsts = deque()
        self._read_ahead()
        self._fill_slots(firsts, most)
        self._collect(firsts, wait=True)

    def _read_ahead(self) -> None:
        """Of several in line, all reads from disk begin before the first slot is filled, which takes some
        milliseconds: readers would stand idle behind it."""
        if len(self._roster.line) < 2:
            self._looked.clear()
            return
        line = tuple(self._roster.line)[: self._roster.slots_left]
        self._looked &= {sequence.request.id for sequence in line}
        for sequence in line:
            if sequence is self._short:
                return  # nobody comes in before it
            if sequence.request.id in self._looked:
                continue
            with self._endings.isolated(sequence):
                needed = self._restorer.must_be_read(sequence)
                if needed and self._twins.is_ahead_of(sequence):
                    continue
                self._looked.add(sequence.request.id)
                if needed:
                    self._restorer.read(sequence)

    def _fill_slots(self, firsts: Firsts, most: int | None) -> None:
        """In order of the line. A sequence that waits for the disk keeps a slot free, and the next may go before it. A
        sequence that waits for a twin's prefix holds up its own name space only."""
        self._short = None
        reserved, held_up, enough = 0, set[str](), None if most is None else len(self._roster.running) + most
        for sequence in tuple(self._roster.line):
            if self._roster.slots_left == reserved:
                return
            if len(self._roster.running) == enough:
                # Read or not, it comes in before those behind it.
                reserved += not self._twins.is_ahead_of(sequence)
                continue
            if sequence.namespace in held_up:
                continue
            if sequence.background and not self._roster.only_background_runs:
                return
            if not isinstance(sequence.state, Loading):
                if self._twins.is_ahead_of(sequence):
                    held_up.add(sequence.namespace)
                    continue
                if self._place(sequence, firsts) is Postponed.PAGES_SHORT:
                    self._short = sequence
                    return
                self._collect(firsts, wait=False)
            reserved += isinstance(sequence.state, Loading)

    def _place(self, sequence: Sequence, firsts: Firsts) -> Placement | None:
        """Start it if its slot can be filled. None if it failed: only its own request ends."""
        try:
            with self._hurrying:
                placement = self._restore(sequence)
            if isinstance(placement, Restored):
                self._start(sequence, placement, firsts)
            return placement
        except StageLost:
            raise
        except Exception as error:
            self._put_back(sequence)
            self._endings.fail([sequence], error)
            return None

    def _restore(self, sequence: Sequence) -> Placement:
        others_run = bool(self._roster.running)
        try:
            return self._restorer.place(sequence, alone=not others_run)
        except StageLost:
            self._put_back(sequence)
            raise
        except PoolFull as error:
            if not others_run and not self._roster.kept:
                raise PromptTooLong(f"the KV pool cannot take the state to restore: {error}") from error
            self._put_back(sequence)
            return self._restore(sequence) if self._endings.make_room(sequence) else Postponed.PAGES_SHORT

    def _put_back(self, sequence: Sequence) -> None:
        """A slot that it took over holds a state still."""
        if (slot := self._roster.put_back(sequence)) is not None:
            self._endings.close_or_break(slot)

    def _start(self, sequence: Sequence, restored: Restored, firsts: Firsts) -> None:
        self._roster.start(sequence)
        if sequence.position == len(sequence.tokens):
            firsts.append((sequence, restored.first))
        else:
            self._say_start(sequence)

    def _collect(self, firsts: Firsts, wait: bool) -> None:
        """The tokens that are here, or all. A client is told of the start with its token: a wake-up for each would keep
        the interpreter's lock from this thread."""
        while firsts and (wait or (first := firsts[0][1]) is None or first.arrived):
            sequence, first = firsts.popleft()
            with self._endings.isolated(sequence):
                if first is not None:
                    first.wait()
                self._say_start(sequence)
                self._collector.collect_first(sequence, first)

    def _say_start(self, sequence: Sequence) -> None:
        if not sequence.account.admitted:
            sequence.account.admitted_at = time.monotonic()
            self._inbox.count_out(sequence.request.namespace)
            self._totals.restored += sequence.account.cache.restored
            sequence.emit(Started(sequence.account.cache))

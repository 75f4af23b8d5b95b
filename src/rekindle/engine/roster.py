"""All live sequences: the line of those that wait for a slot, and those that run in one.

The roster alone changes a sequence's state, so the state, the line, the slots and the scheduler's turns agree.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import Future

from rekindle.engine.kept_slots import Kept, KeptSlots
from rekindle.engine.scheduler import Scheduler
from rekindle.engine.sequence import Sequence
from rekindle.engine.state import (
    Decoding,
    Ended,
    Ending,
    InSlot,
    Loading,
    Preempted,
    Prefilling,
    Restoring,
    State,
    Waiting,
)
from rekindle.engine.token_counts import TokenCounts
from rekindle.prefix import Lookup
from rekindle.snapshots.types import Snapshot


class Roster:
    """Lives on the engine's thread."""

    def __init__(self, slots: int, scheduler: Scheduler, kept: KeptSlots) -> None:
        self.line: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.free_slots = list(range(slots - 1, -1, -1))
        self.kept = kept
        self._by_id: dict[str, Sequence] = {}
        self._scheduler = scheduler

    def everyone(self) -> list[Sequence]:
        return [*self.running, *self.line]

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def cancel(self, request_id: str) -> None:
        """An id that is not here has ended."""
        if (sequence := self._by_id.get(request_id)) is not None:
            sequence.cancel()

    def cancel_background(self) -> None:
        """The server stops, and no request will come for what background work prepares."""
        for sequence in self.everyone():
            if sequence.background:
                sequence.cancel()

    @property
    def slots_left(self) -> int:
        """That a sequence in line can get: free ones, and those that are kept until somebody needs them."""
        return len(self.free_slots) + len(self.kept)

    @property
    def background(self) -> list[Sequence]:
        return [sequence for sequence in self.running if sequence.background]

    @property
    def prefilling(self) -> Iterable[Sequence]:
        """In the order of their turns."""
        return self._scheduler.prefilling

    @property
    def only_background_runs(self) -> bool:
        return all(sequence.background for sequence in self.running)

    @property
    def may_admit(self) -> bool:
        """Whether a free slot is left for a request in line that does not wait for the disk."""
        loading = sum(isinstance(sequence.state, Loading) for sequence in self.line)
        return loading < min(len(self.line), self.slots_left)

    # In line

    def enqueue(self, sequence: Sequence) -> None:
        """Background work comes after all requests of clients."""
        self._by_id[sequence.request.id] = sequence
        place = len(self.line) if sequence.background else _place_in_line(sequence, self.line)
        self.line.insert(place, sequence)

    def load(self, sequence: Sequence, reading: Future[Lookup]) -> None:
        sequence.become(Loading(reading))

    def keep_found(self, sequence: Sequence, found: Lookup | None) -> None:
        """What the index answered, or None when that answer is not wanted any more."""
        sequence.become(Waiting(found))

    # Into a slot

    def take_slot(self, sequence: Sequence) -> int:
        """The slot that is to be filled with its state. It stays in line until it starts."""
        return self._enter(sequence, self.free_slots.pop())

    def take_over(self, sequence: Sequence, kept: Kept) -> int:
        """The slot that holds its state already."""
        self.kept.take(kept)
        return self._enter(sequence, kept.slot)

    def _enter(self, sequence: Sequence, slot: int) -> int:
        before = sequence.state
        assert isinstance(before, Waiting | Preempted), f"request {sequence.request.id} is {before}, not in line"
        sequence.become(Restoring(slot, before))
        return slot

    def put_back(self, sequence: Sequence) -> int | None:
        """Its slot, if it has taken one, could not be filled and is free again; the sequence kept its place in line."""
        if not isinstance(sequence.state, Restoring):
            return None
        slot = sequence.state.slot
        self.free_slots.append(slot)
        sequence.become(sequence.state.before)
        return slot

    def start(self, sequence: Sequence) -> None:
        """Its slot is filled."""
        sequence.become(Prefilling(sequence.slot) if sequence.prefill_left else Decoding(sequence.slot))
        self.line.remove(sequence)
        self.running.append(sequence)
        self._scheduler.add(sequence)

    def decode(self, sequence: Sequence) -> None:
        """The whole prompt is in the state."""
        self._scheduler.remove(sequence)
        sequence.become(Decoding(sequence.slot))

    # Out of a slot. Each returns the slot, which the pipeline has still to close.

    def preempt(self, sequence: Sequence, snapshot: Snapshot) -> int:
        """To the head of the line, with all its state beside it."""
        sequence.logits = None
        sequence.token_counts = TokenCounts()  # its memory is another's; it is counted anew
        return self._requeue(sequence, Preempted(snapshot))

    def start_over(self, sequence: Sequence) -> int:
        """To the head of the line, without a state: a stage was lost."""
        sequence.start_over()
        return self._requeue(sequence, Waiting())

    def _requeue(self, sequence: Sequence, state: Preempted | Waiting) -> int:
        slot = sequence.slot
        sequence.become(state)
        self._vacate(sequence, slot)
        self.line.appendleft(sequence)
        return slot

    def await_last_step(self, sequence: Sequence) -> None:
        """The client has its answer; the slot is held until the step that is in flight comes back."""
        sequence.become(Ending(sequence.slot))

    def remove(self, sequence: Sequence) -> State:
        """The sequence ends. Returns the state it was in, and with it what it held."""
        former = sequence.state
        sequence.become(Ended())
        if sequence in self.line:
            self.line.remove(sequence)
        if isinstance(former, InSlot):
            self._vacate(sequence, former.slot)
        self._by_id.pop(sequence.request.id, None)
        return former

    def keep(self, sequence: Sequence, kept: Kept) -> None:
        """The sequence ends, and its slot stays as it is."""
        assert sequence.slot == kept.slot, f"slot {kept.slot} is not that of request {sequence.request.id}"
        sequence.become(Ended())
        self._leave(sequence)
        self._by_id.pop(sequence.request.id, None)
        self.kept.add(kept)

    def give_up(self, kept: Kept) -> int:
        """Its slot is free, and has still to be closed."""
        self.kept.give_up(kept)
        self.free_slots.append(kept.slot)
        return kept.slot

    def _vacate(self, sequence: Sequence, slot: int) -> None:
        self._leave(sequence)
        self.free_slots.append(slot)

    def _leave(self, sequence: Sequence) -> None:
        self._scheduler.remove(sequence)
        if sequence in self.running:
            self.running.remove(sequence)


def _place_in_line(sequence: Sequence, line: Iterable[Sequence]) -> int:
    """Name spaces take turns, and requests of one name space keep their order: the n-th waiting request of one name
    space comes before the (n + 1)-th of any other, and all of them before background work."""
    waiting = [other for other in line if not other.background]
    ours = sum(other.namespace == sequence.namespace for other in waiting)
    met: Counter[str] = Counter()
    for place, other in enumerate(line):
        if other.background or met[other.namespace] > ours:
            return place
        met[other.namespace] += 1
    return len(waiting)

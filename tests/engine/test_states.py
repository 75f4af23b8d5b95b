"""A sequence stands in one state at a time; the table of state.py says which one may follow, the roster makes it so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import rekindle.engine
from rekindle.engine.kept_slots import KeptSlots
from rekindle.engine.roster import Roster
from rekindle.engine.scheduler import Scheduler
from rekindle.engine.sequence import Sequence
from rekindle.engine.state import LEGAL, Decoding, Ended, Ending, Prefilling, Restoring, State, Waiting
from rekindle.engine.types import Request, Sampling
from rekindle.prompt import Prompt


def sequence(name: str = "r", **changes: Any) -> Sequence:
    request = Request(name, Prompt((1, 2, 3)), Sampling(), 9, frozenset(), sink=lambda event: None, **changes)
    return Sequence(request, [1, 2, 3], 9, prefill_end=3)


@pytest.fixture
def roster() -> Roster:
    return Roster(2, Scheduler(64, depth=1, async_steps=0), KeptSlots(None))


def start(roster: Roster, one: Sequence) -> None:
    roster.enqueue(one)
    roster.take_slot(one)
    roster.start(one)


def test_every_state_that_is_not_the_end_may_end() -> None:
    assert all(Ended in after for state, after in LEGAL.items() if state is not Ended)
    assert LEGAL[Ended] == frozenset()


def test_every_state_can_be_reached_from_the_line() -> None:
    reached: set[type[State]] = {Waiting}
    while more := {after for state in reached for after in LEGAL[state]} - reached:
        reached |= more
    assert reached == set(LEGAL)


def test_an_illegal_transition_names_the_request_and_both_states() -> None:
    one = sequence("r7")
    with pytest.raises(AssertionError, match="request r7 is Waiting and cannot become Decoding"):
        one.become(Decoding(0))
    assert isinstance(one.state, Waiting)


def test_only_the_roster_changes_a_state() -> None:
    files = Path(*rekindle.engine.__path__).glob("*.py")
    callers = {file.name for file in files if ".become(" in file.read_text()}
    assert callers == {"roster.py"}


def test_a_slot_that_cannot_be_filled_is_free_again_and_the_place_in_line_is_kept(roster: Roster) -> None:
    first, second = sequence("a"), sequence("b")
    roster.enqueue(first)
    roster.enqueue(second)
    free, before = list(roster.free_slots), first.state
    slot = roster.take_slot(first)
    assert isinstance(first.state, Restoring)
    assert roster.put_back(first) == slot
    assert (roster.free_slots, first.state, list(roster.line)) == (free, before, [first, second])
    assert roster.put_back(first) is None


def test_line_slots_turns_and_state_agree_from_start_to_end(roster: Roster) -> None:
    one = sequence()
    start(roster, one)
    assert isinstance(one.state, Prefilling)
    assert (list(roster.line), roster.running, list(roster.prefilling)) == ([], [one], [one])
    roster.decode(one)
    assert (one.decoding, list(roster.prefilling)) == (True, [])
    roster.await_last_step(one)
    assert isinstance(roster.remove(one), Ending)
    assert (one.ended, roster.running, len(roster.free_slots), "r" in roster) == (True, [], 2, False)


def test_a_sequence_whose_stage_was_lost_goes_to_the_head_of_the_line(roster: Roster) -> None:
    one, other = sequence("a"), sequence("b")
    start(roster, one)
    roster.enqueue(other)
    one.tokens.append(4)
    one.position, one.in_flight = 3, 1
    roster.start_over(one)
    assert list(roster.line) == [one, other]
    assert (one.position, one.in_flight, one.prefill_end) == (0, 0, 4)


def test_an_ended_sequence_cannot_be_ended_again(roster: Roster) -> None:
    one = sequence()
    start(roster, one)
    roster.remove(one)
    with pytest.raises(AssertionError, match="cannot become Ended"):
        roster.remove(one)


def test_the_key_is_all_tokens_that_are_known_and_begins_as_the_prompts_own_array() -> None:
    one = sequence()
    assert one.key is one.request.prompt.key
    for length in (3, 4, 6):
        one.tokens += range(len(one.tokens), length)
        assert one.key.tolist() == one.tokens and one.key.dtype == "int32"

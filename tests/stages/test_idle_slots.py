"""The memory of slots in which no sequence lives holds pages: whoever has it, answers stay the same to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.lending_stages import WIDE, idle_of, lending_stage, poisoned, state_of
from support.stage_life import LONGEST, SLOTS, StageLife

from rekindle.batch import Batch, Segment, Wanted
from rekindle.errors import CopyFailed, PoolFull
from rekindle.pool.page_addresses import PageAddresses
from rekindle.snapshots.types import Page
from rekindle.stages import LocalStage


@pytest.fixture(scope="module")
def dense(make_tiny: Any) -> Any:
    """State of a slot that holds three places of pages."""
    return make_tiny("dense", **WIDE)


@pytest.fixture(scope="module")
def moe(make_tiny: Any) -> Any:
    return make_tiny("moe", moe_intermediate_size=256, **WIDE)


class Life(StageLife):
    """The first of the stages lends its slots."""

    def check(self) -> None:
        self.stages[0].check()
        for slot in range(SLOTS):
            assert (slot in idle_of(self.stages[0])) == (slot not in self.positions)


Move = tuple[str, int, int]  # what, for which slot, how much
KINDS = ["run", "run", "run", "run", "decode", "decode", "open", "restore", "rewind", "close", "close"]
MOVES = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, SLOTS - 1), st.integers(1, 200)), min_size=10, max_size=40
)


KINDS_OF_STAGE: dict[str, dict[str, Any]] = {
    "dense": {},
    "cold experts": {"lendable": 3},
    "only what fits the device": {"places": 30, "host_pages": 0},
    "recorded steps": {"table_width": 10, "record": lambda step, warm=None: (step(), step)[1]},
}


@pytest.fixture(scope="module", params=KINDS_OF_STAGE)
def pair(request: Any) -> list[LocalStage]:
    tiny = request.getfixturevalue("moe" if request.param == "cold experts" else "dense")
    options = {"places": 8, "host_pages": 22} | KINDS_OF_STAGE[request.param]
    return [poisoned(lending_stage(tiny, **options)), tiny.stage(slots=SLOTS, pages=30)]


@settings(max_examples=30, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(moves=MOVES)
def test_sequences_that_come_and_go_at_any_moment_change_no_bit(pair: list[LocalStage], moves: list[Move]) -> None:
    life = Life(pair)
    for kind, slot, count in moves:
        getattr(life, kind)(slot, count)
        life.check()
    life.compare()


def test_steps_are_recorded_where_that_is_asked_for(dense: Any) -> None:
    stage = lending_stage(dense, **KINDS_OF_STAGE["recorded steps"])
    stage.open(1)
    stage.forward(Batch((Segment(1, 0, (5,), Wanted.LAST),)), None)
    assert stage.work()["step:recorded"] == 1


def test_a_slots_places_lie_in_its_memory_and_nobody_elses(dense: Any) -> None:
    stage = lending_stage(dense)
    pool, idle = stage.pool, idle_of(stage)
    assert all(len(places) == 3 for places in idle._places)
    places = [*(place for its in idle._places for place in its), *pool._first_places, pool.scratch_page]
    pages = [place + layer for place in places for layer in range(len(pool.kv))]
    assert len(set(pages)) == len(pages), "two places share memory"
    padding = {address for tensor in state_of(stage, SLOTS) for address in (tensor.data_ptr(), end_of(tensor))}
    for slot, its in enumerate(idle._places):
        tensors = state_of(stage, slot)
        low, high = min(tensor.data_ptr() for tensor in tensors), max(map(end_of, tensors))
        for place in its:
            assert low <= pool.kv[0][place].data_ptr() and end_of(pool.kv[-1][place]) <= high
        assert not any(low < address < high for address in padding), "the padding slot is never lent"


def end_of(tensor: torch.Tensor) -> int:
    return tensor.data_ptr() + tensor.nbytes


def test_one_sequence_has_the_memory_of_the_others_until_they_come(dense: Any) -> None:
    stage, plain = poisoned(lending_stage(dense)), dense.stage(slots=SLOTS, pages=40)
    life = Life([stage, plain])
    life.run(0, LONGEST)
    assert stage.pool.away == 0, "ten pages lie in eight places and the memory of two slots"
    assert stage.paging().page_outs == 0
    life.open(1)
    assert stage.pool.away == 0, "pages move before any leaves"
    life.open(2)
    assert stage.pool.away == 2
    life.run(0, 1), life.run(2, 70)
    life.close(2), life.close(1)
    stage.close(1)
    stage.check()
    life.decode(0, 1)
    life.compare()


def test_so_they_do_where_the_device_finds_every_page_by_its_address(dense: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Page, "pinned", True)
    stage = poisoned(lending_stage(dense))
    stage.pool.addresses = PageAddresses(stage.pool.kv, stage.pool.total, stage.pool.total)
    life = Life([stage, dense.stage(slots=SLOTS, pages=40)])
    life.run(0, LONGEST - 70)
    for slot in (1, 2, 1, 2):
        life.open(slot)
        life.run(0, 17)
        life.run(slot, 70)
        life.check()
        life.close(slot)
    life.compare()


def test_places_in_slots_are_taken_last_also_after_they_were_used(dense: Any) -> None:
    stage = lending_stage(dense)
    life = Life([stage, dense.stage(slots=SLOTS, pages=40)])
    life.run(0, LONGEST)
    life.close(0)
    life.run(0, 8 * 64)
    lent = {place for its in idle_of(stage)._places for place in its}
    assert not lent & {page.place for page in stage._tables[0].pages}


def test_what_a_sequence_can_count_on_does_not_change_with_what_is_lent(dense: Any) -> None:
    stage = lending_stage(dense)
    counts = [stage.pages()]
    for slot in range(SLOTS):
        stage.open(slot)
        counts.append(stage.pages())
    assert {(count.free, count.total) for count in counts} == {(38, 38)}
    assert [count.at_once for count in counts] == [17, 14, 11, 8]
    assert {count.slot for count in counts} == {3}


def test_a_slot_whose_pages_cannot_leave_stays_lent_and_nobody_else_notices(dense: Any, monkeypatch: Any) -> None:
    stage, plain = poisoned(lending_stage(dense)), dense.stage(slots=SLOTS, pages=40)
    life = Life([stage, plain])
    life.run(0, LONGEST)
    life.open(1)
    with monkeypatch.context() as broken:
        broken.setattr(type(stage.pool), "_page_out", refuse)
        with pytest.raises(PoolFull, match="finds no room"):
            stage.open(2)
        stage.close(2)  # as whoever could not open it does
        stage.check()
        assert 2 in idle_of(stage)
    life.rewind(1, 9)
    life.compare()
    life.open(2)
    life.run(2, 65)
    life.compare()


def refuse(pool: Any, pages: Sequence[Any]) -> None:
    if pages:
        raise CopyFailed("no host memory")


def test_a_slot_that_is_not_open_can_neither_run_nor_be_captured(dense: Any) -> None:
    stage = lending_stage(dense)
    with pytest.raises(AssertionError, match="not open"):
        stage.forward(Batch((Segment(1, 0, (5,), Wanted.LAST),)), None)
    with pytest.raises(AssertionError, match="not open"):
        stage.capture(1)


def test_experts_are_lent_for_pages_only_that_idle_slots_do_not_take(moe: Any) -> None:
    stage, plain = poisoned(lending_stage(moe, lendable=3, places=4)), moe.stage(slots=SLOTS, pages=40)
    life, trade = Life([stage, plain]), stage._trade
    assert trade is not None
    life.run(0, 10 * 64)
    assert stage.pool.away == 0
    assert trade.lent == 0, "ten pages lie in four places and the memory of two slots"
    life.open(1)
    assert trade.lent > 0, "experts make room for the pages that lay in the slot"
    assert stage.paging().page_outs == 0
    life.run(1, 1)
    life.check()

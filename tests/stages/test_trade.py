"""Memory that expert slots and pages of KV share: whoever has it, answers stay the same to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.feeding import logits_after

from rekindle.batch import Batch, Segment, Wanted
from rekindle.experts import CostModel, ExpertSet, RoutingCounts, SpanExperts, Unit
from rekindle.kernels.device_memory import DeviceMemory, PagePlaces
from rekindle.layers import load_span
from rekindle.layers.base import page_shapes
from rekindle.pool.page_addresses import PageAddresses
from rekindle.snapshots.types import Page
from rekindle.stages import LocalStage, trader

LAYERS, EXPERTS, USED = 8, 8, 2  # of the tiny model
CPU = torch.device("cpu")
TOKENS = np.random.default_rng(5).integers(0, 320, 4096).tolist()
BRING = CostModel.same_memory()
ON_HOST = CostModel(pcie=1e-9, host_call=0, host_expert=0, host_pair=0, device_pair=0)


def shared_stage(
    tiny: Any, hot: int = 6, cache: int = 2, lendable: int = 3, places: int = 4, host_pages: int = 60, slots: int = 3,
    cost: CostModel = BRING, **options: Any,
) -> LocalStage:  # fmt: skip
    """A stage whose layers have `hot` hot experts, the slots of the last `lendable` of which can be lent."""
    file = tiny.open()
    shapes = page_shapes(file.spec, file.spec.whole, "f32")
    page_bytes = next(iter(shapes.values())).page_bytes
    memory = DeviceMemory(PagePlaces(page_bytes, len(shapes), places + 1), 1 << 24, CPU)
    counts = RoutingCounts(LAYERS, EXPERTS)
    hots = [list(range(hot))] * LAYERS
    plan = SpanExperts(hots, [cache] * LAYERS, counts, cost, lendable=[lendable] * LAYERS, memory=memory)
    model = load_span(file, file.spec.whole, CPU, torch.float32, experts=plan)
    return LocalStage(model, slots, places, "f32", host_pages, memory=memory, **options)


def feed(stage: LocalStage, slot: int, start: int, stop: int, step: int = 64) -> torch.Tensor:
    return torch.stack(logits_after(stage, TOKENS, slot, start, stop, step))


def check(stage: LocalStage) -> None:
    stage.check()
    for experts in sets_of(stage):
        experts._finish_arrival()
        experts.residency.check()


def sets_of(stage: LocalStage) -> list[ExpertSet]:
    return [ffn for ffn in stage.model.routed if isinstance(ffn, ExpertSet)]


@pytest.fixture(scope="module")
def tiny(make_tiny: Any) -> Any:
    """Experts wide enough to hold places of pages."""
    return make_tiny("moe", moe_intermediate_size=256)


def test_units_hold_places_in_the_memory_of_their_slots_and_nobody_elses(tiny: Any) -> None:
    stage = shared_stage(tiny)
    units, pool = units_of(stage), stage.pool
    assert len(units) >= LAYERS
    places = [*(place for unit in units for place in unit.places), *pool._first_places, pool.scratch_page]
    pages = [place + layer for place in places for layer in range(len(pool.kv))]
    assert len(set(pages)) == len(pages), "two places share memory"
    for unit in units:
        ranges = [(slots.data_ptr(), slots.data_ptr() + slots.nbytes) for slots in memory_of(unit)]
        for place in unit.places:
            first, last = pool.kv[0][place].data_ptr(), pool.kv[-1][place]
            assert any(low <= first and last.data_ptr() + last.nbytes <= high for low, high in ranges)


def units_of(stage: LocalStage) -> Sequence[Unit]:
    assert stage._trade is not None, "the stage shares memory"
    return cast(Sequence[Unit], stage._trade._units)


def memory_of(unit: Unit) -> list[torch.Tensor]:
    residency = unit.experts.residency
    first = residency.slots - len(residency.pinned)
    return [plane[first + unit.slots.start : first + unit.slots.stop] for plane in unit.experts.weights.slot_planes()]


class Whims:
    """Decides by what a test drew, not by what is worth more."""

    def __init__(self) -> None:
        self.want = 0

    def decide(self, *_: Any) -> int:
        return self.want


Move = tuple[str, int, int]  # what, for which sequence, how much


@st.composite
def lives(draw: Any) -> list[Move]:
    kinds = st.sampled_from(["run", "run", "run", "run", "lend", "lend", "restore", "rewind", "close", "swap"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 2), st.integers(1, 160)), min_size=8, max_size=30))


class Life:
    """The same moves on a stage whose memory changes hands and on one that has all it needs."""

    def __init__(self, stages: Sequence[LocalStage]) -> None:
        self.stages = stages
        self.positions = [0, 0, 0]
        self.began = [0, 0, 0]  # of the last rewindable segment

    def run(self, slot: int, count: int, rewindable: bool = False) -> None:
        at = self.positions[slot]
        count = min(count, 640 - at)
        if count < 1:
            return
        segment = Segment(slot, at, tuple(TOKENS[at : at + count]), Wanted.LAST)
        outs = [stage.forward(Batch((segment,), rewindable=rewindable), None).logits for stage in self.stages]
        assert torch.equal(outs[0], outs[1]), f"slot {slot} at {at}, {count} rows"
        self.began[slot], self.positions[slot] = at, at + count

    def lend(self, slot: int, count: int) -> None:
        whims = self.stages[0]._trade
        assert whims is not None
        whims._trader.want = count % (len(units_of(self.stages[0])) + 1)  # type: ignore[attr-defined]

    def restore(self, slot: int, count: int) -> None:
        """What one sequence holds goes on in another's slot, and from one kind of stage to the other."""
        to, position = count % 3, self.positions[slot]
        if position:
            parts = [stage.capture(slot) for stage in self.stages]
            for stage, those in zip(self.stages, reversed(parts), strict=True):
                stage.restore(to, position, those)
            self.positions[to] = self.began[to] = position

    def rewind(self, slot: int, count: int) -> None:
        before = self.positions[slot]
        self.run(slot, min(count, 12), rewindable=True)
        if self.positions[slot] > before:
            self.positions[slot] = before + (self.positions[slot] - before) // 2
            for stage in self.stages:
                stage.rewind(slot, self.positions[slot])

    def close(self, slot: int, count: int) -> None:
        for stage in self.stages:
            stage.close(slot)
        self.positions[slot] = 0

    def swap(self, slot: int, count: int) -> None:
        experts = sets_of(self.stages[0])[count % LAYERS]
        staying = experts.residency.staying
        away = [expert for expert in range(EXPERTS) if expert not in staying]
        if staying and away:
            experts.swap(staying[count % len(staying)], away[slot % len(away)])


@pytest.fixture(scope="module", params=[BRING, ON_HOST], ids=["by the cache", "on the host"])
def pair(request: Any, tiny: Any) -> list[LocalStage]:
    stage = shared_stage(tiny, places=8, host_pages=22, cost=request.param)
    stage._trade._trader = Whims()  # type: ignore[union-attr,assignment]
    return [stage, tiny.stage(slots=3, pages=30)]


@settings(max_examples=20, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(moves=lives())
def test_memory_that_changes_hands_at_any_moment_changes_no_bit(pair: list[LocalStage], moves: list[Move]) -> None:
    life = Life(pair)
    for slot in range(3):
        life.close(slot, 0)
    for kind, slot, count in moves:
        getattr(life, kind)(slot, count)
        check(pair[0])


def test_open_pages_move_and_sealed_ones_leave_when_their_places_go_back(pair: list[LocalStage]) -> None:
    grow_and_go_back(pair)


def test_so_they_do_where_the_device_finds_every_page_by_its_address(tiny: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Page, "pinned", True)
    stage = shared_stage(tiny, places=8, host_pages=22)
    stage.pool.addresses = PageAddresses(stage.pool.kv, stage.pool.total, stage.pool.total)
    stage._trade._trader = Whims()  # type: ignore[union-attr,assignment]
    grow_and_go_back([stage, tiny.stage(slots=3, pages=30)])


def grow_and_go_back(pair: list[LocalStage]) -> None:
    life, stage = Life(pair), pair[0]
    for slot in range(3):
        life.close(slot, 0)
    life.lend(0, len(units_of(stage)))
    for slot in range(3):
        for _ in range(4):
            life.run(slot, 150)
    lent = set(stage.pool._lent)
    opened = [table.pages[-1].place in lent for table in stage._tables]
    sealed = [page for table in stage._tables for page in table.pages[: table.sealed] if page.place in lent]
    assert any(opened)
    assert len(sealed) > stage.pool.places - len(lent), "more than there is room for"
    life.lend(0, 0)
    for slot in range(3):
        life.run(slot, 1)
    check(stage)
    assert not stage.pool._lent
    assert stage.pool.away > 0


def test_a_conversation_grows_into_the_experts_and_they_come_back_when_it_ends(tiny: Any) -> None:
    stage, plain = shared_stage(tiny), tiny.stage(slots=3, pages=64)
    assert torch.equal(feed(stage, 0, 0, 1000), feed(plain, 0, 0, 1000))
    trade = stage._trade
    assert trade is not None
    assert trade.lent > 0
    assert stage.pool.away == 0, "every page found a place"
    assert stage.paging().page_outs == 0, "and none had to leave for it"
    long = trade.lent
    stage.close(0)
    plain.close(0)
    for at in range(0, trader.PATIENCE + long + 2):
        assert torch.equal(feed(stage, 1, at, at + 1), feed(plain, 1, at, at + 1))
        assert trade.lent >= long - max(0, at - trader.PATIENCE) - 1, "no more than a unit per step"
        check(stage)
    assert trade.lent == 0
    assert all(None not in experts.residency.pinned for experts in sets_of(stage))
    assert stage.work()["pages:lent"] == stage.work()["pages:given back"] > 0


def test_there_is_room_for_a_snapshot_before_it_is_restored(tiny: Any) -> None:
    stage, plain = shared_stage(tiny), tiny.stage(slots=3, pages=64)
    feed(plain, 0, 0, 640)
    stage.restore(1, 640, plain.capture(0))
    assert stage.pool.away == 0
    assert torch.equal(feed(stage, 1, 640, 700), feed(plain, 0, 640, 700))
    check(stage)


def test_the_counted_routing_decides_what_a_slot_is_worth(tiny: Any) -> None:
    stage = shared_stage(tiny)
    unit = units_of(stage)[0]
    even = unit.link_bytes(1)
    unit.experts.counter.row[:] = [100, 100, 100, 0, 0, 0, 0, 0]
    assert unit.link_bytes(1) == 0 < even
    unit.experts.counter.row[:] = [1] * 8
    assert unit.link_bytes(1) == pytest.approx(even)
    assert unit.link_bytes(4) > even


def test_what_comes_back_are_the_experts_that_are_used_most(tiny: Any) -> None:
    stage = shared_stage(tiny)
    experts = sets_of(stage)[0]
    experts.lend(range(3))
    experts.counter.row[:] = [0, 0, 0, 1, 0, 5, 9, 7]
    experts.take_back(range(3))
    assert experts.residency.pinned == [6, 7, 5]
    check(stage)
    feed(stage, 0, 0, 64)
    check(stage)

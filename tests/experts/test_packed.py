"""Quantised experts, hot and cold, with the kernels in their interpreter: the same answer wherever the weights lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support.tape import record_on_tape

from rekindle import buffers
from rekindle.experts import planes
from rekindle.experts import triton as kernels
from rekindle.experts.cost import CostModel
from rekindle.experts.counts import LayerCounter, RoutingCounts
from rekindle.experts.expert_set import ExpertSet, Way
from rekindle.experts.lending import units_of
from rekindle.experts.packed import PackedWeights
from rekindle.experts.probe import measure_costs
from rekindle.experts.residency import Residency
from rekindle.experts.stored import StoredExperts, StoredPart
from rekindle.kernels.device_memory import DeviceMemory, PagePlaces
from rekindle.kernels.matmul.packing import FORMATS, pack, packed_bytes
from rekindle.kernels.matmul.types import Matrix
from rekindle.kernels.moe import ExpertStack, SharedExpert, moe, route
from rekindle.kernels.moe.bring import bring_part
from rekindle.layers.layer import launches_of
from rekindle.placement import LayerSizes, reserve

CPU = torch.device("cpu")
EXPERTS, HIDDEN, WIDTH, USED = 7, 256, 32, 2  # small: the interpreter takes milliseconds for every program
BRING = CostModel.same_memory()
ON_HOST = CostModel(pcie=1e-9, host_call=0, host_expert=0, host_pair=0, device_pair=0)


def random_rows(type: str, rows: int, columns: int, seed: int) -> np.ndarray:
    form = FORMATS[type]
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (rows * columns // form.weights, form.nbytes), dtype=np.uint8)
    for start in {"Q6_K": [208], "Q4_K": [0, 2]}.get(type, [0]):
        raw[:, start : start + 2] = random.uniform(1e-4, 5e-4, len(raw)).astype(np.float16)[:, None].view(np.uint8)
    return raw.reshape(rows, -1)


def part(type: str, rows: int, columns: int, seed: int) -> StoredPart:
    return StoredPart(random_rows(type, EXPERTS * rows, columns, seed), type, (EXPERTS, rows, columns))


def matrix(rows: int, columns: int, seed: int) -> Matrix:
    raw = torch.from_numpy(random_rows("Q8_0", rows, columns, seed))
    return Matrix((rows, columns), packed=pack(raw, "Q8_0", columns))


class Layer:
    """One layer, and what it gives with every expert on the device."""

    def __init__(self, up: str = "Q6_K") -> None:
        self.stored = StoredExperts(
            (part("Q4_K", WIDTH, HIDDEN, 1), part(up, WIDTH, HIDDEN, 2), part("Q8_0", HIDDEN, WIDTH, 3))
        )
        self.router = torch.randn(EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(4)) / 16
        self.shared = SharedExpert(
            matrix(WIDTH, HIDDEN, 5), matrix(WIDTH, HIDDEN, 6), matrix(HIDDEN, WIDTH, 7), torch.randn(HIDDEN) / 16
        )
        self.stacks = [
            ExpertStack(p.shape, packed=pack(torch.from_numpy(p.raw), p.type, p.shape[2])) for p in self.stored.parts
        ]

    def expected(self, h: torch.Tensor) -> torch.Tensor:
        ids, weights = route(h, self.router, USED)
        return moe(h, ids, weights, *self.stacks, self.shared)

    def cold(self, hot: list[int], cache_slots: int, cost: CostModel = BRING) -> ExpertSet:
        residency = Residency(hot, cache_slots, EXPERTS, CPU)
        weights = PackedWeights(self.stored, residency, CPU)
        counter = LayerCounter(RoutingCounts(1, EXPERTS), 0, CPU)
        return ExpertSet(self.router, USED, weights, residency, self.shared, cost, counter)


@pytest.fixture(autouse=True)
def _small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "STAGED_EXPERTS", 2)


@pytest.fixture(scope="module")
def layer() -> Layer:
    return Layer()


def drawn(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(seed))


def close(have: torch.Tensor, want: torch.Tensor) -> bool:
    return bool((have - want).norm() < 1e-5 * want.norm())


@pytest.mark.parametrize(
    ("rows", "cache_slots", "way"), [(3, 4, Way.CACHE), (5, 0, Way.STREAM), (7, 0, Way.STREAM), (28, 1, Way.STREAM)]
)
@pytest.mark.parametrize("hot", [[], [1, 4, 5]])
def test_cache_and_stream_give_what_all_hot_gives(
    layer: Layer, rows: int, cache_slots: int, way: Way, hot: list[int]
) -> None:
    experts = layer.cold(hot, cache_slots)
    assert experts.way(rows) is way
    h = drawn(rows, 0)
    poison(experts)
    assert close(experts.forward(h), layer.expected(h))
    experts.residency.check()


# Chunks through the staging area: their experts by the routing, all that are missing, and whole groups


def poison(experts: ExpertSet) -> None:
    """What lies in the staging area is not a number, as scales."""
    assert isinstance(experts.weights, PackedWeights)
    for stack in (stack for part in experts.weights.staging.parts for stack in part):
        for plane in stack.planes.planes:
            plane.view(torch.uint8).fill_(255)


STREAMS = {"chosen": 5, "all missing": 28, "whole groups": 7}  # rows, for each of them


def streaming(layer: Layer, how: str, pinned: Sequence[int] = (5, 0)) -> ExpertSet:
    if how == "whole groups":
        return layer.cold([2, 3, 6], 0)
    residency = Residency([2, 3], max(3, len(pinned)), EXPERTS, CPU, pinned)  # experts 1, 4 and 6 are missing
    weights = PackedWeights(layer.stored, residency, CPU)
    counter = LayerCounter(RoutingCounts(1, EXPERTS), 0, CPU)
    return ExpertSet(layer.router, USED, weights, residency, layer.shared, BRING, counter)


def set_of_lists(weights: PackedWeights) -> tuple[list[int], list[int]]:
    return weights._load.tolist(), weights._where.tolist()


def test_the_missing_stand_at_the_front_of_the_list_whatever_was_chosen_or_only_if_it_was(layer: Layer) -> None:
    experts = streaming(layer, "all missing")
    weights = experts.weights
    assert isinstance(weights, PackedWeights)
    assert experts.residency.table.tolist() == [4, -1, 0, 1, -1, 3, -1]
    weights._list_missing(torch.zeros(28, USED, dtype=torch.int32))  # one expert, which is there
    assert set_of_lists(weights) == ([1, 4, 6, -1, -1, -1], [4, 5, 0, 1, 6, 3, 7])
    weights._list_missing(torch.tensor([[6, 0], [2, 1], [1, 6]], dtype=torch.int32))
    assert set_of_lists(weights) == ([1, 6, -1, -1, -1, -1], [4, 5, 0, 1, -1, 3, 6])


def test_copies_follow_the_list_and_touch_no_slot_that_gets_nothing(layer: Layer) -> None:
    weights = streaming(layer, "all missing").weights
    assert isinstance(weights, PackedWeights)
    part = weights.staging.parts[1]
    for load in ([6, -1], [-1, 4], [-1, -1]):
        before = [[plane.clone() for plane in planes.by_expert(stack)] for stack in part]
        kernels.fetch_aside(weights._to_staging[1], torch.tensor(load, dtype=torch.int32), weights.places)
        for want, here, was in zip(layer.stacks, part, before, strict=True):
            for mine, slots, old in zip(planes.by_expert(want), planes.by_expert(here), was, strict=True):
                for slot, expert in enumerate(load):
                    assert torch.equal(slots[slot], old[slot] if expert < 0 else mine[expert])


@pytest.mark.parametrize("rows", [5, 28])
def test_a_chunk_whose_experts_are_all_there_brings_none(layer: Layer, rows: int) -> None:
    experts = streaming(layer, "all missing", pinned=[5, 0, 6, 1, 4])
    assert experts.way(rows) is Way.STREAM and experts.residency.table.ge(0).all()
    poison(experts)
    h = drawn(rows, 3)
    assert close(experts.forward(h), layer.expected(h))
    assert set(experts.weights._load.tolist()) == {-1}  # type: ignore[attr-defined]


@pytest.mark.parametrize("how", STREAMS)
def test_a_recorded_chunk_finds_its_experts_where_swaps_and_loans_have_left_them(layer: Layer, how: str) -> None:
    """Replayed without Python, as a graph is; where slots are lent, what another writes there reaches no answer."""
    rows = STREAMS[how]
    experts, h, out = streaming(layer, how), drawn(rows, 0), torch.empty(rows, HIDDEN)
    assert experts.way(rows) is Way.STREAM and experts.can_record(rows)

    def step() -> None:
        experts.begin(rows)
        out.copy_(experts.forward(h))

    replay = record_on_tape(step)
    tally = experts.counter.tally.sum()

    def check(seed: int) -> None:
        h.copy_(drawn(rows, seed))
        out.fill_(float("nan"))
        poison(experts)
        replay()
        assert close(out, layer.expected(h))
        assert torch.equal(out, experts.forward(h))

    check(1)
    assert experts.counter.tally.sum() == tally + 2 * rows * USED, "a replay counts what was chosen, too"
    experts.swap(2, 4)
    check(2)
    if experts.residency.pinned:
        experts.lend(range(2))
        lent = experts.residency.slots - 2
        for plane in experts.weights.slot_planes():
            plane[lent:].view(torch.uint8).fill_(255)
        check(3)
        experts.take_back(range(2))
        check(4)
        staying = experts.residency.staying
        experts.swap(staying[-1], next(expert for expert in range(EXPERTS) if expert not in staying))
        check(5)
    check_planes(layer, experts)


def test_layers_that_share_a_staging_area_take_turns_in_a_recorded_step(layer: Layer) -> None:
    first = streaming(layer, "all missing")
    assert isinstance(first.weights, PackedWeights)
    residency = Residency([0], 2, EXPERTS, CPU)
    weights = PackedWeights(layer.stored, residency, CPU, first.weights.staging)
    counter = LayerCounter(RoutingCounts(1, EXPERTS), 0, CPU)
    second = ExpertSet(layer.router, USED, weights, residency, layer.shared, BRING, counter)
    h, out = drawn(28, 0), torch.empty(28, HIDDEN)

    def step() -> None:
        for experts in (first, second):
            experts.begin(28)
        out.copy_(first.forward(h))
        out.add_(second.forward(h))

    replay = record_on_tape(step)
    first.swap(3, 6)
    second.swap(0, 5)
    replay()
    assert close(out, 2 * layer.expected(h))


@pytest.mark.parametrize("up", ["Q6_K", "Q4_K"], ids=["by group", "by pair"])
def test_a_cache_step_gives_the_very_bits_of_all_hot(up: str) -> None:
    """The same kernel reads the same planes, only from another slot."""
    layer = Layer(up)
    experts = layer.cold([2, 3], 2)
    h = drawn(1, 0)
    assert torch.equal(experts.forward(h), layer.expected(h))
    assert experts.can_record(1)


def test_the_host_gives_what_all_hot_gives_and_fills_the_cache(layer: Layer) -> None:
    experts = layer.cold([2, 3], 2, ON_HOST)
    for seed in range(2):
        h = drawn(3, seed)
        assert experts.way(3) is Way.HOST
        assert close(experts.forward(h), layer.expected(h))
    experts.poll(0)
    assert experts.residency.owner.ge(0).any()
    experts.residency.check()
    check_planes(layer, experts)


def test_swaps_move_the_planes_both_ways(layer: Layer) -> None:
    experts = layer.cold([0, 1, 2], 2)
    order: Any = np.random.default_rng(0)
    for _ in range(12):
        hot = experts.residency.hot
        cold = [expert for expert in range(EXPERTS) if expert not in hot]
        experts.swap(int(order.choice(hot)), int(order.choice(cold)))
    experts.residency.check()
    check_planes(layer, experts)
    for rows in (1, 17):
        h = drawn(rows, rows)
        assert close(experts.forward(h), layer.expected(h))
    check_planes(layer, experts)


def test_slots_that_were_another_s_hold_their_experts_again(layer: Layer) -> None:
    """What the pool writes there meanwhile is not a number as weights, and reaches no answer."""
    memory = DeviceMemory(PagePlaces(page_bytes=512, layers=2, count=3), 1 << 20, CPU)
    residency = Residency([2, 3], 5, EXPERTS, CPU, [5, 0, 6])
    weights = PackedWeights(layer.stored, residency, CPU, shared=memory)
    counter = LayerCounter(RoutingCounts(1, EXPERTS), 0, CPU)
    experts = ExpertSet(layer.router, USED, weights, residency, layer.shared, BRING, counter)
    check_planes(layer, experts)
    units = units_of([experts], memory)
    assert sum(len(unit.places) for unit in units) > 8
    run = memory.run.view(-1, 512)
    for unit in units:
        unit.lend()
        for place in unit.places:
            run[place : place + 2] = 255
        check_planes(layer, experts)
        for rows in (1, 5):
            assert close(experts.forward(drawn(rows, rows)), layer.expected(drawn(rows, rows)))
    for unit in reversed(units):
        unit.take_back()
        check_planes(layer, experts)
        experts.residency.check()
    assert None not in residency.pinned
    assert close(experts.forward(drawn(1, 0)), layer.expected(drawn(1, 0)))


def check_planes(layer: Layer, experts: ExpertSet) -> None:
    """Every slot and every host place holds the planes of the expert that the tables name there."""
    weights = experts.weights
    assert isinstance(weights, PackedWeights)
    places, table = weights.places.tolist(), experts.residency.table.tolist()
    assert [expert for expert, place in enumerate(places) if place < 0] == sorted(experts.residency.hot)
    assert sorted(place for place in places if place >= 0) == list(range(EXPERTS - len(experts.residency.hot)))
    for want, here, there in zip(layer.stacks, weights.stacks, weights.host_stacks, strict=True):
        for mine, slots, hosted in zip(*map(planes.by_expert, (want, here, there)), strict=True):
            for expert in range(EXPERTS):
                assert table[expert] < 0 or torch.equal(slots[table[expert]], mine[expert])
                assert places[expert] < 0 or torch.equal(hosted[places[expert]], mine[expert])


def test_planes_and_staging_take_the_bytes_that_the_plan_counts(layer: Layer) -> None:
    weights = layer.cold([0, 1], 2).weights
    assert isinstance(weights, PackedWeights)
    counted = [packed_bytes(part.type, part.shape[1] * part.shape[2]) for part in layer.stored.parts]
    expert = sum(size for size in counted if size is not None)
    assert weights.expert_bytes == expert
    staging = sum(stack.nbytes for half in weights.staging.parts for stack in half)
    assert staging == reserve.staging_bytes({0: LayerSizes(0, expert=expert, experts=EXPERTS)})


def test_costs_are_measured_without_touching_a_slot(layer: Layer) -> None:
    experts = layer.cold([0, 1], 2)
    weights = experts.weights
    assert isinstance(weights, PackedWeights)
    before = [plane.clone() for stack in weights.stacks for plane in stack.planes.planes]
    cost = measure_costs(weights, experts.residency, HIDDEN, torch.float32)
    after = [plane for stack in weights.stacks for plane in stack.planes.planes]
    assert all(map(torch.equal, before, after))
    assert cost.pcie > 0
    assert cost.host_expert >= 0
    assert min(cost.host_call, cost.host_pair, cost.device_pair) >= 0


def test_layers_that_differ_in_their_hot_experts_alone_launch_the_same_kernels(layer: Layer) -> None:
    some, others, smaller = (launches_of(layer.cold(*placed)) for placed in (([0, 1], 3), ([4, 2, 3], 3), ([0, 1], 2)))
    assert some == others != smaller, "a cache of another size is looked through by another kernel"
    assert some != launches_of(Layer("Q4_K").cold([0, 1], 3))


@triton.jit
def _bring_kernel(pieces, count, place, slot, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    bring_part(pieces, count, tl.program_id(0), place, slot, WORDS)


def test_the_programs_of_gate_and_up_bring_an_expert_whole_and_nothing_else() -> None:
    weights = PackedWeights(Layer().stored, Residency([2, 0], 3, EXPERTS, CPU), CPU)
    before = [[plane.clone() for plane in planes.by_expert(stack)] for stack in weights.stacks]
    parts = planes.make_parts(weights.host_stacks, weights.stacks, CPU)
    assert parts is not None
    programs, count, _ = parts.pieces.shape
    assert programs == WIDTH // 16
    _bring_kernel[(programs,)](parts.pieces, count, 4, 3, WORDS=parts.words)  # from place 4 to slot 3
    for stack, source, old in zip(weights.stacks, weights.host_stacks, before, strict=True):
        for here, there, was in zip(planes.by_expert(stack), planes.by_expert(source), old, strict=True):
            assert torch.equal(here[3], there[4])
            assert torch.equal(here[[0, 1, 2, 4]], was[[0, 1, 2, 4]])


def test_every_program_brings_the_very_rows_that_it_multiplies() -> None:
    weights = PackedWeights(Layer().stored, Residency([2, 0], 3, EXPERTS, CPU), CPU)
    parts = planes.make_parts(weights.host_stacks, weights.stacks, CPU)
    assert parts is not None
    _bring_kernel[(1,)](parts.pieces, parts.pieces.shape[1], 4, 3, WORDS=parts.words)  # the first program alone
    for stack, source in zip(weights.stacks[:2], weights.host_stacks[:2], strict=True):
        for here, there in zip(planes.by_expert(stack), planes.by_expert(source), strict=True):
            assert torch.equal(here[3, :16], there[4, :16])
            assert not here[3, 16:].any()

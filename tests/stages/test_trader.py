"""Where memory goes: to whoever saves the most bytes over the link, without to and fro; and what that gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.kernels.device_memory import slots_per_unit
from rekindle.placement import Device, LayerSizes, Machine, Plan, StagePlan, Wishes, card_named, known_shapes, make_plan
from rekindle.placement.expect import expected
from rekindle.placement.types import pages_for
from rekindle.stages.trader import PATIENCE, Trader

PAGE_BYTES = 1000
units_drawn = st.lists(st.integers(1, 30), max_size=12)
laws = settings(max_examples=200, deadline=None)


@st.composite
def markets(draw: st.DrawFn) -> tuple[Trader, list[float]]:
    """A trader and the costs of its units, the least first."""
    units = draw(units_drawn)
    costs = sorted(draw(st.lists(st.floats(0, 50 * PAGE_BYTES), min_size=len(units), max_size=len(units))))
    return Trader(draw(st.integers(0, 40)), units), costs


def settled(trader: Trader, pages: int, costs: Sequence[float]) -> int:
    """After as many decisions as it takes for all units to come back."""
    for _ in range(PATIENCE + 2 + len(costs)):
        trader.decide(pages, PAGE_BYTES, costs)
    return trader.lent


@laws
@given(markets(), st.integers(0, 400), st.integers(0, 400))
def test_longer_contexts_never_get_fewer_units(market: tuple[Trader, list[float]], pages: int, more: int) -> None:
    trader, costs = market
    other = Trader(trader._places[0], trader._units)
    assert settled(trader, pages, costs) <= settled(other, pages + more, costs)


@laws
@given(markets(), st.lists(st.integers(0, 400), max_size=8), st.integers(0, 400))
def test_with_equal_contexts_it_comes_to_rest(
    market: tuple[Trader, list[float]], before: list[int], pages: int
) -> None:
    trader, costs = market
    for each in before:
        settled(trader, each, costs)
    rest = settled(trader, pages, costs)
    assert [trader.decide(pages, PAGE_BYTES, costs) for _ in range(2 * PATIENCE)] == [rest] * 2 * PATIENCE


@laws
@given(markets(), st.integers(0, 400), st.floats(0.9, 1.1))
def test_costs_that_waver_a_little_move_nothing_to_and_fro(
    market: tuple[Trader, list[float]], pages: int, factor: float
) -> None:
    trader, costs = market
    other = [cost * factor for cost in costs]
    settled(trader, pages, costs)
    rest = settled(trader, pages, other)
    for _ in range(3):
        assert settled(trader, pages, costs) == rest
        assert settled(trader, pages, other) == rest


@laws
@given(markets(), st.integers(0, 400))
def test_free_memory_is_lent_at_once_and_comes_back_a_unit_at_a_time(
    market: tuple[Trader, list[float]], pages: int
) -> None:
    trader, costs = market
    free = [0.0] * len(costs)
    lent = trader.decide(pages, PAGE_BYTES, free)
    assert lent == len(trader._units) or trader._places[lent] >= pages
    assert lent == 0 or trader._places[lent - 1] < pages, "no unit more than the contexts need"
    seen = [trader.decide(0, PAGE_BYTES, free) for _ in range(PATIENCE + lent)]
    assert seen[:PATIENCE] == [lent] * PATIENCE
    assert seen[PATIENCE:] == list(range(lent - 1, -1, -1))


def test_a_sequence_at_the_edge_of_a_unit_keeps_it() -> None:
    """A drafter's block crosses the edge and is rewound, again and again."""
    trader = Trader(10, [5, 5])
    seen = [trader.decide(10 + step % 2, PAGE_BYTES, [500.0, 600.0]) for step in range(1, 4 * PATIENCE)]
    assert set(seen) == {1}


def test_experts_that_are_asked_for_more_than_pages_stay() -> None:
    trader = Trader(10, [5, 5])
    assert trader.decide(20, PAGE_BYTES, [3900.0, 4000.0]) == 1
    assert trader.decide(20, PAGE_BYTES, [1000.0, 6300.0]) == 1


# What it gives, by the speeds that a plan expects

GIB, KIB = 1 << 30, 1 << 10
Q4, Q6 = (512 * KIB, 64 * KIB, 16 * KIB), (512 * KIB, 256 * KIB, 64 * KIB, 16 * KIB)  # planes of 512 × 2048 weights
CONTEXT = 131_072
POOLS = (4096, 8192, 16_384, 24_576, 32_768, 49_152, 65_536, 98_304, CONTEXT)
SKEWS = {"uniform": 0.0, "skewed": 0.6}


@cache
def plan_of(budget: float, skew: float, pool: int | None = None) -> Plan:
    spec, sizes = known_shapes("35B-A3B", "Q4_K_M")
    counts = [[(rank + 1) ** -skew for rank in range(spec.ffn.experts)]] * spec.layers if skew else None
    machine = Machine((Device("cuda:0", "cuda", int(budget * GIB), rates=card_named("H200").rates),), 256 * GIB)
    wishes = Wishes(CONTEXT, sequences=16, chunk=2048, pool=pool, lends=pool is None, counts=counts)
    return make_plan(machine, spec, sizes, wishes)


def tokens_per_second(plan: Plan, context: int) -> float:
    found = expected(plan, known_shapes("35B-A3B", "Q4_K_M")[1], context)
    assert found is not None
    return found.tokens_per_second


def units_in(stage: StagePlan, layers: Sequence[LayerSizes]) -> list[tuple[int, int, int]]:
    """(layer, slots, places) of every unit, in the order in which they are lent, as the planes cut them."""
    by_layer = list[list[tuple[int, int, int]]]()
    for i, lendable in enumerate(stage.lendable):
        planes = (*Q4, *Q4, *(Q4 if layers[i].expert < 3 * sum(Q4) else Q6))
        assert sum(planes) == pytest.approx(layers[i].expert, rel=0.03), "stored blocks are a little smaller"
        each = slots_per_unit(planes, lendable, stage.page_bytes, 32) if lendable else 1
        places = sum(each * size // stage.page_bytes for size in planes)
        by_layer.append([(i, each, places)] * (lendable // each))
    deepest = max(map(len, by_layer))
    return [units[depth] for depth in range(deepest) for units in by_layer if depth < len(units)]


def traded(plan: Plan, context: int) -> Plan:
    """The plan with what the trader lends to one sequence of this length."""
    spec, sizes = known_shapes("35B-A3B", "Q4_K_M")
    (stage,) = plan.stages
    units = units_in(stage, sizes.layers)
    counts = plan.wishes.counts or [[1.0] * spec.ffn.experts] * spec.layers
    taken, costs = [0] * spec.layers, list[float]()
    for layer, slots, _ in units:
        row, end = counts[layer], len(stage.hot[layer]) + stage.expert_cache_slots[layer] - taken[layer]
        asked = sum(sorted(row, reverse=True)[end - slots : end]) * spec.ffn.used / sum(row)
        costs.append(asked * sizes.layers[layer].expert)
        taken[layer] += slots
    trader = Trader(stage.pool_pages, [places for *_, places in units])
    for _ in range(3):
        trader.decide(pages_for(context), stage.page_bytes, costs)
    hot = [list(ids) for ids in stage.hot]
    for layer, slots, _ in units[: trader.lent]:
        del hot[layer][-slots:]
    pages = stage.pool_pages + sum(places for *_, places in units[: trader.lent])
    return replace(
        plan, stages=(replace(stage, hot=tuple(map(tuple, hot)), pool_pages=pages, lendable=()),), wishes=plan.wishes
    )


@pytest.mark.parametrize("routing", SKEWS)
@pytest.mark.parametrize("budget", [22.1, 14.5])
@pytest.mark.parametrize("context", [1024, 16_384, 65_536, CONTEXT])
def test_decode_is_within_3_percent_of_the_best_fixed_pool_for_its_context(
    context: int, budget: float, routing: str
) -> None:
    skew = SKEWS[routing]
    speeds = {pool: tokens_per_second(plan_of(budget, skew, pool), context) for pool in POOLS}
    best = max(speeds, key=lambda pool: speeds[pool])
    plan = plan_of(budget, skew)
    got, said = tokens_per_second(traded(plan, context), context), tokens_per_second(plan, context)
    print(f"{got:.0f} tok/s; pool {best}: {speeds[best]:.0f}; {got / speeds[best]:.3f}; the plan says {said:.0f}")
    assert got >= 0.97 * speeds[best]
    assert said == pytest.approx(got, rel=0.03), "the plan foretells what the trade gives"

"""What a budget holds, against a walk along the list that anyone can check."""

from __future__ import annotations

from random import Random

from support.paper_machine import GIB, gpu, moe

from rekindle.placement import Machine, Wishes
from rekindle.placement.allocate import Allocation, Candidates, allocate
from rekindle.placement.place import Placer
from rekindle.placement.reserve import expert_layers
from rekindle.placement.types import LayerSizes
from rekindle.spec import Span


def walk(candidates: Candidates, room: int) -> Allocation | None:
    """Up to every expert: what lies behind the last one is for other tests."""
    pages, resident, met = candidates.least, dict.fromkeys(candidates.layers, 0), 0
    room -= pages * candidates.page_bytes
    if room < 0:
        return None
    for place, layer in enumerate(candidates.order):
        while pages < candidates.target and met >= candidates.page_bytes:
            if room < candidates.page_bytes:
                return Allocation(resident, pages)
            pages, room, met = pages + 1, room - candidates.page_bytes, met - candidates.page_bytes
        if room < candidates.layers[layer].expert:
            return Allocation(resident, pages)
        resident[layer] += 1
        room -= candidates.layers[layer].expert
        met += candidates.layers[layer].expert if place >= candidates.floor else 0
    return Allocation(resident, pages)


def some_candidates(dice: Random) -> Candidates:
    layers = {
        index: LayerSizes(mixer=1, expert=dice.choice((1, 7, dice.randint(1, 60))), experts=8)
        for index in range(3, 3 + dice.randint(0, 4))
    }
    order = [layer for layer in layers for _ in range(8)]
    dice.shuffle(order)
    least = dice.randint(1, 6)
    target = least + dice.choice((0, dice.randint(0, 30)))
    page = dice.choice((0, 1, 16, dice.randint(1, 80)))
    return Candidates(tuple(order), dice.randint(0, len(order)), layers, page, least, target, target, target)


def test_a_budget_holds_what_a_walk_along_the_list_does() -> None:
    short = 0
    for seed in range(2000):
        dice = Random(seed)
        candidates = some_candidates(dice)
        room = dice.randint(-1, candidates.expert_bytes + candidates.target * candidates.page_bytes)
        allocation, expected = allocate(candidates, room), walk(candidates, room)
        if expected is None or expected.leaves_cold(candidates):
            assert allocation == expected, f"dice {seed}"
            short += 1
        else:
            assert allocation is not None
            assert allocation.resident == expected.resident, f"dice {seed}"
            assert expected.pages <= allocation.pages <= candidates.target, f"dice {seed}"
    assert 500 < short < 1900, "both ends of the list are met"


def test_the_order_of_a_span_is_that_of_all_layers_whatever_was_asked_before() -> None:
    spec, sizes = moe(layers=6)
    dice = Random(5)
    counts = [[dice.randint(0, 50) for _ in range(spec.ffn.experts)] for _ in range(spec.layers)]
    placer = Placer(Machine((gpu(GIB),), 1 << 40), spec, sizes, Wishes(4096, counts=counts))
    for _ in range(200):
        start = dice.randrange(6)
        routed = expert_layers(sizes, Span(start, dice.randint(start + 1, 6)))
        assert placer.planner.order_of(routed) == tuple(layer for layer in placer.planner.order if layer in routed)

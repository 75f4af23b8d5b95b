"""What a budget buys, against a walk along the list that anyone can check."""

from __future__ import annotations

from random import Random

from rekindle.placement import Machine, Wishes
from rekindle.placement.buy import Bought, Shelf, buy
from rekindle.placement.place import Placer
from rekindle.placement.reserve import expert_layers
from rekindle.placement.types import LayerSizes
from rekindle.spec import Span

from .paper import GIB, gpu, moe


def walk(shelf: Shelf, room: int) -> Bought | None:
    """Up to every expert: what lies behind the last one is for other tests."""
    pages, resident, met = shelf.least, dict.fromkeys(shelf.layers, 0), 0
    room -= pages * shelf.page_bytes
    if room < 0:
        return None
    for place, layer in enumerate(shelf.order):
        while pages < shelf.target and met >= shelf.page_bytes:
            if room < shelf.page_bytes:
                return Bought(resident, pages)
            pages, room, met = pages + 1, room - shelf.page_bytes, met - shelf.page_bytes
        if room < shelf.layers[layer].expert:
            return Bought(resident, pages)
        resident[layer] += 1
        room -= shelf.layers[layer].expert
        met += shelf.layers[layer].expert if place >= shelf.floor else 0
    return Bought(resident, pages)


def a_shelf(dice: Random) -> Shelf:
    layers = {
        index: LayerSizes(mixer=1, expert=dice.choice((1, 7, dice.randint(1, 60))), experts=8)
        for index in range(3, 3 + dice.randint(0, 4))
    }
    order = [layer for layer in layers for _ in range(8)]
    dice.shuffle(order)
    least = dice.randint(1, 6)
    target = least + dice.choice((0, dice.randint(0, 30)))
    page = dice.choice((0, 1, 16, dice.randint(1, 80)))
    return Shelf(tuple(order), dice.randint(0, len(order)), layers, page, least, target, target, target)


def test_a_budget_buys_what_a_walk_along_the_list_does() -> None:
    short = 0
    for seed in range(2000):
        dice = Random(seed)
        shelf = a_shelf(dice)
        room = dice.randint(-1, shelf.expert_bytes + shelf.target * shelf.page_bytes)
        bought, expected = buy(shelf, room), walk(shelf, room)
        if expected is None or expected.leaves_cold(shelf):
            assert bought == expected, f"dice {seed}"
            short += 1
        else:
            assert bought is not None
            assert bought.resident == expected.resident, f"dice {seed}"
            assert expected.pages <= bought.pages <= shelf.target, f"dice {seed}"
    assert 500 < short < 1900, "both ends of the list are met"


def test_the_order_of_a_span_is_that_of_all_layers_whatever_was_asked_before() -> None:
    spec, sizes = moe(layers=6)
    dice = Random(5)
    counts = [[dice.randint(0, 50) for _ in range(spec.ffn.experts)] for _ in range(spec.layers)]
    placer = Placer(Machine((gpu(GIB),), 1 << 40), spec, sizes, Wishes(4096, counts=counts))
    for _ in range(200):
        start = dice.randrange(6)
        routed = expert_layers(sizes, Span(start, dice.randint(start + 1, 6)))
        assert placer._order_of(routed) == tuple(layer for layer in placer._order if layer in routed)

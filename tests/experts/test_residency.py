"""Which expert is in which slot: the cache takes in what is used, evicts the oldest, and loses no expert."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rekindle.experts import triton as on_device
from rekindle.experts.residency import Residency
from rekindle.kernels.moe import route

CPU = torch.device("cpu")
EXPERTS = 12


def tensor(*ids: int) -> torch.Tensor:
    return torch.tensor([ids], dtype=torch.int32)


def tally() -> torch.Tensor:
    return torch.zeros(EXPERTS, dtype=torch.int32)


def test_a_miss_takes_the_oldest_slot_and_a_hit_makes_young() -> None:
    residency = Residency([7], 2, EXPERTS, CPU)
    counted = tally()
    slots, load = residency.admit(tensor(7, 3), counted)
    assert (slots.tolist(), load.tolist()) == ([[0, 1]], [3, -1])
    slots, load = residency.admit(tensor(4, 7), counted)
    assert (slots.tolist(), load.tolist()) == ([[2, 0]], [-1, 4])
    slots, load = residency.admit(tensor(3, 3), counted)  # a hit: 4 is now the oldest
    assert (slots.tolist(), load.tolist()) == ([[1, 1]], [-1, -1])
    slots, load = residency.admit(tensor(5, 7), counted)
    assert (slots.tolist(), load.tolist()) == ([[2, 0]], [-1, 5])
    assert residency.table[4] == -1
    assert counted.tolist() == [0, 0, 0, 3, 1, 1, 0, 3, 0, 0, 0, 0]
    residency.check()


def test_an_expert_needed_now_is_never_the_one_that_leaves() -> None:
    residency = Residency([], 3, EXPERTS, CPU)
    residency.admit(tensor(0, 1, 2), tally())
    slots, load = residency.admit(tensor(2, 5, 6), tally())
    assert slots.tolist() == [[2, 0, 1]]
    assert load.tolist() == [5, 6, -1]
    residency.check()


def test_the_share_of_the_missing_that_is_left_to_the_cpu_takes_turns() -> None:
    residency = Residency([0], 4, EXPERTS, CPU)
    left = set()
    for _ in range(4):
        slots, load = residency.admit(tensor(0, 1, 2, 3), tally(), torch.tensor([0, 0, 0, 1]))
        away = [expert for expert, slot in zip((0, 1, 2, 3), slots[0].tolist(), strict=True) if slot < 0]
        assert len(away) == 1
        assert sorted(load[load >= 0].tolist() + away) == [1, 2, 3]
        left.update(away)
        residency.owner.fill_(-1)
        residency.table[1:] = -1
    assert left == {1, 2, 3}


def test_a_swap_frees_the_cache_slot_of_the_one_that_became_hot() -> None:
    residency = Residency([0, 1], 2, EXPERTS, CPU)
    residency.admit(tensor(8, 9), tally())
    assert residency.swap(goes=1, comes=8) == 1
    assert residency.table[[0, 1, 8, 9]].tolist() == [0, -1, 1, 3]
    assert residency.owner.tolist() == [-1, 9]
    residency.check()
    _, load = residency.admit(tensor(5, 9), tally())
    assert load.tolist() == [5, -1]


def test_what_is_pinned_stays_however_long_it_was_not_used() -> None:
    residency = Residency([7], 4, EXPERTS, CPU, [1, 2])
    for expert in (3, 4, 5, 6, 3):
        residency.admit(tensor(expert, 7), tally())
        residency.check()
    assert residency.table[[1, 2]].tolist() == [3, 4]
    slots, load = residency.admit(tensor(1, 2), tally())
    assert (slots.tolist(), load.tolist()) == ([[3, 4]], [-1] * 4)
    residency.check()


def test_a_lent_slot_is_nobodys_until_it_comes_back() -> None:
    residency = Residency([7], 4, EXPERTS, CPU, [1, 2])
    residency.lend(range(1, 2))
    assert residency.table[2] == -1
    for expert in (3, 4, 5, 2, 6):
        slots, load = residency.admit(tensor(expert), tally())
        assert slots.max() < 4
        assert load[3] == -1
        residency.check()
    residency.make_room(tensor(9, 9))
    assert residency.used_at.argmin() < 2
    load = residency.pin(range(1, 2), [6])  # which the cache had: its copy there is given up
    assert load.tolist() == [-1, -1, -1, 6]
    assert residency.table[6] == 4
    residency.check()


def test_a_newcomer_is_named_only_after_it_has_arrived() -> None:
    residency = Residency([0], 2, EXPERTS, CPU)
    load = residency.make_room(tensor(4, 4, 0, 3))
    assert load.tolist() == [4, -1]
    assert residency.table[4] == -1
    residency.finish_loading(load)
    assert residency.table[4] == 1
    residency.check()
    assert residency.make_room(tensor(0, 4)).tolist() == [-1, -1]  # nothing is missing, so nobody leaves
    assert residency.table[4] == 1


def test_more_pairs_than_cache_slots_are_refused() -> None:
    with pytest.raises(AssertionError, match="3 pairs may need more slots than the cache's 2"):
        Residency([], 2, EXPERTS, CPU).admit(tensor(1, 2, 3), tally())


steps = st.lists(st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=6), min_size=1, max_size=8)


@settings(max_examples=40, deadline=None)
@given(
    st.sets(st.integers(0, EXPERTS - 1), max_size=5),
    st.integers(1, 7),
    steps,
    st.none() | st.tuples(*(st.integers(0, missing) for missing in range(7))),
    st.sampled_from([0, 2**31 - 3]),  # after a month a step has more than 32 bits
    st.sets(st.integers(0, EXPERTS - 1), max_size=4),
    st.integers(0, 4),
)
def test_the_kernel_does_what_the_definition_says(
    hot: set[int], cache_slots: int, asked: list[list[int]], table: tuple[int, ...] | None, step: int, pinned: set[int],
    lent: int,
) -> None:  # fmt: skip
    takes = None if table is None else torch.tensor(table, dtype=torch.int32)
    staying = sorted(pinned - hot)
    cache_slots = max(1, min(cache_slots, EXPERTS - len(hot | pinned)))
    slots_in_all = min(cache_slots + len(staying), EXPERTS - len(hot))
    cache_slots = slots_in_all - len(staying)
    plain, fast = (Residency(sorted(hot), slots_in_all, EXPERTS, CPU, staying) for _ in range(2))
    for each in (plain, fast):
        each.step.fill_(step)
        each.lend(range(max(0, len(staying) - lent), len(staying)))
    counted, counted_fast = tally(), tally()
    for ids in asked if cache_slots else ():
        some = tensor(*ids[:cache_slots])
        slots, load = plain.admit(some, counted, takes)
        slots_fast, load_fast = on_device.admit(fast, some, counted_fast, takes)
        names = ("slots", "load", "table", "owner", "used_at", "step", "tally")
        pairs: Any = zip(
            (slots, load, plain.table, plain.owner, plain.used_at, plain.step, counted),
            (slots_fast, load_fast, fast.table, fast.owner, fast.used_at, fast.step, counted_fast),
            strict=True,
        )
        for name, (want, have) in zip(names, pairs, strict=True):
            assert torch.equal(want, have), f"{name}: {want.tolist()} against {have.tolist()}"
        plain.check()
        assert int(plain.step) > step
        assert sorted(plain.table[some[0].long()].tolist()) == sorted(slots.flatten().tolist())


def test_a_row_that_is_chosen_and_admitted_in_one_launch_finds_the_same() -> None:
    used, hidden, hot = 3, 32, [2, 9, 4]
    plain, fast = (Residency(hot, 5, EXPERTS, CPU) for _ in range(2))
    router = torch.randn(EXPERTS, hidden, generator=torch.Generator().manual_seed(0))
    places = torch.tensor([-1 if expert in hot else 100 + expert for expert in range(EXPERTS)], dtype=torch.int32)
    counted, counted_fast = tally(), tally()
    for seed in range(12):
        h = torch.randn(1, hidden, generator=torch.Generator().manual_seed(seed))
        ids, weights = route(h, router, used)
        slots, load = plain.admit(ids, counted)
        found = on_device.route_row(h, router, used, fast, counted_fast, places)
        assert torch.equal(found[0], slots)
        assert torch.equal(found[1], torch.where(torch.isin(ids, load), ids + 100, -1))
        assert torch.allclose(found[2], weights)
        for want, have in zip(
            (plain.table, plain.owner, plain.used_at, plain.step, counted),
            (fast.table, fast.owner, fast.used_at, fast.step, counted_fast),
            strict=True,
        ):
            assert torch.equal(want, have)

"""Layers to devices."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.paper_machine import GIB, MIB, cpu, dense, gpu, moe

from rekindle.errors import BadConfig
from rekindle.placement import Machine, Wishes, make_plan, parse_split, split_layers
from rekindle.placement.place import Placer
from rekindle.placement.split import can_tile
from rekindle.placement.types import pages_for
from rekindle.spec import Span


@given(st.integers(1, 100), st.lists(st.floats(1e-300, 1e308), min_size=1, max_size=8))
def test_every_split_tiles_the_model(layers: int, weights: list[float]) -> None:
    if len(weights) > layers:
        with pytest.raises(BadConfig):
            split_layers(layers, weights)
        return
    spans = split_layers(layers, weights)
    assert len(spans) == len(weights)
    assert [layer for span in spans for layer in span.layers] == list(range(layers))
    assert all(len(span) >= 1 for span in spans)


def test_worked_splits() -> None:
    assert split_layers(40, (0.5, 0.5)) == (Span(0, 20), Span(20, 40))
    assert split_layers(64, (0.08, 0.46, 0.46)) == (Span(0, 5), Span(5, 35), Span(35, 64))
    assert split_layers(4, (1000, 1, 1)) == (Span(0, 2), Span(2, 3), Span(3, 4))


@pytest.mark.parametrize(
    ("layers", "weights", "sentence"),
    [
        (2, (1, 1, 1), "3 devices cannot share 2 layers"),
        (40, (), "at least 1 device, 0 were given for 40 layers"),
        (40, (1, 0), "split weight 0 among 1,0 must be a finite number above 0"),
        (40, (1, -2), "split weight -2 among 1,-2"),
        (40, (1, float("nan")), "split weight nan among 1,nan"),
        (40, (float("inf"), 1), "split weight inf among inf,1"),
    ],
)
def test_a_bad_split_is_one_clear_error(layers: int, weights: tuple[float, ...], sentence: str) -> None:
    with pytest.raises(BadConfig, match=sentence):
        split_layers(layers, weights)


def test_a_split_can_be_written_as_weights_counts_or_auto() -> None:
    assert parse_split("0.5, 0.5", 2, 40) == (0.5, 0.5)
    assert parse_split("12,28", 2, 40) == (12, 28)
    assert parse_split(" Auto ", 2, 40) is None


@pytest.mark.parametrize(
    ("text", "devices", "sentence"),
    [
        ("20,19", 2, "layer counts 20,19 sum to 39, the model has 40 layers"),
        ("1,1", 2, r"sum to 2, the model has 40 layers \(weights are written with a point, such as 1.0,1.0\)"),
        ("40,0", 2, "layer count 0 among 40,0 must be above 0"),
        ("0.5,0.5", 3, "--split 0.5,0.5 is for 2 devices, --devices names 3"),
        ("0.5,half", 2, "has the part 'half', which is neither a number nor 'auto'"),
        ("", 1, "has the part ''"),
        ("nan,1", 2, "split weight nan"),
        ("auto", 41, "41 devices cannot share 40 layers"),
    ],
)
def test_a_bad_split_text_is_one_clear_error(text: str, devices: int, sentence: str) -> None:
    with pytest.raises(BadConfig, match=sentence):
        parse_split(text, devices, 40)


def test_layer_counts_and_weights_reach_the_plan() -> None:
    spec, sizes = dense()
    machine = Machine((gpu(GIB, "a"), gpu(GIB, "b")), 8 * GIB)
    assert make_plan(machine, spec, sizes, Wishes(4096, split=(3, 5))).spans == (Span(0, 3), Span(3, 8))
    assert make_plan(machine, spec, sizes, Wishes(4096, split=(1.0, 3.0))).spans == (Span(0, 2), Span(2, 8))
    with pytest.raises(BadConfig, match="is for 3 devices, --devices names 2"):
        make_plan(machine, spec, sizes, Wishes(4096, split=(1.0, 1.0, 1.0)))


def test_auto_follows_speed_where_memory_allows() -> None:
    spec, sizes = moe()
    machine = Machine((gpu(2 * GIB, "fast", 3.0), gpu(2 * GIB, "slow", 1.0)), 8 * GIB)
    assert make_plan(machine, spec, sizes, Wishes(4096)).spans == (Span(0, 6), Span(6, 8))


def test_auto_puts_memory_before_speed() -> None:
    spec, sizes = moe()  # 32 MiB of experts and 4 MiB more per layer; a GPU runtime takes 256 MiB
    machine = Machine((gpu(400 * MIB, "fast", 3.0), gpu(2 * GIB, "slow", 1.0)), 8 * GIB)
    plan = make_plan(machine, spec, sizes, Wishes(4096))
    assert plan.cold == 0
    assert len(plan.stage(0).span) < 6


def test_a_gpu_and_a_cpu_share_a_model() -> None:
    spec, sizes = moe()
    machine = Machine((gpu(400 * MIB, "gpu", 5.0), cpu(GIB, "cpu", 1.0)), 2 * GIB)
    plan = make_plan(machine, spec, sizes, Wishes(4096))
    assert plan.cold == 0
    assert any(item.name == "all of cpu" and item.bytes == plan.stage(1).total for item in plan.host_items)


def test_a_sequence_at_the_context_limit_comes_before_speed() -> None:
    """Two cards alike in memory, one three times as fast: the pool that both have is largest on halves."""
    spec, sizes = dense()
    machine = Machine((gpu(500 * MIB, "fast", 3.0), gpu(500 * MIB, "slow", 1.0)), 1 << 50)
    plan = make_plan(machine, spec, sizes, Wishes(1 << 20))
    assert plan.pool_may_fill
    assert plan.spans == (Span(0, 4), Span(4, 8))
    pools = [Placer(machine, spec, sizes, Wishes(1 << 20, split=(n, 8 - n))).place().pool_pages for n in range(1, 8)]
    assert plan.pool_pages == max(pools)


def test_speed_comes_before_pages_for_more_than_one_sequence_at_the_limit() -> None:
    """Three quarters of the layers for the card that is three times as fast, not the half that leaves most room."""
    spec, sizes = dense()
    machine = Machine((gpu(500 * MIB, "fast", 3.0), gpu(500 * MIB, "slow", 1.0)), 1 << 50)
    wishes = Wishes(8192, sequences=32)
    plan = make_plan(machine, spec, sizes, wishes)
    halves = make_plan(machine, spec, sizes, replace(wishes, split=(4, 4)))
    assert plan.spans == (Span(0, 6), Span(6, 8))
    assert wishes.full_pages > halves.pool_pages > plan.pool_pages >= pages_for(8192)


def test_a_higher_context_limit_gives_a_cpu_no_more_layers() -> None:
    """A pool beyond its target is worth less than the time that a CPU would take for the layers."""
    spec, sizes = dense()
    machine = Machine((gpu(500 * MIB, "gpu", 30.0), cpu(8 * GIB)), 16 * GIB)
    low, high = (make_plan(machine, spec, sizes, Wishes(context)) for context in (8192, 1 << 20))
    assert low.spans == high.spans == (Span(0, 7), Span(7, 8))


def test_cold_experts_are_spread_evenly_over_devices_and_what_is_left_is_for_the_cache() -> None:
    spec, sizes = moe(experts=64, expert=MIB // 2)
    machine = Machine((gpu(446 * MIB, "a"), gpu(386 * MIB, "b"), gpu(366 * MIB, "c")), 1 << 50)
    plan = make_plan(machine, spec, sizes, Wishes(4096))
    hot = [len(ids) for stage in plan.stages for ids in stage.hot]
    assert plan.cold
    assert max(hot) - min(hot) <= 2
    for stage in plan.stages:
        assert stage.left < MIB // 2 or stage.cold == sum(stage.expert_cache_slots), "or every expert has a place"
    assert len({sum(stage.expert_cache_slots) // len(stage.span) for stage in plan.stages}) > 1
    bare = make_plan(machine, spec, sizes, Wishes(4096, expert_cache_share=0))
    assert not any(sum(stage.expert_cache_slots) for stage in bare.stages), "a share of 0 gives no cache"


@pytest.mark.parametrize(("layers", "experts", "budgets"), [(8, 64, (446, 386, 366)), (3, 128, (326, 420, 340))])
def test_what_is_said_to_keep_all_hot_does(layers: int, experts: int, budgets: tuple[int, ...]) -> None:
    """The second of three layers has room enough: only the others hold its device back."""
    spec, sizes = moe(layers, experts=experts, expert=MIB // 2)
    machine = Machine(tuple(gpu(budget * MIB, name) for budget, name in zip(budgets, "abc", strict=True)), 1 << 50)
    plan = make_plan(machine, spec, sizes, Wishes(4096))
    said = [
        re.search(r"(.): .* cold.*; (?:a budget of ([\d.]+) MiB|its budget)(.*) would", why) for why in plan.reasons
    ]
    claims = [claim.groups() for claim in said if claim]
    assert len(claims) == sum(stage.cold > 0 for stage in plan.stages) > 0
    for name, budget, how in claims:
        raised = budget and math.ceil(float(budget) * MIB)
        devices = [replace(d, budget=raised) if raised and d.name == name else d for d in machine.devices]
        split = parse_split(how.removeprefix(" with --split ") or "auto", len(devices), spec.layers)
        again = Placer(Machine(tuple(devices), machine.ram), spec, sizes, Wishes(4096, split=split)).place()
        assert next(stage.cold for stage in again.stages if stage.device.name == name) == 0


@given(st.data(), st.integers(1, 9), st.integers(1, 4))
def test_a_tiling_is_found_exactly_where_there_is_one(data: st.DataObject, layers: int, devices: int) -> None:
    weights = data.draw(st.lists(st.integers(1, 9), min_size=layers, max_size=layers))
    rooms = data.draw(st.lists(st.integers(1, 30), min_size=devices, max_size=devices))

    def fits(index: int, span: Span) -> bool:
        return sum(weights[span.start : span.stop]) <= rooms[index]

    def tiles(start: int, index: int) -> bool:
        if index == devices:
            return start == layers
        return any(fits(index, Span(start, stop)) and tiles(stop, index + 1) for stop in range(start + 1, layers + 1))

    assert can_tile(layers, devices, fits) == tiles(0, 0)


def test_more_devices_than_layers_are_refused() -> None:
    spec, sizes = dense(layers=2)
    machine = Machine(tuple(gpu(GIB, str(i)) for i in range(3)), 8 * GIB)
    with pytest.raises(BadConfig, match="3 devices cannot share 2 layers"):
        make_plan(machine, spec, sizes, Wishes(4096))

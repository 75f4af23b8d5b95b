"""What is decided from numbers alone: swaps, costs, counts and what they do to a plan."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rekindle.bench.synth import write_synthetic
from rekindle.build import open_model, plan_model
from rekindle.config import Config
from rekindle.experts.cost import CostModel, touched_experts
from rekindle.experts.counts import HALF_LIFE, ROUND, CountsFile, LayerCounter, RoutingCounts
from rekindle.experts.swaps import choose_swaps
from rekindle.placement import Device, Machine, StagePlan, Wishes, known_shapes, make_plan

GIB = 1 << 30


def test_the_weakest_hot_gives_way_to_the_strongest_cold() -> None:
    counts = np.array([50.0, 1, 9, 30, 8, 0])
    assert choose_swaps(counts, [1, 2, 5]) == [(5, 0), (1, 3)]
    assert choose_swaps(counts, [1, 2, 5], most=1) == [(5, 0)]
    assert choose_swaps(counts, [0, 3, 2]) == []  # 8 against 9


def test_noise_moves_nothing() -> None:
    assert choose_swaps(np.array([1.0, 2, 3, 4.9]), [0, 1]) == []
    assert choose_swaps(np.array([100.0, 140.0]), [0]) == []
    assert choose_swaps(np.zeros(4), [0, 1]) == []


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=20), st.data())
def test_every_swap_is_a_gain_and_swapping_ends(values: list[float], data: st.DataObject) -> None:
    counts = np.array(values)
    hot = data.draw(st.sets(st.integers(0, len(values) - 1), min_size=1, max_size=len(values) - 1))
    for _ in range(len(values)):
        before = counts[sorted(hot)].sum()
        swaps = choose_swaps(counts, hot)
        for goes, comes in swaps:
            assert goes in hot
            assert comes not in hot
            hot = hot - {goes} | {comes}
        assert not swaps or counts[sorted(hot)].sum() > before
    assert choose_swaps(counts, hot) == []


costs = st.builds(
    CostModel,
    pcie=st.floats(1, 1e6),
    host_call=st.floats(0, 100),
    host_expert=st.floats(0, 1e4),
    host_pair=st.floats(0.5, 1e3),
    device_pair=st.floats(0, 0.25),
)


@given(costs, st.integers(1, 255), st.integers(1, 10_000))
def test_costs_grow_with_the_work(cost: CostModel, cold: int, pairs: int) -> None:
    few, many = (touched_experts(count, cold, 256) for count in (pairs, pairs + 1))
    assert 0 < few <= many <= cold
    assert cost.host(few, pairs) <= cost.host(many, pairs + 1)
    assert cost.stream(few, pairs, 1_800_000) <= cost.stream(many, pairs + 1, 1_800_000)
    assert cost.stream(few, pairs, 1_800_000) <= cost.stream(few, pairs, 1_900_000)


@given(costs, st.integers(1, 255))
def test_a_long_enough_prefill_is_always_streamed(cost: CostModel, cold: int) -> None:
    """The weights go over the link once, whatever the rows; the CPU pays for each of them."""
    enough = int(2 * 256 * 1_800_000 / cost.pcie / (cost.host_pair - cost.device_pair)) + 1
    assert not cost.prefers_host(enough, cold, 256, 1_800_000)


def test_a_slow_link_and_few_tokens_mean_the_cpu_and_a_fast_one_means_streaming() -> None:
    slow = CostModel(pcie=5_000, host_call=20, host_expert=100, host_pair=20, device_pair=0.1)
    fast = CostModel(pcie=50_000, host_call=20, host_expert=100, host_pair=20, device_pair=0.1)
    assert slow.prefers_host(8, 128, 256, 1_800_000)
    assert not fast.prefers_host(8, 128, 256, 1_800_000)
    assert not slow.prefers_host(8 * 512, 128, 256, 1_800_000)


# Counts


def test_counts_halve_with_their_half_life() -> None:
    counts = RoutingCounts(1, 2)
    counts.add(0, np.array([8.0, 0]), 100)
    counts.add(0, np.array([0.0, 4]), HALF_LIFE)
    assert counts.values.tolist() == [[4, 4]]


def test_a_layer_hands_over_its_tally_every_round_and_starts_anew() -> None:
    counts = RoutingCounts(2, 4)
    counter = LayerCounter(counts, 1, torch.device("cpu"))
    counter.note(torch.tensor([[1, 3], [1, 2]], dtype=torch.int32))
    assert not counter.poll(ROUND)  # the copy begins
    counter.note(torch.tensor([[0, 1]], dtype=torch.int32))
    assert counter.poll(1)
    assert counts.values.tolist() == [[0, 0, 0, 0], [0, 2, 1, 1]]
    assert not counter.poll(ROUND)
    assert counter.poll(1)
    assert counts.values[1, 0] == 1


def test_a_layer_that_was_never_counted_is_worth_the_average() -> None:
    counts = RoutingCounts(2, 2)
    assert counts.for_placement() is None
    counts.values[1] = [6, 2]
    assert counts.for_placement() == [[4, 4], [6, 2]]


def test_counts_survive_a_restart_and_change_the_placement(tmp_path: Path) -> None:
    spec, sizes = known_shapes("35B-A3B", "Q4_K_M")
    machine = Machine((Device("gpu", "cuda", 14 * GIB),), 64 * GIB)

    def plan_with(counts: list[list[float]] | None) -> tuple[int, ...]:
        return make_plan(machine, spec, sizes, Wishes(8192, counts=counts)).stage(0).hot[3]

    file = CountsFile(tmp_path, "abc", spec.layers, spec.ffn.experts)
    blind = plan_with(file.counts.for_placement())
    assert 255 not in blind
    file.counts.values[:, 200:] = 5
    file.counts.values[3, 255] = 100
    file.stop()
    again = CountsFile(tmp_path, "abc", spec.layers, spec.ffn.experts)
    assert np.array_equal(again.counts.values, file.counts.values)
    seeing = plan_with(again.counts.for_placement())
    assert seeing[0] == 255
    assert set(seeing) != set(blind)
    assert [path.name for path in tmp_path.iterdir()] == ["routing-abc.npy"]  # nothing temporary is left
    assert CountsFile(tmp_path, "other weights", spec.layers, spec.ffn.experts).counts.is_empty


def test_the_engines_plan_reads_the_counts_beside_its_cache(tmp_path: Path) -> None:
    model = open_model(write_synthetic(tmp_path / "model.gguf", "tiny-moe"))
    spec = model.spec
    config = Config(sequences=1, context=1024, cache_dir=tmp_path / "cache", dtype="bfloat16", kv_type="bf16")

    def plan_with(budget: int) -> StagePlan:
        return plan_model(config, model, Machine((Device("gpu", "cuda", budget),), 4 * GIB)).stage(0)

    roomy, last = plan_with(4 * GIB), spec.ffn.experts - 1
    step = roomy.bytes_of("hot experts") // 4
    tight = next(budget for budget in range(roomy.total, 0, -step) if plan_with(budget).cold > spec.layers)
    assert not any(hot[0] == last for hot in plan_with(tight).hot)
    file = CountsFile(tmp_path / "cache", model.file.fingerprint(), spec.layers, spec.ffn.experts)
    file.counts.values[:, last] = 9
    file.save()
    assert all(hot[0] == last for hot in plan_with(tight).hot)


@pytest.mark.parametrize("content", [b"", b"not an array", None])
def test_a_bad_counts_file_is_a_start_without_counts(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "routing-abc.npy"
    if content is None:
        np.save(path, np.full((2, 3), -1.0))
    else:
        path.write_bytes(content)
    file = CountsFile(tmp_path, "abc", 2, 3)
    assert file.counts.is_empty
    file.counts.values[0, 0] = 1
    file.save()
    assert CountsFile(tmp_path, "abc", 2, 3).counts.values[0, 0] == 1


def _lie_about_the_shape(path: Path) -> None:
    header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 8), }".ljust(117) + b"\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(64))


@pytest.mark.parametrize(
    "damage",
    [
        os.mkfifo,
        Path.mkdir,
        lambda path: path.symlink_to("/dev/zero"),
        lambda path: (path.touch(), os.truncate(path, 100 << 30)),
        _lie_about_the_shape,
    ],
)
def test_counts_that_are_no_file_of_ours_are_a_start_without_them(
    tmp_path: Path, damage: Callable[[Path], Any]
) -> None:
    damage(tmp_path / "routing-abc.npy")
    assert CountsFile(tmp_path, "abc", 2, 8).counts.is_empty


def test_counts_are_for_their_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        file = CountsFile(tmp_path, "abc", 2, 8)
        file.counts.values[:] = 1
        file.save()
    finally:
        os.umask(before)
    assert file.path.stat().st_mode & 0o777 == 0o600

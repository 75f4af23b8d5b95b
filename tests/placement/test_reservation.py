"""The rule that KV is reserved for the pool when the context limit would push experts to RAM: its five cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.paper_machine import GIB, MIB, gpu, moe, one_gpu

from rekindle import buffers
from rekindle.placement import Machine, Plan, Wishes, make_plan, stage
from rekindle.placement.place import Placer
from rekindle.placement.reserve import LOOKUP_BYTES
from rekindle.spec import PAGE, AttentionSpec, FfnSpec
from rekindle.spec.attention import PARTIAL_ROWS, most_splits

# 8 layers, 2 of them attention: 2 KiB of KV per token, 256 MiB at 131,072; experts 8 · 16 · 2 MiB = 256 MiB.
SPEC, SIZES = moe()
WISHES = Wishes(context=131_072, expert_cache_share=0)
KV = 2 * 1024


TARGET = 8192  # tokens, in proportion to so small a model


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only pages and experts share the room here."""
    monkeypatch.setattr(buffers, "STAGED_EXPERTS", 0)
    monkeypatch.setattr(stage, "POOL_TARGET", TARGET // PAGE)


def plan_with(room: int, wishes: Wishes = WISHES) -> Plan:
    """On a device that has `room` bytes for experts and KV."""
    (candidate,) = Placer(one_gpu(8 * GIB), SPEC, SIZES, wishes).stage_candidates()
    return make_plan(one_gpu(candidate.budget_for(pages=0, experts=room)), SPEC, SIZES, wishes)


def test_it_fits_fully_so_the_pool_is_off() -> None:
    plan = plan_with(512 * MIB)
    assert plan.cold == 0
    assert plan.stage(0).pool_tokens == 131_072
    assert not plan.pool_may_fill
    assert "nothing is paged out" in plan.reasons[0]
    assert plan.alternatives == ()


def test_the_pool_reduces_the_reservation_and_keeps_experts_hot() -> None:
    plan = plan_with(512 * MIB - 64)
    assert plan.cold == 0
    assert plan.stage(0).pool_tokens == 131_072 - PAGE  # all that the experts leave
    plan = plan_with(256 * MIB + 32 * MIB)
    assert (plan.cold, plan.stage(0).pool_tokens) == (0, 16_384)
    assert "pool of 16,384 tokens keeps 112 more experts hot; full KV would take 224.0 MiB more" in plan.reasons[0]


def test_a_pool_as_large_as_the_context_reserves_the_context() -> None:
    plan = plan_with(300 * MIB, replace(WISHES, context=32_768, pool=1 << 20))
    assert plan.stage(0).bytes_of("KV pool") == 32_768 * KV
    assert plan.cold == (256 - (300 - 64)) // 2
    assert not plan.stage(0).pool_may_fill


def test_without_the_rule_full_kv_costs_experts() -> None:
    """A pool of the context's own size is no pool: what the rule saves is the difference to it."""
    without = plan_with(300 * MIB, replace(WISHES, pool=131_072))
    assert without.stage(0).bytes_of("KV pool") == 256 * MIB
    assert without.cold == 128 - 22  # 44 MiB are left for experts of 2 MiB
    assert plan_with(300 * MIB).cold == 0


def test_the_auto_size_knows_the_budget() -> None:
    """Plenty of memory: every token the experts leave. Little: pages and experts share it, page by page."""
    assert plan_with(256 * MIB + 100 * MIB).stage(0).pool_tokens == 100 * MIB // KV
    little = plan_with(56 * MIB)
    assert little.stage(0).pool_tokens < TARGET
    pool, experts = little.stage(0).bytes_of("KV pool"), little.stage(0).bytes_of("hot experts")
    assert abs(pool - (experts - 8 * 2 * 2 * MIB)) <= 4 * MIB  # beyond the floor of two experts in each layer


def test_the_plan_carries_the_one_pool_size() -> None:
    first = plan_with(256 * MIB + 32 * MIB).stage(0)
    assert first.pool_pages == first.bytes_of("KV pool") // first.page_bytes == 256


def test_an_explicit_pool_is_obeyed_also_where_full_kv_would_fit() -> None:
    asked = replace(WISHES, pool=8192)
    assert plan_with(256 * MIB + 100 * MIB, asked).stage(0).pool_tokens == 8192
    plan = plan_with(512 * MIB, asked)
    assert plan.stage(0).pool_tokens == 8192
    assert "pool of 8,192 tokens, as asked; full KV would take 240.0 MiB more" in plan.reasons[0]
    assert not plan.alternatives
    assert plan_with(512 * MIB, WISHES).stage(0).pool_tokens == 131_072


def test_a_sparse_pool_is_the_largest_power_of_two_that_fits_and_the_plan_says_so() -> None:
    """A start with a little more or less memory has the same pool, and so the same snapshots."""
    sparse = replace(WISHES, kv_mode="sparse")
    for room, tokens in ((100, 32_768), (127, 32_768), (128, 65_536), (160, 65_536), (256, 131_072)):
        plan = plan_with(256 * MIB + room * MIB, sparse)
        assert plan.stage(0).pool_tokens == tokens, f"{room} MiB hold {room * MIB // KV:,} tokens"
        assert ("power of two" in plan.reasons[0]) == (tokens < 131_072)
    assert "power of two" not in plan_with(256 * MIB + 100 * MIB, replace(sparse, pool=8192)).reasons[0]


@pytest.mark.parametrize("split", [None, (4, 4)])
def test_a_power_of_two_is_promised_to_the_next_start_only_where_the_split_is_fixed(
    split: tuple[int, ...] | None,
) -> None:
    machine = Machine((gpu(560 * MIB, "a"), gpu(560 * MIB, "b")), 1 << 50)
    said = make_plan(machine, SPEC, SIZES, replace(WISHES, kv_mode="sparse", split=split)).reasons[1]
    assert "the largest power of two that fits" in said
    assert ("so that the next start knows this one's snapshots" in said) == (split is not None)


def test_the_floor_of_used_experts_comes_first() -> None:
    counts = [[100] * 16 if layer == 0 else [1] * 16 for layer in range(8)]
    plan = plan_with(60 * MIB, replace(WISHES, counts=counts))
    assert all(len(hot) >= 2 for hot in plan.stage(0).hot)
    assert len(plan.stage(0).hot[0]) > 2
    assert plan_with(34 * MIB, replace(WISHES, counts=counts)).hot == 16


def test_hot_experts_are_the_most_used() -> None:
    counts = [[(expert * 7 + layer) % 16 for expert in range(16)] for layer in range(8)]
    plan = plan_with(200 * MIB, replace(WISHES, counts=counts))
    assert plan.cold
    for layer, hot in enumerate(plan.stage(0).hot):
        cold = set(range(16)) - set(hot)
        assert hot
        assert min(counts[layer][e] for e in hot) >= max((counts[layer][e] for e in cold), default=0)


def test_use_is_weighed_per_byte() -> None:
    layers = tuple(replace(layer, expert=4 * MIB if i == 0 else 2 * MIB) for i, layer in enumerate(SIZES.layers))
    sizes = replace(SIZES, layers=layers)
    wishes = replace(WISHES, counts=[[10] * 16] * 8)
    plan = make_plan(one_gpu(600 * MIB), SPEC, sizes, wishes)
    assert plan.cold
    assert len(plan.stage(0).hot[0]) < min(len(hot) for hot in plan.stage(0).hot[1:])


def test_without_counts_experts_are_spread_evenly() -> None:
    hot = plan_with(200 * MIB).stage(0).hot
    assert max(map(len, hot)) - min(map(len, hot)) <= 1


def test_the_expert_cache_takes_its_share_only_while_experts_are_cold() -> None:
    ringed = replace(WISHES, expert_cache_share=0.25)
    short = plan_with(200 * MIB, ringed).stage(0)
    assert short.cold
    assert set(short.expert_cache_slots) <= {3, 4}
    assert sum(plan_with(512 * MIB, ringed).stage(0).expert_cache_slots) == 0


def test_prompt_lookup_and_recorded_steps_have_lines_of_their_own() -> None:
    plain, drafting = (plan_with(512 * MIB, replace(WISHES, rewind_rows=rows)) for rows in (0, 17))
    indexed = {item.name: item.bytes for item in drafting.host_items}["draft index"]
    assert indexed == drafting.live_pages * PAGE * LOOKUP_BYTES
    assert not any(item.name == "draft index" for item in plain.host_items)
    assert plain.stage(0).bytes_of("recorded steps") > 0


def test_what_experts_give_is_reserved_in_float32_whatever_the_activations_are() -> None:
    """Inner values of all pairs and their results are there at once, then the sums too."""
    hidden, used, width = 2048, 8, 512
    least = used * (width * 2 + hidden * 4) + hidden * 4
    assert FfnSpec(0, 256, used, width, width).row_bytes(hidden, value_bytes=2) >= least


@pytest.mark.parametrize(("rows", "heads"), [(1, 16), (64, 16), (9 * 512, 16), (65 * 2048, 24)])
def test_attention_is_cut_into_no_more_parts_than_the_plan_reserves(rows: int, heads: int) -> None:
    splits = most_splits(rows, heads)
    assert splits == 1 or splits * rows * heads <= PARTIAL_ROWS
    reserved = AttentionSpec(heads, 2, 256, 64, 1e7).work_bytes(rows, rows)["attention partials"]
    assert splits == 1 or splits * rows * heads * (256 + 1) * 4 <= reserved

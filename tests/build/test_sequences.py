"""How many requests run at once, where no number is asked for: as many as leave one of them what it needs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rekindle.build import plan_numbers
from rekindle.build.drafts import DrafterBytes
from rekindle.config import Config
from rekindle.errors import DoesNotFit
from rekindle.placement import Device, Machine, Plan, card_named, known_shapes

GIB = 1 << 30


def plan_of(model: str, budget: float, kind: str = "cuda", **settings: Any) -> Plan:
    name, rates, on_cpu = "cuda:0", card_named("H200").rates, kind == "cpu"
    device = Device("cpu" if on_cpu else name, kind, int(budget * GIB), host=on_cpu, rates=None if on_cpu else rates)
    machine = Machine((device,), 256 * GIB)
    config = Config(context=settings.pop("context", 131_072), dtype="bfloat16", **settings)
    return plan_numbers(config, *known_shapes(model, "Q4_K_M"), machine)


@pytest.mark.parametrize(
    ("model", "budget", "sequences"), [("27B", 80, 16), ("27B", 24.5, 8), ("27B", 22.1, 4), ("35B-A3B", 22.1, 4)]
)
def test_as_many_as_leave_a_long_conversation_on_the_device(model: str, budget: float, sequences: int) -> None:
    plan = plan_of(model, budget, live_memory=False)
    assert plan.wishes.sequences == sequences
    said = [reason for reason in plan.reasons if "requests run at once" in reason]
    assert len(said) == (sequences < 16) and all("--sequences" in reason for reason in said)
    most = plan_of(model, budget, sequences=16, live_memory=False)
    if sequences < 16:
        assert (plan.pool_pages, -plan.cold) > (most.pool_pages, -most.cold)
        assert (
            f"{most.pool_pages * 64:,} tokens" in said[0] or f"{most.cold - plan.cold:,} more experts cold" in said[0]
        )


@pytest.mark.parametrize("budget", [22.1, 24.5])
def test_slots_that_lend_their_memory_cost_one_sequence_next_to_nothing(budget: float) -> None:
    """So sixteen run at once where fewer did, and one alone has the room that it would have in a single slot."""
    plan, single = plan_of("27B", budget), plan_of("27B", budget, sequences=1)
    assert plan.wishes.sequences == 16
    assert 0.97 * single.pool_pages < plan.pages_beside(1) < single.pool_pages
    fewer = plan_of("27B", budget, sequences=4)
    assert plan.pages_beside(4) > 0.97 * fewer.pages_beside(4) == 0.97 * fewer.pool_pages
    fixed = plan_of("27B", budget, sequences=16, live_memory=False)
    assert plan.pages_beside(16) == plan.pool_pages == fixed.pool_pages
    alone, together = plan.expected[2]
    assert alone.context == 32_768 == alone.kv_tokens_on_device and not alone.link_bytes
    assert together is not None and together.kv_tokens_on_device == plan.pool_pages * 64


def test_experts_that_fewer_sequences_keep_hot_are_worth_more_than_slots() -> None:
    assert plan_of("35B-A3B", 22.1).wishes.sequences == 4


@pytest.mark.parametrize(
    ("model", "budget", "settings", "chunk"),
    [
        ("35B-A3B", 139, {}, 4096),
        ("27B", 139, {}, 4096),
        ("27B", 24.5, {}, 2048),  # the memory has better uses
        ("35B-A3B", 22.1, {}, 2048),
        ("35B-A3B", 139, {"grid": 1024}, 1024),
        ("35B-A3B", 139, {"pool": 65_536}, 2048),
    ],
)
def test_chunks_are_longer_where_their_memory_is_next_to_nothing(
    model: str, budget: float, settings: dict[str, Any], chunk: int
) -> None:
    plan = plan_of(model, budget, **settings)
    assert plan.wishes.chunk == chunk
    assert any("chunks of 4,096" in reason and "--grid" in reason for reason in plan.reasons) == (chunk == 4096)
    if chunk == 4096:
        shorter = plan_of(model, budget, grid=2048)
        assert plan.cold == shorter.cold == 0
        given = (shorter.pool_pages - plan.pool_pages) * plan.stage(0).page_bytes
        assert given <= budget * GIB / 48
        told = " ".join(plan.reasons)
        assert not plan.pool_may_fill or f"{plan.pool_pages * 64:,} tokens" in told, "of this plan, not of the other"


def test_a_drafter_beside_long_chunks_is_counted_with_them() -> None:
    """Its features are as many as a chunk's rows, and its captures as many as prompts may share one."""

    def drafter(sequences: int, chunk: int) -> DrafterBytes:
        return DrafterBytes(sequences * chunk * 1000, 0)

    machine = Machine((Device("cuda:0", "cuda", 139 * GIB, rates=card_named("H200").rates),), 256 * GIB)
    spec, sizes = known_shapes("27B", "Q4_K_M")
    plan = plan_numbers(Config(context=131_072, dtype="bfloat16"), spec, sizes, machine, drafter)
    assert (plan.wishes.chunk, plan.wishes.drafter_bytes) == (4096, 16 * 4096 * 1000)


def test_long_chunks_leave_a_small_pool_alone() -> None:
    """A model that nearly fills the card has better uses for the memory."""
    machine = Machine((Device("cuda:0", "cuda", 139 * GIB, rates=card_named("H200").rates),), 256 * GIB)
    spec, sizes = known_shapes("27B", "Q4_K_M")
    larger = replace(sizes, layers=tuple(replace(each, dense=int(12.9 * each.dense)) for each in sizes.layers))
    plan = plan_numbers(Config(context=131_072, dtype="bfloat16"), spec, larger, machine)
    assert plan.wishes.chunk == 2048 and plan.pool_may_fill


def test_a_number_that_is_asked_for_is_taken() -> None:
    assert plan_of("27B", 22.1, sequences=16).wishes.sequences == 16
    assert plan_of("27B", 80, sequences=3).wishes.sequences == 3


def test_where_fewer_would_gain_nothing_all_stay() -> None:
    """A short context, a pool that is bounded, a CPU."""
    assert plan_of("27B", 22.1, context=4096).wishes.sequences == 16
    assert plan_of("27B", 22.1, pool=8192).wishes.sequences == 16
    assert plan_of("27B", 100, "cpu").wishes.sequences == 16


def test_a_card_that_holds_no_sixteen_holds_fewer() -> None:
    plan = plan_of("27B", 20.2, context=8192)
    assert plan.wishes.sequences < 16
    with pytest.raises(DoesNotFit):
        plan_of("27B", 20.2, context=8192, sequences=16)
    assert any("what 16 need does not fit" in reason for reason in plan.reasons)
    with pytest.raises(DoesNotFit):
        plan_of("27B", 12)


def test_fewer_have_to_be_worth_it() -> None:
    """A card that has nearly all experts cold anyway; a pool that is too small for sixteen; RAM for few."""
    assert plan_of("35B-A3B", 8).wishes.sequences == 16
    assert plan_of("27B", 22.1, pool=3000).wishes.sequences == 8
    small = plan_of("27B", 20, "cpu")
    assert small.wishes.sequences < 16 and any("requests run at once" in reason for reason in small.reasons)

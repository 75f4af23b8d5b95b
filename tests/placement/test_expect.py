"""Expected speeds: held to what was measured, so that neither the formula nor the plan moves away from it unseen."""

from __future__ import annotations

import pytest

from rekindle.errors import BadConfig
from rekindle.placement import Device, Machine, Plan, Sizes, Wishes, card_named, known_shapes, make_plan, show_plan
from rekindle.placement.cards import CARDS
from rekindle.placement.expect import expected

GIB = 1 << 30
H200 = card_named("H200")


def plan_of(model: str, budget: float, **wishes: object) -> tuple[Plan, Sizes]:
    spec, sizes = known_shapes(model, "Q4_K_M")
    machine = Machine((Device("cuda:0", "cuda", int(budget * GIB), rates=H200.rates),), 256 * GIB)
    given = {"context": 131_072, "sequences": 16, "chunk": 2048, **wishes}
    return make_plan(machine, spec, sizes, Wishes(**given)), sizes  # type: ignore[arg-type]


def with_cold(cold: int, **wishes: object) -> tuple[Plan, Sizes]:
    """35B-A3B with about so many cold experts, on whatever budget gives them."""
    low, high = 10.0, 26.0
    while high - low > 0.01:
        middle = (low + high) / 2
        low, high = (middle, high) if plan_of("35B-A3B", middle, **wishes)[0].cold > cold else (low, middle)
    return plan_of("35B-A3B", high, **wishes)


# docs/bench.md, one NVIDIA H200: context, sequences, tok/s. First all in VRAM, …
IN_VRAM = [
    ("35B-A3B", None, "exact", [(0, 1, 678), (32_768, 1, 583), (131_072, 1, 461)]),
    ("35B-A3B", None, "exact", [(0, 4, 1408), (0, 8, 2137), (0, 16, 2889)]),
    ("27B", None, "exact", [(0, 1, 176.3), (32_768, 1, 160), (0, 4, 408), (0, 8, 725), (0, 16, 1392)]),
    ("35B-A3B", 4096, "exact", [(131_072, 1, 19.1)]),
    ("35B-A3B", 4096, "sparse", [(131_072, 1, 641)]),
]
# … then with cold experts, as many as there were.
WITH_COLD = [
    (1375, 8192, [(1024, 1, 433), (16_384, 1, 183), (65_536, 1, 40)]),
    (1978, 65_536, [(1024, 1, 344)]),
    (2666, 131_072, [(1024, 1, 276)]),
    (1460, 8192, [(1024, 1, 355), (16_384, 1, 159), (65_536, 1, 37.5), (131_072, 1, 18.9)]),
    (2216, 65_536, [(1024, 1, 296), (16_384, 1, 276), (65_536, 1, 256), (131_072, 1, 33)]),
    (2908, 131_072, [(1024, 1, 264), (16_384, 1, 256), (65_536, 1, 239), (131_072, 1, 218)]),
    (5789, 8192, [(1024, 1, 164), (16_384, 1, 105), (65_536, 1, 33.7), (131_072, 1, 17.6)]),
    (6394, 65_536, [(1024, 1, 158), (16_384, 1, 161), (65_536, 1, 149), (131_072, 1, 29.9)]),
    (7087, 131_072, [(1024, 1, 159), (16_384, 1, 156), (65_536, 1, 151), (131_072, 1, 140)]),
    (1460, None, [(1024, 1, 358), (16_384, 1, 338), (65_536, 1, 273), (131_072, 1, 223)]),  # memory that is traded
    (5789, None, [(1024, 1, 168), (16_384, 1, 158), (65_536, 1, 149), (131_072, 1, 129)]),
]
Points = list[tuple[int, int, float]]


@pytest.mark.parametrize(("model", "pool", "mode", "points"), IN_VRAM)
def test_expected_decode_speeds_are_within_15_percent_of_those_measured(
    model: str, pool: int | None, mode: str, points: Points
) -> None:
    check(*plan_of(model, 130, pool=pool, kv_mode=mode), points)


@pytest.mark.parametrize(("cold", "pool", "points"), WITH_COLD)
def test_so_are_those_with_cold_experts(cold: int, pool: int | None, points: Points) -> None:
    plan, sizes = with_cold(cold, pool=pool, lends=pool is None)
    assert abs(plan.cold - cold) < 20
    check(plan, sizes, points)


def check(plan: Plan, sizes: Sizes, points: Points) -> None:
    for context, sequences, measured in points:
        found = expected(plan, sizes, context, sequences)
        assert found is not None
        print(f"{plan.cold} cold, context {context}, {sequences}: {found.tokens_per_second:.0f}, measured {measured}")
        assert abs(found.tokens_per_second / measured - 1) < 0.15, f"{found}, measured {measured}"


def test_more_context_is_never_faster_and_more_bandwidth_never_slower() -> None:
    plan, sizes = plan_of("35B-A3B", 22.1)
    speeds = [each.tokens_per_second for context in (0, 8192, 8256, 65_536) if (each := expected(plan, sizes, context))]
    assert speeds == sorted(speeds, reverse=True)
    assert len(speeds) == 4


def test_the_plan_says_both_ends_and_where_so_many_do_not_fit() -> None:
    spec, sizes = known_shapes("27B", "Q4_K_M")
    devices = tuple(Device(f"cuda:{i}", "cuda", 22 * GIB, rates=card_named("RTX 3090").rates) for i in range(2))
    text = show_plan(make_plan(Machine(devices, 32 * GIB), spec, sizes, Wishes(262_144, sequences=16, chunk=2048)))
    lines = [line for line in text.splitlines() if "tok/s" in line]
    assert [line.split()[0] for line in lines] == ["empty", "8,192", "32,768", "65,536", "262,144"]
    assert lines[-1].endswith("does not fit")


def test_where_several_are_slower_than_one_the_plan_says_that_all_of_them_run_at_once() -> None:
    """The engine lets a sequence wait for pages only where devices and RAM together have none left."""
    spec, sizes = known_shapes("35B-A3B", "Q4_K_M")
    machine = Machine((Device("cuda:0", "cuda", 22 * GIB, rates=card_named("RTX 3090").rates),), 64 * GIB)
    plan = make_plan(machine, spec, sizes, Wishes(262_144, sequences=4, chunk=2048, lends=True))
    slower = [together.tokens_per_second < alone.tokens_per_second for alone, together in plan.expected if together]
    assert {True, False} == set(slower)
    text = show_plan(plan)
    assert [line.endswith("*") for line in text.splitlines() if "tok/s" in line] == slower
    assert "* slower than one alone: all 4 run in every step" in text
    roomy, _ = plan_of("35B-A3B", 130)
    assert "*" not in show_plan(roomy)


def test_where_a_speed_is_not_known_none_is_foretold() -> None:
    spec, sizes = known_shapes("27B", "Q4_K_M")
    plan = make_plan(Machine((Device("cuda:0", "cuda", 24 * GIB),), 64 * GIB), spec, sizes, Wishes(32_768))
    assert plan.expected == ()
    assert "tok/s" not in show_plan(plan)


def test_cards_are_found_by_their_names_however_they_are_written() -> None:
    assert card_named("nvidia geforce rtx3090") is card_named("RTX 3090")
    assert len({card.name for card in CARDS}) == len(CARDS)
    with pytest.raises(BadConfig, match="'GTX 9999' is not known; known are RTX 3060, "):
        card_named("GTX 9999")


def test_without_a_pool_that_is_asked_for_long_contexts_are_served_from_the_device() -> None:
    """Agents live at 30,000 to 100,000 tokens; what that costs short contexts stays small."""
    (plan, sizes), (small, _) = plan_of("35B-A3B", 22.1), plan_of("35B-A3B", 22.1, pool=8192)
    assert plan.stage(0).pool_tokens == 65_536

    def gain(context: int) -> float:
        found, other = expected(plan, sizes, context), expected(small, sizes, context)
        assert found is not None and other is not None
        return found.tokens_per_second / other.tokens_per_second

    assert gain(1024) > 0.75 and gain(16_384) > 1.6 and gain(65_536) > 5
    assert plan_of("35B-A3B", 22.1, lends=True)[0].stage(0).pool_tokens == 8192, "it grows when it has to"
    assert plan_of("35B-A3B", 22.1, kv_mode="sparse")[0].stage(0).pool_tokens == 8192, "no row attends more"

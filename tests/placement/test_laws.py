"""What holds for every machine, model and wish."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from support.paper_machine import (
    ATTENTION,
    DELTA,
    MIB,
    POOL_TARGET,
    budgets,
    cpu,
    every_fourth,
    gpu,
    models,
    moe,
    one_gpu,
    small_spec,
    wishes_for,
)

from rekindle.errors import BadConfig, DoesNotFit
from rekindle.kernels.device_memory import DeviceMemory, PagePlaces
from rekindle.layers.base import page_shapes
from rekindle.layers.slot_memory import state_slots
from rekindle.placement import Device, LayerSizes, Machine, Plan, Sizes, Wishes, make_plan, show_plan
from rekindle.placement.lending import slot_pages
from rekindle.placement.mixers import MixerSums
from rekindle.placement.place import Placer
from rekindle.placement.reserve import KEYED_PAGES, LOOKUP_BYTES, chooses_by_keys, margin, smallest_budget
from rekindle.placement.types import pages_for
from rekindle.spec import PAGE, DeltaSpec, FfnSpec, ModelSpec

laws = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def machines(draw: st.DrawFn, layers: int) -> Machine:
    count = draw(st.integers(1, min(3, layers)))
    devices = tuple(draw(_device(f"device{i}")) for i in range(count))
    return Machine(devices, draw(st.sampled_from([64 * MIB, 1 << 30, 1 << 34, 1 << 45])))


@st.composite
def _device(draw: st.DrawFn, name: str) -> Device:
    make = draw(st.sampled_from([gpu, cpu]))
    return make(draw(budgets), name, draw(st.floats(0.1, 10)))


@st.composite
def placements(draw: st.DrawFn) -> tuple[Machine, ModelSpec, Sizes, Wishes]:
    spec, sizes = draw(models())
    return draw(machines(spec.layers)), spec, sizes, draw(wishes_for(spec))


def model_for_a_split(dice: Random) -> tuple[ModelSpec, Sizes]:
    """Many small experts of at most two sizes, as files have them, or none."""
    layers, experts = dice.randint(2, 8), dice.choice((0, 64, 64, 64))
    ffn = FfnSpec(experts=experts, used=2, expert_width=32, shared_width=32) if experts else FfnSpec(width=256)
    mixers = dice.choice((every_fourth(layers), tuple(dice.choices((ATTENTION, DELTA), k=layers))))
    kinds = [dice.randint(MIB // 8, MIB // 2) if experts else 0 for _ in range(2)]
    weights = tuple(
        LayerSizes(
            mixer=dice.randint(1, 4 * MIB),
            dense=0 if experts else dice.randint(1, 8 * MIB),
            shared=MIB if experts else 0,
            expert=dice.choice(kinds),
            experts=experts,
        )
        for _ in range(layers)
    )
    return small_spec(mixers, ffn), Sizes(10 * MIB, 12 * MIB, 512, weights, widest=100_000)


def wishes_for_a_split(dice: Random, spec: ModelSpec) -> Wishes:
    counts = [[dice.randint(0, 50) for _ in range(spec.ffn.experts)] for _ in range(spec.layers)]
    return Wishes(
        context=dice.randint(1, 1 << 18),
        sequences=dice.randint(1, 8),
        expert_cache_share=dice.choice((0, 1 / 16, 0.25, 1)),
        counts=dice.choice((None, counts)) if spec.ffn.is_moe else None,
        kv_mode=dice.choice(("exact", "sparse")),
        chunk=dice.choice((64, 512)),
        pool=dice.choice((None, None, dice.randint(4096, 100_000))),
    )


def plan_or_skip(machine: Machine, spec: ModelSpec, sizes: Sizes, wishes: Wishes) -> Plan:
    try:
        return Placer(machine, spec, sizes, wishes).place()
    except DoesNotFit:
        assume(False)
        raise


def hot_experts(plan: Plan) -> set[tuple[int, int]]:
    return {
        (layer, expert)
        for stage in plan.stages
        for layer, ids in zip(stage.span.layers, stage.hot, strict=True)
        for expert in ids
    }


@laws
@given(placements())
def test_no_device_and_no_ram_is_ever_over_budget(placement: tuple[Machine, ModelSpec, Sizes, Wishes]) -> None:
    plan = plan_or_skip(*placement)
    for stage in plan.stages:
        assert stage.total <= stage.device.budget
        assert all(item.bytes > 0 for item in stage.items)
    assert plan.host_total <= plan.machine.ram


WIDE = DeltaSpec(key_heads=4, value_heads=16, key_dim=64, value_dim=64, conv_width=4)  # 289 KB of a slot and layer


@laws
@given(models(), st.integers(400 * MIB, 2000 * MIB), st.data())
def test_what_slots_lend_is_counted_once(model: tuple[ModelSpec, Sizes], budget: int, data: st.DataObject) -> None:
    """As state: budgets, pools and experts are those of a plan whose slots lend nothing."""
    (spec, sizes), machine = model, one_gpu(budget)
    spec = replace(spec, mixers=tuple(WIDE if mixer == DELTA else mixer for mixer in spec.mixers))
    wishes = data.draw(wishes_for(spec, context=1 << 20))
    plan, lends = (plan_or_skip(machine, spec, sizes, replace(wishes, lends_slots=on)) for on in (False, True))
    assert [replace(stage, slot_pages=0) for stage in lends.stages] == list(plan.stages)
    assert (lends.host_items, lends.live_pages) == (plan.host_items, plan.live_pages)
    for stage in lends.stages:
        mixers = [spec.mixers[layer] for layer in stage.span.layers]
        state = sum(sum(mixer.slot_bytes().values()) for mixer in mixers)
        assert stage.slot_pages * stage.page_bytes <= state
        assert not (stage.slot_pages and (stage.device.host or stage.slots == 1 or not stage.pool_may_fill))
        assert stage.pages_beside(stage.slots) == stage.pool_pages
        event(f"slots hold pages: {stage.slot_pages > 0}")


@laws
@given(
    st.integers(1, 16), st.integers(1, 16), st.sampled_from([16, 24, 64, 128]), st.integers(1, 12),
    st.sampled_from(["bf16", "f32", "q8"]), st.integers(2, 16), st.integers(1, 999),
)  # fmt: skip
def test_a_slot_holds_as_many_pages_as_the_plan_says_wherever_it_begins(
    heads: int, times: int, dim: int, layers: int, kv_type: str, slots: int, pages: int
) -> None:
    delta = DeltaSpec(heads, heads * times, dim, dim, 4)
    spec = small_spec(tuple(ATTENTION if layer % 4 == 3 else delta for layer in range(layers + 3)), FfnSpec(width=256))
    wishes = Wishes(1 << 20, sequences=slots, kv_type=kv_type, lends_slots=True)
    planned = slot_pages(wishes, gpu(1 << 40), MixerSums(spec).of(spec.whole), pages)
    shapes = page_shapes(spec, spec.whole, kv_type)
    places = PagePlaces(next(iter(shapes.values())).page_bytes, len(shapes), pages + 1)
    states = state_slots(spec, spec.whole, slots)
    memory = DeviceMemory(places, 0, torch.device("meta"), states)
    held = [len(memory.places_in_slot(slot)) for slot in range(slots)]
    most = states.slot_bytes // places.place_bytes  # what lies between tensors holds pages, too
    assert planned <= min(held) and max(held) <= most


@laws
@given(placements())
def test_spans_tile_the_model(placement: tuple[Machine, ModelSpec, Sizes, Wishes]) -> None:
    machine, spec, sizes, wishes = placement
    spans = Placer(machine, spec, sizes, wishes).spans()
    assert [layer for span in spans for layer in span.layers] == list(range(spec.layers))
    assert all(len(span) for span in spans)
    assert len(spans) == len(machine.devices)


@laws
@given(placements())
def test_every_byte_of_the_model_lies_in_exactly_one_place(
    placement: tuple[Machine, ModelSpec, Sizes, Wishes],
) -> None:
    machine, spec, sizes, wishes = placement
    plan = plan_or_skip(machine, spec, sizes, wishes)
    names = ("embedding", "mixers", "dense ffn", "routers and shared experts", "hot experts", "final norm", "head")
    on_devices = sum(stage.bytes_of(name) for stage in plan.stages for name in names)
    host = {item.name: item.bytes for item in plan.host_items}
    in_ram = host.get("cold experts", 0) + host.get("embedding rows (as stored)", 0)
    whole = sizes.embedding + sizes.head + sizes.norms + sum(layer.total for layer in sizes.layers)
    assert on_devices + in_ram == whole
    assert plan.hot + plan.cold == sizes.experts


@laws
@given(placements())
def test_the_pool_of_the_plan_is_what_was_reserved_for_it(
    placement: tuple[Machine, ModelSpec, Sizes, Wishes],
) -> None:
    machine, spec, sizes, wishes = placement
    plan = plan_or_skip(machine, spec, sizes, wishes)
    kv = {"bf16": 1024, "f16": 1024, "f32": 2048, "q8": 544}[wishes.kv_type]  # one token in one attention layer
    for stage in plan.stages:
        assert stage.page_bytes == PAGE * kv * sum(spec.mixers[i].kind == "attention" for i in stage.span.layers)
        assert stage.bytes_of("KV pool") == stage.pool_pages * stage.page_bytes
        assert stage.pool_pages <= stage.full_pages == wishes.sequences * pages_for(wishes.context)


@laws
@given(placements())
def test_the_pool_holds_open_pages_and_a_chunk(placement: tuple[Machine, ModelSpec, Sizes, Wishes]) -> None:
    plan = plan_or_skip(*placement)
    wishes = plan.wishes
    running = wishes.sequences * (2 if wishes.rewind_rows else 1) + pages_for(wishes.chunk) + 1
    for stage in plan.stages:
        assert stage.pool_pages >= min(stage.full_pages, max(7, running))


@laws
@given(placements())
def test_expert_cache_slots_are_paid_for_and_never_outnumber_the_experts_without_a_place(
    placement: tuple[Machine, ModelSpec, Sizes, Wishes],
) -> None:
    machine, spec, sizes, wishes = placement
    plan = plan_or_skip(machine, spec, sizes, wishes)
    shared = (
        len(plan.stages) > 1 and wishes.split is None and wishes.expert_cache_share
    )  # room beside a share is for the expert cache
    for stage in plan.stages:
        layers = [sizes.layers[i] for i in stage.span.layers]
        cached = zip(stage.expert_cache_slots, stage.hot, layers, strict=True)
        for slots, hot, layer in cached:
            without_place = layer.experts - len(hot) - slots
            assert without_place >= 0
            assert 0 <= slots <= min(without_place, int(wishes.expert_cache_share * layer.experts)) or shared
            assert slots == 0 or len(hot) >= spec.ffn.used
        paid = sum(slots * layer.expert for slots, layer in zip(stage.expert_cache_slots, layers, strict=True))
        assert stage.bytes_of("expert cache") == paid


@laws
@given(placements())
def test_one_sequence_can_reach_the_context_limit(placement: tuple[Machine, ModelSpec, Sizes, Wishes]) -> None:
    plan = plan_or_skip(*placement)
    assert pages_for(plan.wishes.context) <= plan.live_pages <= plan.wishes.full_pages
    for stage in plan.stages:
        assert stage.host_pages == max(0, plan.live_pages - stage.pool_pages)
    evicted = sum(stage.host_pages * stage.page_bytes for stage in plan.stages)
    assert sum(item.bytes for item in plan.host_items if item.name == "evicted KV pages") == evicted
    most = plan.wishes.full_pages
    if chooses_by_keys(plan.wishes):  # no more pages than there is room for their keys
        most = min(most, max(KEYED_PAGES, *(stage.pool_pages for stage in plan.stages)))
    if plan.live_pages < most:  # RAM is used up: one page more would not fit
        page = sum(stage.page_bytes for stage in plan.stages if stage.pool_pages <= plan.live_pages)
        assert plan.host_left < page + (PAGE * LOOKUP_BYTES if plan.wishes.rewind_rows else 0)


@laws
@given(st.data(), models(), budgets, st.integers(0, 200 * MIB) | st.integers(0, 100))
def test_more_memory_never_makes_an_expert_cold_or_the_pool_smaller(
    data: st.DataObject, model: tuple[ModelSpec, Sizes], budget: int, more: int
) -> None:
    spec, sizes = model
    wishes = data.draw(wishes_for(spec))
    small = plan_or_skip(one_gpu(budget), spec, sizes, wishes)
    large = Placer(one_gpu(budget + more), spec, sizes, wishes).place()
    assert hot_experts(small) <= hot_experts(large)
    assert small.stage(0).pool_pages <= large.stage(0).pool_pages


@laws
@given(st.data(), models(), budgets, st.integers(0, 200 * MIB))
def test_more_memory_on_a_split_never_makes_an_expert_cold_or_a_pool_smaller(
    data: st.DataObject, model: tuple[ModelSpec, Sizes], budget: int, more: int
) -> None:
    spec, sizes = model
    assume(spec.layers > 1)
    wishes = replace(data.draw(wishes_for(spec)), split=(1.0, 1.0))
    small = plan_or_skip(Machine((gpu(budget, "a"), gpu(budget, "b")), 1 << 50), spec, sizes, wishes)
    large = Placer(Machine((gpu(budget + more, "a"), gpu(budget, "b")), 1 << 50), spec, sizes, wishes).place()
    assert hot_experts(small) <= hot_experts(large)
    assert all(a.pool_pages <= b.pool_pages for a, b in zip(small.stages, large.stages, strict=True))


@pytest.mark.parametrize("cards", [2, 3, 4])
def test_more_memory_never_makes_an_expert_cold_or_the_pool_smaller_whatever_split_it_brings(cards: int) -> None:
    planned = 0
    for seed in range(300):
        dice = Random(1000 * cards + seed)
        spec, sizes = model_for_a_split(dice)
        wishes = wishes_for_a_split(dice, spec)
        budgets = [dice.randint(285 * MIB, dice.choice((340, 450, 700)) * MIB) for _ in range(cards)]
        speeds = [dice.uniform(0.2, 5) for _ in range(cards)]
        try:
            small = Placer(Machine(tuple(map(gpu, budgets, "abcd", speeds)), 1 << 50), spec, sizes, wishes).place()
        except (DoesNotFit, BadConfig):
            continue
        budgets[dice.randrange(cards)] += dice.choice((dice.randint(0, 200 * MIB), dice.randint(0, MIB)))
        large = Placer(Machine(tuple(map(gpu, budgets, "abcd", speeds)), 1 << 50), spec, sizes, wishes).place()
        assert hot_experts(small) <= hot_experts(large), f"dice {1000 * cards + seed}"
        one = max(POOL_TARGET // PAGE, pages_for(wishes.context))  # beyond it speed comes first
        assert min(small.pool_pages, one) <= large.pool_pages, f"dice {1000 * cards + seed}"
        assert small.pool_may_fill >= large.pool_may_fill, f"dice {1000 * cards + seed}"
        planned += 1
    assert planned > 80, "the budgets leave something to plan"


@laws
@given(st.data(), models(), budgets, st.integers(POOL_TARGET, 1 << 20), st.integers(POOL_TARGET, 1 << 20))
def test_a_higher_context_limit_never_makes_an_expert_cold(
    data: st.DataObject, model: tuple[ModelSpec, Sizes], budget: int, one: int, other: int
) -> None:
    """From the pool's own size on. Below it full KV is smaller than the pool, and experts get the difference."""
    spec, sizes = model
    wishes = data.draw(wishes_for(spec, context=min(one, other)))
    assume(wishes.pool is None or wishes.pool <= wishes.context)
    low = plan_or_skip(one_gpu(budget), spec, sizes, wishes)
    high = Placer(one_gpu(budget), spec, sizes, replace(wishes, context=max(one, other))).place()
    assert hot_experts(low) == hot_experts(high)
    assert high.stage(0).pool_pages == low.stage(0).pool_pages or not low.cold


@laws
@given(st.data(), models(), budgets)
def test_everything_fits_with_full_kv_exactly_when_the_pool_is_off(
    data: st.DataObject, model: tuple[ModelSpec, Sizes], budget: int
) -> None:
    spec, sizes = model
    wishes = data.draw(wishes_for(spec))
    plan = plan_or_skip(one_gpu(budget), spec, sizes, wishes)
    stage = plan.stage(0)
    movable = sum(stage.bytes_of(name) for name in ("hot experts", "expert cache", "KV pool"))
    wanted = stage.full_pages if wishes.pool is None else min(stage.full_pages, pages_for(wishes.pool))
    fits = stage.total - movable + sizes.expert_bytes + wanted * stage.page_bytes <= budget
    if stage.page_bytes:
        assert (stage.pool_pages == wanted) >= fits
        assert stage.pool_pages <= wanted, "a pool that was asked for is obeyed where full KV would fit"
    if wanted < stage.full_pages:
        return
    assert fits == (not plan.cold and not stage.pool_may_fill) or stage.page_bytes == 0
    if fits:
        assert (plan.cold, stage.pool_pages) == (0, stage.full_pages)


@laws
@given(st.data(), models(), st.sampled_from([gpu, cpu]))
def test_the_smallest_budget_that_the_error_names_is_the_smallest(
    data: st.DataObject, model: tuple[ModelSpec, Sizes], make: object
) -> None:
    spec, sizes = model
    wishes = data.draw(wishes_for(spec))
    assert callable(make)
    with pytest.raises(DoesNotFit) as refused:
        make_plan(Machine((make(1),), 1 << 50), spec, sizes, wishes)
    smallest = int(str(refused.value).split("(")[1].split(" bytes")[0].replace(",", ""))
    plan = make_plan(Machine((make(smallest),), 1 << 50), spec, sizes, wishes)
    assert plan.stage(0).total <= smallest
    assert plan.cold == 0 or make is gpu
    with pytest.raises(DoesNotFit):
        make_plan(Machine((make(smallest - 1),), 1 << 50), spec, sizes, wishes)


@laws
@given(st.data(), models(), budgets)
def test_a_pool_that_does_not_fit_is_a_bound(data: st.DataObject, model: tuple[ModelSpec, Sizes], budget: int) -> None:
    spec, sizes = model
    wishes = data.draw(wishes_for(spec))
    assume(wishes.pool is not None)
    try:
        plan = make_plan(one_gpu(budget), spec, sizes, wishes)
    except DoesNotFit:
        with pytest.raises(DoesNotFit):
            make_plan(one_gpu(budget), spec, sizes, replace(wishes, pool=None))
        return
    stage = plan.stage(0)
    assume(stage.page_bytes)
    assert plan.wishes == wishes and stage.pool_pages <= min(wishes.full_pages, pages_for(wishes.pool or 0))
    if stage.pool_pages < min(wishes.full_pages, pages_for(wishes.pool or 0)):
        more = replace(wishes, pool=(stage.pool_pages + 1) * PAGE)
        with pytest.raises(DoesNotFit):
            Placer(one_gpu(budget), spec, sizes, more).place()


@laws
@given(st.data(), models(), budgets)
def test_the_smallest_ram_that_the_error_names_is_the_smallest(
    data: st.DataObject, model: tuple[ModelSpec, Sizes], budget: int
) -> None:
    spec, sizes = model
    wishes = data.draw(wishes_for(spec))
    plan_or_skip(one_gpu(budget), spec, sizes, wishes)
    with pytest.raises(DoesNotFit, match="RAM of") as refused:
        Placer(one_gpu(budget, ram=1), spec, sizes, wishes).place()
    smallest = int(str(refused.value).split("(")[1].split(" bytes")[0].replace(",", ""))
    assert Placer(one_gpu(budget, ram=smallest), spec, sizes, wishes).place().host_left >= 0
    with pytest.raises(DoesNotFit):
        Placer(one_gpu(budget, ram=smallest - 1), spec, sizes, wishes).place()


@laws
@given(placements())
def test_every_plan_can_be_shown(placement: tuple[Machine, ModelSpec, Sizes, Wishes]) -> None:
    plan_or_skip(*placement)
    plan = make_plan(*placement)
    text = show_plan(plan, 80)
    assert max(map(len, text.splitlines())) <= 80
    told = " ".join(text.split())
    assert all(stage.device.name in told for stage in plan.stages)
    assert all(reason in told for reason in plan.reasons)
    assert len(plan.reasons) >= len(plan.stages)


def test_the_smallest_budget_leaves_what_is_needed_beside_its_margin() -> None:
    for needed in (*range(1, 500), *range(16 << 30, (16 << 30) + 100)):
        budget = smallest_budget(needed)
        assert budget - margin(budget) >= needed
        assert budget - 1 - margin(budget - 1) < needed


def test_on_a_cpu_every_expert_is_hot() -> None:
    spec, sizes = moe()
    plan = make_plan(Machine((cpu(1 << 30),), 1 << 31), spec, sizes, Wishes(4096))
    assert plan.cold == 0
    assert plan.stage(0).bytes_of("hot experts") == sizes.expert_bytes
    assert not any("weights become" in reason for reason in plan.reasons), "they stay as they are"
    bounded = make_plan(Machine((cpu(1 << 30),), 1 << 31), spec, sizes, Wishes(4096, pool=1024))
    assert not any("more experts hot" in reason for reason in bounded.reasons), "no pool makes them so"
    assert any("pool of 1,024 tokens, as asked; full KV would take" in reason for reason in bounded.reasons)

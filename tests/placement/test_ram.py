"""A stage on a CPU lives in the RAM that everything else beside the devices needs too."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from support.paper_machine import GIB, MIB, cpu, dense, gpu, models, moe, one_gpu, wishes_for

from rekindle.config import parse_bytes
from rekindle.errors import DoesNotFit
from rekindle.placement import (
    Machine,
    Plan,
    Sizes,
    Wishes,
    alternatives,
    known_shapes,
    make_plan,
    plan_as_json,
    show_plan,
    sizes_from_tensors,
)
from rekindle.placement.place import Placer
from rekindle.placement.reserve import LOOKUP_BYTES
from rekindle.placement.shapes import known_tensors
from rekindle.placement.show import bar
from rekindle.placement.types import pages_for
from rekindle.placement.units import at_least
from rekindle.spec import PAGE, ModelSpec

laws = settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
rams = st.integers(1, 2 * GIB) | st.integers(1, 200 * MIB)
Model = tuple[ModelSpec, Sizes]


def of_cpu(ram: int) -> Machine:
    """As the command line makes it: the CPU may have all of the RAM."""
    return Machine((cpu(ram),), ram)


@st.composite
def mixed(draw: st.DrawFn) -> Callable[[int], Machine]:
    """A GPU and a CPU in either order."""
    card, first = gpu(draw(st.integers(300 * MIB, GIB))), draw(st.booleans())
    return lambda ram: Machine((card, cpu(ram)) if first else (cpu(ram), card), ram)


def expanded(model: Model) -> Model:
    """With weights four times as large on a CPU."""
    spec, sizes = model
    layers = tuple(
        replace(each, mixer=4 * each.mixer, dense=4 * each.dense, shared=4 * each.shared, expert=4 * each.expert)
        for each in sizes.layers
    )
    return spec, replace(sizes, on_cpu=replace(sizes, head=4 * sizes.head, layers=layers))


def big_model_on_a_cpu() -> Model:
    """The 35B-A3B with every matrix in float32 on a CPU, and the embedding as stored."""
    spec, sizes = known_shapes("35B-A3B", "Q4_K_M")
    tensors = known_tensors(spec, "Q4_K_M")
    in_float32 = {name: (shape, 4 * math.prod(shape)) for name, (shape, _) in tensors.items()}
    return spec, replace(
        sizes, on_cpu=replace(sizes_from_tensors(spec, in_float32), embedding=sizes.embedding, widest=0)
    )


def refusal(machine: Machine, spec: ModelSpec, sizes: Sizes, wishes: Wishes) -> str | None:
    try:
        Placer(machine, spec, sizes, wishes).place()
    except DoesNotFit as error:
        return str(error)
    return None


def least_ram(make: Callable[[int], Machine], model: Model, wishes: Wishes) -> int:
    """As a refusal names it."""
    said = refusal(make(1), *model, wishes)
    assume(said is not None and "RAM of" in said)
    assert said is not None
    return int(said.split("(")[1].split(" bytes")[0].replace(",", ""))


def check_least_ram(make: Callable[[int], Machine], ram: int, model: Model, wishes: Wishes) -> None:
    """What a refusal names is enough, in bytes and as it is written, and a byte less is not."""
    said = refusal(make(ram), *model, wishes)
    assume(said is not None and "RAM of" in said)
    assert said is not None
    least = int(said.split("(")[1].split(" bytes")[0].replace(",", ""))
    assert least > ram
    assert refusal(make(least), *model, wishes) is None
    written = said.split("at least ")[1].split(" (")[0].replace(" ", "")
    assert refusal(make(parse_bytes(written, "--ram")), *model, wishes) is None
    assert refusal(make(least - 1), *model, wishes) is not None
    assert least <= MIB or refusal(make(least - MIB), *model, wishes) is not None
    if "a context of " in said:
        context = int(said.split("a context of ")[1].split(";")[0].replace(",", ""))
        assert refusal(make(ram), *model, replace(wishes, context=context)) is None


@laws
@given(st.data(), models(), st.booleans(), rams)
def test_a_cpu_is_refused_with_the_least_ram_that_is_enough(
    data: st.DataObject, model: Model, grows: bool, ram: int
) -> None:
    model = expanded(model) if grows else model
    check_least_ram(of_cpu, ram, model, data.draw(wishes_for(model[0])))


@laws
@given(st.data(), models(), st.booleans(), mixed(), rams, st.booleans())
def test_a_gpu_and_a_cpu_are_refused_with_the_least_ram_that_is_enough(
    data: st.DataObject, model: Model, grows: bool, make: Callable[[int], Machine], ram: int, asks: bool
) -> None:
    model = expanded(model) if grows else model
    assume(model[0].layers > 1)
    wishes = data.draw(wishes_for(model[0]))
    check_least_ram(make, ram, model, replace(wishes, split=(1.0, 1.0)) if asks else wishes)


@laws
@given(st.data(), models(), rams, st.integers(0, GIB))
def test_more_ram_never_makes_the_pool_of_a_cpu_smaller(
    data: st.DataObject, model: Model, spare: int, more: int
) -> None:
    wishes = data.draw(wishes_for(model[0]))
    ram = least_ram(of_cpu, model, wishes) + spare
    small, large = (Placer(of_cpu(size), *model, wishes).place() for size in (ram, ram + more))
    assert small.pool_pages <= large.pool_pages


@laws
@given(st.data(), models(), rams)
def test_the_pool_of_a_cpu_is_what_the_others_in_ram_leave(data: st.DataObject, model: Model, spare: int) -> None:
    wishes = replace(data.draw(wishes_for(model[0], pools=False)), kv_mode="exact")
    placer = Placer(of_cpu(least_ram(of_cpu, model, wishes) + spare), *model, wishes)
    plan = placer.place()
    if plan.pool_may_fill:
        assert plan.host_left < plan.stage(0).page_bytes + (PAGE * LOOKUP_BYTES if wishes.rewind_rows else 0)
        assert plan.pool_pages * PAGE >= wishes.context, "one sequence comes before the snapshots"
        one_only = plan.pool_pages == max(placer.least, pages_for(wishes.context))
        assert plan.snapshot_ram == wishes.cache_ram or one_only, "snapshots come before further sequences"


@laws
@given(st.data(), models(), mixed() | st.just(of_cpu), rams)
def test_the_budget_for_full_kv_gives_full_kv(
    data: st.DataObject, model: Model, make: Callable[[int], Machine], spare: int
) -> None:
    spec, sizes = expanded(model)
    assume(spec.layers >= len(make(1).devices))
    wishes = data.draw(wishes_for(spec, pools=False))
    machine = make(least_ram(make, (spec, sizes), wishes) + spare)
    named = {each.name: each.changes for each in alternatives(machine, spec, sizes, wishes)}
    plan = Placer(machine, spec, sizes, wishes).place()
    name = "budget for full KV and all experts hot" if plan.cold else "budget for full KV"
    assert (name in named) == plan.pool_may_fill
    if plan.pool_may_fill:
        larger, split = fed_back(machine, named[name])
        again = Placer(larger, spec, sizes, replace(wishes, split=split)).place()
        assert not again.pool_may_fill
        assert again.cold == 0


def fed_back(machine: Machine, changes: str) -> tuple[Machine, tuple[int, ...] | None]:
    """The machine with the budgets that an alternative names, and its split."""
    needs, _, split = changes.removeprefix("needs ").partition(" with --split ")
    sizes = {each.split()[0]: parse_bytes("".join(each.split()[1:]), "size") for each in needs.split(", ")}
    ram = sizes.get("RAM", machine.ram)
    devices = (
        replace(each, budget=ram if each.is_cpu else sizes.get(each.name, each.budget)) for each in machine.devices
    )
    return Machine(tuple(devices), ram), tuple(map(int, split.split(","))) if split else None


def test_a_cpu_starts_with_a_smaller_pool_where_full_kv_does_not_fit() -> None:
    spec, sizes = dense()
    wishes = Wishes(8192, sequences=16, cache_ram=32 * MIB)  # 16 MiB of KV a sequence
    plan = make_plan(of_cpu(300 * MIB), spec, sizes, wishes)
    assert 8192 <= plan.stage(0).pool_tokens < 16 * 8192
    assert plan.snapshot_ram == 32 * MIB
    assert make_plan(of_cpu(GIB), spec, sizes, wishes).pool_may_fill is False


def test_the_35b_on_a_cpu_is_refused_with_the_reason_and_starts_with_what_is_named() -> None:
    spec, sizes = big_model_on_a_cpu()
    wishes = Wishes(262_144, sequences=16, kv_type="f32", compute_bytes=4, cache_ram=2 * GIB)
    with pytest.raises(DoesNotFit, match=r"RAM of 64\.00 GiB is too small, at least 1\d\d\.\d\d GiB") as refused:
        make_plan(of_cpu(64 * GIB), spec, sizes, wishes)
    assert "cpu: weights become float32 on a CPU, 127.49 GiB" in str(refused.value)
    assert "instead of 19.71 GiB" in str(refused.value)
    plan = make_plan(of_cpu(192 * GIB), spec, sizes, wishes)
    assert plan.pool_may_fill
    assert plan.snapshot_ram == 2 * GIB
    shared = Machine((gpu(24 * GIB, "cuda:0"), cpu(64 * GIB)), 64 * GIB)
    assert make_plan(shared, spec, sizes, replace(wishes, kv_type="bf16", compute_bytes=2)).host_left >= 0


def test_a_split_that_ram_has_no_room_for_gives_way_to_one_that_needs_less() -> None:
    spec, sizes = expanded(dense())
    wishes, card = Wishes(4096), gpu(500 * MIB, "gpu")  # the card holds nearly all; on the CPU a layer is 44 MiB

    def make(ram: int) -> Machine:
        return Machine((card, cpu(ram, "cpu", 9.0)), ram)

    rich, poor = (Placer(make(ram), spec, sizes, wishes).place() for ram in (4 * GIB, 400 * MIB))
    assert len(poor.stage(1).span) < len(rich.stage(1).span)


def test_left_is_shown_once_for_all_that_live_in_ram() -> None:
    spec, sizes = dense()
    plan = make_plan(of_cpu(GIB), spec, sizes, Wishes(4096, cache_ram=100 * MIB))
    stage = plan.stage(0)
    (row,) = (line for line in show_plan(plan).splitlines() if line.startswith("left"))
    assert len(row.split()) == 3  # the word, a number and its unit
    assert plan.left_of(stage) == plan.host_left < stage.left
    assert plan_as_json(plan)["stages"][0]["left"] == plan.host_left
    picture = bar(stage, plan.spec, plan.left_of(stage))
    assert picture.count("B") == pytest.approx((plan.host_total - stage.total) / GIB * len(picture), abs=1)


def reasons_of(plan: Plan) -> str:
    return "\n".join(plan.reasons)


def test_full_kv_is_not_everything() -> None:
    plan = make_plan(one_gpu(504 * MIB), *moe(), Wishes(8192))
    assert plan.cold
    assert not plan.pool_may_fill
    assert "full KV fits (8,192 tokens, all sequences together), so nothing is paged out" in reasons_of(plan)
    assert "everything fits" not in reasons_of(plan)
    names = [other.name for other in plan.alternatives]
    assert "budget for all experts hot" in names
    assert not any("full KV" in name for name in names), "it is there already"


def test_the_plan_says_what_a_small_pool_costs_in_exact_mode() -> None:
    spec, sizes = dense()
    wishes = Wishes(131_072, pool=8192)  # 2 KiB a token
    said = "gpu: a sequence at the context limit reads up to 240.0 MiB of KV over PCIe per token"
    assert said in reasons_of(make_plan(one_gpu(GIB // 2), spec, sizes, wishes))
    for other in (replace(wishes, kv_mode="sparse"), replace(wishes, context=8192, sequences=4)):
        assert "over PCIe" not in reasons_of(make_plan(one_gpu(GIB // 2), spec, sizes, other))
    assert "over PCIe" not in reasons_of(make_plan(of_cpu(GIB // 2), spec, sizes, wishes))


def test_weights_are_compared_as_the_rows_of_the_table_count_them() -> None:
    spec, sizes = expanded(dense())
    here = make_plan(of_cpu(GIB), spec, sizes, Wishes(4096))
    there = make_plan(one_gpu(GIB), spec, sizes, Wishes(4096))
    names = ("embedding", "embedding rows (as stored)", "mixers", "dense ffn", "final norm", "head")
    on_cpu, on_gpu = (
        sum(item.bytes for item in (*plan.stage(0).items, *plan.host_items) if item.name in names)
        for plan in (here, there)
    )
    said = f"weights become bfloat16 on a CPU, {on_cpu / MIB:.1f} MiB instead of {on_gpu / MIB:.1f} MiB on a GPU"
    assert said in reasons_of(here)


def test_what_is_at_least_needed_is_never_rounded_down() -> None:
    for size in (*range(1, 5 * MIB, 77_777), *range(GIB - 5, GIB + 5), *range(6 * GIB, 6 * GIB + 20 * MIB, 99_999)):
        assert size <= parse_bytes(at_least(size).replace(" ", ""), "--ram") <= size + max(MIB // 10, GIB // 100)

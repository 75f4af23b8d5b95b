"""Figures that a reader can check by eye."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from support.paper_machine import GIB, KIB, MIB, cpu, dense, gpu, moe, one_gpu

from rekindle.errors import BadConfig, BadModelFile, DoesNotFit
from rekindle.placement import (
    Device,
    Machine,
    Plan,
    Wishes,
    alternatives,
    known_shapes,
    make_plan,
    plan_as_json,
    show_plan,
    sizes_from_tensors,
    way_out,
)
from rekindle.placement.mixers import MixerSums
from rekindle.placement.place import Placer
from rekindle.placement.shapes import known_tensors
from rekindle.placement.show import BAR, bar
from rekindle.placement.table import cold_expert_table
from rekindle.placement.units import gib
from rekindle.spec import PAGE


def plan_of(model: str, mix: str, budget: int, wishes: Wishes) -> Plan:
    return make_plan(one_gpu(budget * GIB), *known_shapes(model, mix), wishes)


@pytest.mark.parametrize(
    ("model", "kv", "state", "window"),
    [("35B-A3B", 20 * KIB, 60 * MIB, 2.8125), ("27B", 64 * KIB, 144 * MIB, 5.625)],
)
def test_state_and_kv_of_the_known_models(model: str, kv: int, state: int, window: float) -> None:
    spec, _ = known_shapes(model, "Q4_K_M")
    mixers = MixerSums(spec).of(spec.whole)
    assert mixers.page_bytes("bf16") == PAGE * kv
    assert mixers.slot_bytes() == {"recurrent state": state, "conv windows": window * MIB}


def test_q8_kv_of_the_known_models() -> None:
    """10.6 KiB and 34 KiB a token."""
    small, large = (known_shapes(name, "Q4_K_M")[0] for name in ("35B-A3B", "27B"))
    assert small.attention.token_bytes("q8") * 10 == 10_880
    assert large.attention.token_bytes("q8") * 16 == 34 * KIB


def test_rewind_rows_are_cheaper_than_states_per_token() -> None:
    """27B, 16 rows: k of 16 heads and δ of 48, 128 each, g, and 10,240 convolution inputs in bfloat16, and the window
    before them in float32: less than a megabyte for each of 48 layers. A state per row would be 2.25 GiB in all."""
    spec, _ = known_shapes("27B", "Q4_K_M")
    mixers = MixerSums(spec).of(spec.whole)
    rows = 16 * (10_240 * 2 + (16 * 128 + 48 * (128 + 1)) * 4)
    assert mixers.rewind_bytes(16, 2) == 48 * (rows + 3 * 10_240 * 4)
    assert mixers.rewind_bytes(16, 2) / 48 < 1e6
    assert mixers.rewind_bytes(16, 2) < 16 * mixers.slot_bytes()["recurrent state"] / 50
    assert mixers.rewind_bytes(0, 2) == 0


def test_file_sizes_of_the_known_models() -> None:
    """Known files: 27B Q4_K_M 16.5 GB, 35B-A3B Q4_K_M 21 GB, Q3_K_M 16 to 17 GB."""
    for model, mix, size in (("27B", "Q4_K_M", 16.5), ("35B-A3B", "Q4_K_M", 21.2), ("35B-A3B", "Q3_K_M", 16.0)):
        spec, _ = known_shapes(model, mix)
        assert sum(nbytes for _, nbytes in known_tensors(spec, mix).values()) / 1e9 == pytest.approx(size, rel=0.01)


def test_one_expert_of_the_35b() -> None:
    """2 · 2048 · 512 values of Q4_K and as many again halved in Q4_K or Q6_K: 1.69 or 1.95 MiB."""
    _, sizes = known_shapes("35B-A3B", "Q4_K_M")
    values = 2048 * 512
    assert {layer.expert for layer in sizes.layers} == {
        3 * values * 144 // 256,
        2 * values * 144 // 256 + values * 210 // 256,
    }
    assert sizes.experts == 10_240


def test_131072_context_on_24_gib_has_no_cold_experts() -> None:
    for mix in ("Q3_K_M", "Q4_K_M"):
        assert plan_of("35B-A3B", mix, 24, Wishes(131_072)).cold == 0


def test_kv_counts_only_the_attention_layers_of_a_stage() -> None:
    spec, sizes = known_shapes("35B-A3B", "Q4_K_M")
    machine = Machine((gpu(16 * GIB, "a"), gpu(16 * GIB, "b")), 64 * GIB)
    first, second = make_plan(machine, spec, sizes, Wishes(8192, split=(7, 33))).stages
    assert first.page_bytes == 1 * 64 * 2 * KIB  # layer 3
    assert second.page_bytes == 9 * 64 * 2 * KIB


def test_state_is_reserved_per_slot() -> None:
    spec, sizes = known_shapes("35B-A3B", "Q4_K_M")
    stage = make_plan(one_gpu(24 * GIB), spec, sizes, Wishes(8192, sequences=4, rewind_rows=16)).stage(0)
    assert stage.bytes_of("recurrent state") == 4 * 60 * MIB
    assert stage.bytes_of("conv windows") == 4 * 2.8125 * MIB
    assert stage.bytes_of("rewind rows") == 5 * MixerSums(spec).of(spec.whole).rewind_bytes(16, 2)  # padding is one
    assert stage.bytes_of("padding slot and page") == 62.8125 * MIB + 64 * 20 * KIB
    assert stage.bytes_of("captures in flight") == 2 * (62.8125 * MIB + 64 * 20 * KIB) + 64 * 64 * 20 * KIB


def test_a_stage_of_deltanet_layers_has_no_kv_and_no_pool_to_fill() -> None:
    spec, sizes = moe()
    machine = Machine((gpu(GIB, "a"), gpu(GIB, "b")), 8 * GIB)
    first = make_plan(machine, spec, sizes, Wishes(131_072, split=(3, 5))).stage(0)
    assert (first.page_bytes, first.bytes_of("KV pool"), first.pool_may_fill) == (0, 0, False)


def test_sizes_come_from_a_header() -> None:
    spec, _ = known_shapes("35B-A3B", "Q4_K_M")
    tensors = known_tensors(spec, "Q4_K_M")
    sizes = sizes_from_tensors(spec, tensors | {"blk.40.nextn.eh_proj.weight": ((1, 4096), 8192)})
    assert sizes.embedding + sizes.head + sizes.norms + sum(layer.total for layer in sizes.layers) == sum(
        nbytes for _, nbytes in tensors.values()
    )
    assert sizes.widest == 2 * 256 * 512 * 2048  # gate and up of a layer's experts, more than the head


def test_fused_expert_stacks_weigh_the_same() -> None:
    spec, sizes = known_shapes("35B-A3B", "Q4_K_M")
    tensors: dict[str, Any] = {}
    for name, (shape, size) in known_tensors(spec, "Q4_K_M").items():
        if "ffn_gate_exps" in name:
            tensors[name.replace("gate", "gate_up")] = ((256, 1024, 2048), 2 * size)
        elif "ffn_up_exps" not in name:
            tensors[name] = (shape, size)
    assert sizes_from_tensors(spec, tensors).layers == sizes.layers


def test_a_tied_model_loads_its_embedding_as_head() -> None:
    spec, _ = known_shapes("27B", "Q4_K_M")
    tensors = known_tensors(spec, "Q4_K_M")
    del tensors["output.weight"]
    with pytest.raises(BadModelFile, match=r"no tensor output\.weight"):
        sizes_from_tensors(spec, tensors)
    sizes = sizes_from_tensors(replace(spec, tied=True), tensors)
    assert sizes.head == sizes.embedding


def test_bad_headers_are_one_clear_error() -> None:
    spec, _ = known_shapes("35B-A3B", "Q4_K_M")
    tensors = known_tensors(spec, "Q4_K_M")
    few = tensors | {"blk.0.ffn_up_exps.weight": ((128, 512, 2048), 128)}
    with pytest.raises(BadModelFile, match=r"layer 0: ffn_up_exps\.weight holds 128 experts, the model has 256"):
        sizes_from_tensors(spec, few)
    odd = tensors | {"blk.0.ffn_up_exps.weight": ((256, 512, 2048), 257)}
    with pytest.raises(BadModelFile, match="257 bytes, which 256 experts cannot share evenly"):
        sizes_from_tensors(spec, odd)
    missing = {name: tensor for name, tensor in tensors.items() if not name.startswith("blk.7.")}
    with pytest.raises(BadModelFile, match="no tensors of layer 7, the model has 40 layers"):
        sizes_from_tensors(spec, missing)
    routed = {name: tensor for name, tensor in tensors.items() if "exps" not in name}
    with pytest.raises(BadModelFile, match="layer 0 has no expert tensors, the model has 256"):
        sizes_from_tensors(spec, routed)
    with pytest.raises(BadModelFile, match="layer 'x', which is not a number"):
        sizes_from_tensors(spec, tensors | {"blk.x.attn_q.weight": ((1,), 4)})
    with pytest.raises(BadModelFile, match=r"no tensor token_embd\.weight"):
        sizes_from_tensors(spec, {})


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"context": 0}, "context is 0, it must lie between 1 and 1,048,576"),
        ({"context": 1 << 21}, "context is 2,097,152"),
        ({"sequences": 0}, "sequences is 0"),
        ({"kv_type": "q4"}, "--kv-type is 'q4', known types are bf16, f16, f32, q8"),
        ({"kv_mode": "fast"}, "--kv-mode is 'fast', known modes are exact, sparse"),
        ({"pool": 0}, "pool is 0"),
        ({"expert_cache_share": 1.5}, "expert_cache_share is 1.5"),
        ({"expert_cache_share": float("nan")}, "expert_cache_share is nan"),
        ({"rewind_rows": -1}, "rewind_rows is -1"),
        ({"compute_bytes": 3}, "compute_bytes is 3, activations are 2 or 4 bytes wide"),
        ({"chunk": 0}, "chunk is 0"),
        ({"drafter_bytes": -1}, "drafter_bytes is -1"),
    ],
)
def test_a_bad_wish_is_one_clear_error(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadConfig, match=sentence):
        replace(Wishes(4096), **change)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Device("x", "tpu", GIB), "of kind 'tpu', known kinds are cuda, hip, cpu"),
        (lambda: Device("x", "cuda", 0), "budget of 0 bytes"),
        (lambda: Device("x", "cuda", GIB, float("inf")), "speed inf"),
        (lambda: Device("x", "cuda", GIB, -1.0), "speed -1.0"),
        (lambda: Device("x", "cpu", GIB), "its memory is host memory, but host is False"),
        (lambda: Machine((), GIB), "has 0 devices"),
        (lambda: Machine((gpu(GIB), gpu(GIB)), GIB), "two devices share a name: gpu, gpu"),
        (lambda: Machine((gpu(GIB),), 0), "0 bytes of RAM"),
        (lambda: known_shapes("7B", "Q4_K_M"), "model '7B' is not known, known are 27B, 35B-A3B"),
        (lambda: known_shapes("27B", "Q1"), "mix 'Q1' is not known, known are Q3_K_M, Q4_K_M"),
    ],
)
def test_a_bad_machine_or_shape_is_one_clear_error(make: Any, sentence: str) -> None:
    with pytest.raises(BadConfig, match=sentence):
        make()


def test_wishes_that_contradict_the_model_are_one_clear_error() -> None:
    spec, sizes = moe()
    for wishes, sentence in (
        (Wishes(4096, counts=[[1] * 16] * 7), "routing counts have 7 layers, the model has 8"),
        (Wishes(4096, counts=[[1] * 15] * 8), "routing counts of layer 0 name 15 experts, the model has 16"),
        (Wishes(4096, counts=[[-1.0] * 16] * 8), "finite numbers of at least 0"),
        (Wishes(4096, counts=[[float("nan")] * 16] * 8), "finite numbers of at least 0"),
        (Wishes(4096, pool=512), "a pool of 512 tokens is too small: 1 sequences and chunks of 512 tokens need"),
    ):
        with pytest.raises(BadConfig, match=sentence):
            make_plan(one_gpu(GIB), spec, sizes, wishes)
    with pytest.raises(BadConfig, match="sizes describe 8 layers, the model has 4"):
        make_plan(one_gpu(GIB), moe(layers=4)[0], sizes, Wishes(4096))
    odd = replace(spec, mixers=(replace(spec.attention, head_dim=24),) * spec.layers)
    with pytest.raises(BadConfig, match="q8 packs 32 values at a time, the model's heads have 24"):
        make_plan(one_gpu(GIB), odd, sizes, Wishes(4096, kv_type="q8"))


def test_what_does_not_fit_is_named_with_the_budget_that_would() -> None:
    with pytest.raises(DoesNotFit, match=r"gpu has a budget of 8\.00 GiB, layers \[0, 64\) need at least 1\d") as error:
        plan_of("27B", "Q4_K_M", 8, Wishes(8192))
    assert "dense ffn 9.65 GiB" in str(error.value)


def test_ram_too_small_for_the_context_names_one_that_fits() -> None:
    spec, sizes = known_shapes("35B-A3B", "Q4_K_M")
    machine = one_gpu(20 * GIB, ram=8 * GIB)
    with pytest.raises(DoesNotFit, match="this RAM is enough for a context of") as error:
        make_plan(machine, spec, sizes, Wishes(1 << 20))
    longest = int(str(error.value).rsplit(" ", 1)[1].replace(",", ""))
    assert make_plan(machine, spec, sizes, Wishes(longest)).host_left >= 0
    with pytest.raises(DoesNotFit):
        make_plan(machine, spec, sizes, Wishes(longest + 64))


def test_features_are_counted_on_the_stages_that_hold_the_layers_which_a_drafter_reads() -> None:
    spec, sizes = known_shapes("27B", "Q4_K_M")
    machine = Machine((gpu(16 * GIB, "cuda:0"), gpu(16 * GIB, "cuda:1")), 64 * GIB)
    wishes = Wishes(8192, split=(32, 32), chunk=2048, drafter_bytes=4 * GIB, taps=(1, 16, 31, 46, 61))
    first, last = make_plan(machine, spec, sizes, wishes).stages
    rows = 3 * 2048 + wishes.sequences * (1 + wishes.rewind_rows)
    assert first.bytes_of("features") == 3 * rows * 5120 * 2, "three taps, three copies of a chunk, one of other rows"
    assert (last.bytes_of("features"), last.bytes_of("drafter")) == (0, 4 * GIB), "the drafter's bytes have all of them"
    assert "features" in show_plan(make_plan(machine, spec, sizes, wishes))
    far = make_plan(machine, spec, sizes, replace(wishes, drafter_bytes=0, drafter_ram=4 * GIB))
    assert far.stage(1).bytes_of("features") == 2 * rows * 5120 * 2, "the head is in another process"


def test_little_ram_limits_what_all_sequences_hold_together() -> None:
    spec, sizes = known_shapes("35B-A3B", "Q4_K_M")
    plan = make_plan(one_gpu(20 * GIB, ram=16 * GIB), spec, sizes, Wishes(262_144, sequences=4))
    assert 262_144 <= plan.live_pages * 64 < 4 * 262_144
    assert any("not every sequence can reach 262,144 at once" in reason for reason in plan.reasons)


def test_ram_is_used_to_the_last_page() -> None:
    spec, sizes = dense()
    wishes = Wishes(8192, sequences=4, pool=4096)
    enough = Placer(one_gpu(440 * MIB), spec, sizes, wishes).place()
    page = enough.stage(0).page_bytes
    for short in range(0, 200 * page, 5 * page // 2):  # RAM that is so many bytes short of full KV
        plan = Placer(one_gpu(440 * MIB, ram=enough.host_total - short), spec, sizes, wishes).place()
        short -= _stock(enough) - _stock(plan)  # less RAM has less of it pinned
        assert plan.live_pages == wishes.full_pages - max(0, -(-short // page))


def _stock(plan: Plan) -> int:
    return sum(item.bytes for item in plan.host_items if item.name == "pinned stock")


def test_the_pinned_stock_is_a_small_part_of_the_ram_and_shared_by_the_gpus() -> None:
    spec, sizes = moe()
    for ram, devices, slabs in (
        (256 * GIB, (gpu(GIB),), [256]),
        (64 * GIB, (gpu(GIB),), [128]),
        (16 * GIB, (gpu(GIB),), [32]),
        (16 * GIB, (gpu(GIB, "a"), gpu(GIB, "b")), [16, 16]),
        (16 * GIB, (cpu(GIB), gpu(GIB)), [0, 32]),
        (16 * GIB, (cpu(GIB),), [0]),
    ):
        plan = make_plan(Machine(devices, ram), spec, sizes, Wishes(4096))
        assert [stage.slabs for stage in plan.stages] == slabs
        assert _stock(plan) == sum(slabs) * 16 * MIB
        assert _stock(plan) <= ram // 32


def test_the_pinned_stock_gives_way_before_a_plan_is_refused() -> None:
    spec, sizes = dense()
    wishes = Wishes(8192, pool=4096)
    enough = make_plan(one_gpu(440 * MIB, ram=64 * GIB), spec, sizes, wishes)
    plan = make_plan(one_gpu(440 * MIB, ram=enough.host_total - _stock(enough)), spec, sizes, wishes)
    assert (_stock(plan), plan.stage(0).slabs, plan.host_left) == (0, 0, 0)


def test_the_embedding_lies_where_it_is_loaded() -> None:
    spec, sizes = dense()
    on_gpu = make_plan(one_gpu(600 * MIB), spec, sizes, Wishes(4096))
    assert on_gpu.stage(0).bytes_of("embedding") == sizes.embedding
    assert all(item.name != "embedding rows (as stored)" for item in on_gpu.host_items)
    both = make_plan(Machine((cpu(GIB), gpu(GIB)), 8 * GIB), spec, sizes, Wishes(4096))
    assert [stage.bytes_of("embedding") for stage in both.stages] == [0, 0]
    assert any(item.name == "embedding rows (as stored)" for item in both.host_items)


def test_the_staging_area_is_there_for_every_kind_of_cold_expert_and_gone_when_all_are_hot() -> None:
    spec, sizes = moe()
    kinds = tuple(replace(layer, expert=3 * MIB if i % 2 else 2 * MIB) for i, layer in enumerate(sizes.layers))
    sizes = replace(sizes, layers=kinds)
    short = make_plan(one_gpu(650 * MIB), spec, sizes, Wishes(4096))
    assert short.cold
    assert short.stage(0).bytes_of("expert staging") == 2 * 16 * (2 + 3) * MIB
    enough = make_plan(one_gpu(GIB), spec, sizes, Wishes(4096))
    assert (enough.cold, enough.stage(0).bytes_of("expert staging")) == (0, 0)


def test_sparse_mode_pays_for_page_keys_and_never_holds_more_pages_than_have_them() -> None:
    spec, sizes = dense()
    wishes = Wishes(1 << 20, sequences=4, kv_mode="sparse")
    plan = make_plan(one_gpu(GIB), spec, sizes, wishes)
    pages = (1 << 20) // 64
    assert plan.stage(0).bytes_of("page keys") == 3 * pages * 2 * 4 * 64 * 2  # attention layers, heads, dim, float16
    assert plan.live_pages == pages
    assert make_plan(one_gpu(GIB), spec, sizes, replace(wishes, kv_policy="lru")).stage(0).bytes_of("page keys") == 0


def test_snapshots_get_what_was_asked_for_or_what_there_is_and_the_plan_says_so() -> None:
    spec, sizes = dense()
    wishes = Wishes(8192, sequences=4, pool=4096, cache_ram=GIB)
    plan = make_plan(one_gpu(440 * MIB, ram=8 * GIB), spec, sizes, wishes)
    assert plan.snapshot_ram == GIB
    assert not any("snapshots get" in reason for reason in plan.reasons)
    small = make_plan(one_gpu(440 * MIB, ram=200 * MIB), spec, sizes, wishes)
    assert 0 < small.snapshot_ram < 100 * MIB
    assert small.host_left == 0
    assert any("snapshots get" in reason and "1.00 GiB asked for" in reason for reason in small.reasons)
    assert small.live_pages * PAGE == 8192  # one sequence may still reach the limit


def test_unified_memory_counts_against_ram() -> None:
    spec, sizes = moe()
    plan = make_plan(Machine((Device("apu", "hip", 600 * MIB, host=True),), GIB), spec, sizes, Wishes(4096))
    assert any(item.name == "all of apu" and item.bytes == plan.stage(0).total for item in plan.host_items)


def test_alternatives_say_what_they_change() -> None:
    spec, sizes = known_shapes("35B-A3B", "Q4_K_M")
    names = [
        other.name
        for other in alternatives(one_gpu(20 * GIB), spec, sizes, Wishes(131_072, sequences=4, expert_cache_share=0))
    ]
    budgets = ["budget for all experts hot", "budget for full KV and all experts hot"]
    assert names == ["context 8,192", "q8 KV", "2 sequences", *budgets]
    assert alternatives(one_gpu(48 * GIB), spec, sizes, Wishes(131_072)) == ()


def test_a_plan_without_cold_experts_offers_no_budget_for_hot_ones() -> None:
    machine = Machine((cpu(48 * GIB),), 48 * GIB)
    others = alternatives(machine, *known_shapes("35B-A3B", "Q4_K_M"), Wishes(262_144, sequences=16))
    assert [other.name for other in others if "budget" in other.name] == ["budget for full KV"]
    assert not any("hot" in other.changes for other in others)


@pytest.mark.parametrize("mode", ["exact", "sparse"])
@pytest.mark.parametrize("budget", [20, 24, 32, 40])
def test_fewer_sequences_and_smaller_kv_are_offered_only_where_they_gain_something(mode: str, budget: int) -> None:
    machine, model = one_gpu(budget * GIB), known_shapes("35B-A3B", "Q4_K_M")
    wishes = Wishes(262_144, sequences=16, kv_mode=mode)
    plan = make_plan(machine, *model, wishes)
    assert plan.pool_may_fill
    names = [other.name for other in plan.alternatives]
    for name, change in (("8 sequences", {"sequences": 8}), ("q8 KV", {"kv_type": "q8"})):
        other = make_plan(machine, *model, replace(wishes, **change))
        gains = other.hot > plan.hot or other.pool_pages > plan.pool_pages or not other.pool_may_fill
        assert (name in names) == gains, name


def test_full_kv_beside_cold_experts_is_offered_as_what_it_takes() -> None:
    """The rule buys pages beyond the pool's target behind the last expert, so both come together or not at all."""
    model, wishes = known_shapes("35B-A3B", "Q4_K_M"), Wishes(131_072)
    named = {other.name: other.changes for other in alternatives(one_gpu(20 * GIB), *model, wishes)}
    assert "budget for full KV" not in named
    needs = float(named["budget for full KV and all experts hot"].split()[2])
    enough, short = (make_plan(one_gpu(int(size * GIB)), *model, wishes) for size in (needs, needs - 0.02))
    assert (enough.cold, enough.pool_may_fill) == (0, False)
    assert short.pool_may_fill


def test_one_budget_is_offered_once() -> None:
    others = alternatives(one_gpu(350 * MIB), *moe(), Wishes(4096, sequences=2, pool=8192))  # the pool is full KV
    changes = [other.changes for other in others]
    assert len(set(changes)) == len(changes)


def test_the_way_out_of_a_card_that_is_too_small_is_named_only_where_it_leads_out() -> None:
    model, wishes = known_shapes("27B", "Q4_K_M"), Wishes(32_768)
    assert way_out(one_gpu(16 * GIB, 64 * GIB), *model, wishes) == "with --devices gpu,cpu it fits"
    assert make_plan(Machine((gpu(16 * GIB), cpu(64 * GIB)), 64 * GIB), *model, wishes).host_left >= 0
    assert way_out(one_gpu(16 * GIB, 2 * GIB), *model, wishes) is None
    assert way_out(Machine((cpu(4 * GIB),), 4 * GIB), *model, wishes) is None, "the CPU is there already"
    two = Machine((gpu(24 * GIB, "a"), gpu(12 * GIB, "b")), 64 * GIB)
    assert way_out(two, *model, replace(wishes, split=(1, 63))) == "with --split auto it fits"


def test_a_shorter_context_is_proposed_where_it_helps() -> None:
    spec, sizes = known_shapes("35B-A3B", "Q4_K_M")
    first = alternatives(one_gpu(20 * GIB), spec, sizes, Wishes(131_072, expert_cache_share=0))[0]
    assert first.name == "context 32,768", "only a context below the pool's size frees anything"
    assert "more hot" in first.changes
    dense_model = known_shapes("27B", "Q4_K_M")
    assert alternatives(one_gpu(24 * GIB), *dense_model, Wishes(262_144))[0].name == "context 65,536"


def test_the_budget_named_for_all_hot_keeps_all_hot() -> None:
    spec, sizes = known_shapes("35B-A3B", "Q4_K_M")
    placer = Placer(one_gpu(16 * GIB), spec, sizes, Wishes(131_072))
    (candidate,) = placer.stage_candidates()
    budget = candidate.budget_for(placer.target, sizes.expert_bytes)
    assert Placer(one_gpu(budget), spec, sizes, placer.wishes).place().cold == 0
    assert Placer(one_gpu(budget - 4 * MIB), spec, sizes, placer.wishes).place().cold > 0


def test_alternatives_help_when_the_wish_does_not_fit() -> None:
    spec, sizes = known_shapes("27B", "Q4_K_M")
    (candidate,) = Placer(one_gpu(24 * GIB), spec, sizes, Wishes(131_072, sequences=8)).stage_candidates()
    machine = one_gpu(candidate.least_budget - MIB)
    found = {other.name: other.changes for other in alternatives(machine, spec, sizes, Wishes(131_072, sequences=8))}
    assert found["4 sequences"].startswith("fits: ")


def test_a_plan_is_shown_whole() -> None:
    plan = plan_of("35B-A3B", "Q4_K_M", 20, Wishes(131_072, sequences=2))
    text = " ".join(show_plan(plan).split())
    for item in (*plan.stage(0).items, *plan.host_items):
        assert item.name in text
    for other in plan.alternatives:
        assert other.changes in text
    assert "or else" in text


def test_many_devices_are_shown_below_each_other_where_the_line_is_short() -> None:
    spec, sizes = dense()
    machine = Machine(tuple(gpu(GIB, f"cuda:{i}") for i in range(8)), 8 * GIB)
    plan = make_plan(machine, spec, sizes, Wishes(4096))
    narrow, wide = show_plan(plan, 80), show_plan(plan, 200)
    assert max(map(len, narrow.splitlines())) <= 80
    for stage in plan.stages:  # every cell of the wide table is in the narrow one
        assert narrow.count(str(stage.span)) == wide.count(str(stage.span)) == 2  # in the table and in the reasons
        assert narrow.count(gib(stage.total)) == wide.count(gib(stage.total))
    assert (narrow.count("\nlayers "), wide.count("\nlayers ")) == (2, 1)


def test_the_picture_explains_what_it_shows_and_a_dense_model_has_no_experts() -> None:
    routed, plain = (
        show_plan(make_plan(one_gpu(600 * MIB), *model, Wishes(4096, cache_ram=0))) for model in (moe(), dense())
    )
    assert "W weights" in routed
    assert "W weights" in plain
    assert "D drafter" not in routed + plain
    assert "E hot experts, R expert cache" in routed
    assert "R expert cache" not in plain
    assert "experts hot / cold" in routed
    assert "experts" not in plain


def test_few_bytes_are_said_as_bytes() -> None:
    assert [gib(size) for size in (0, 1, 12, 1024)] == ["0 bytes", "1 byte", "12 bytes", "1.0 KiB"]
    with pytest.raises(DoesNotFit, match=r"\(1\d,\d{3},\d{3},\d{3} bytes\)"):
        plan_of("27B", "Q4_K_M", 8, Wishes(8192))


def test_the_bar_is_to_scale() -> None:
    spec, sizes = dense()
    stage = make_plan(Machine((cpu(2 * GIB),), 4 * GIB), spec, sizes, Wishes(4096)).stage(0)
    picture = bar(stage, spec, stage.left)
    assert len(picture) == BAR
    assert picture.count("·") == pytest.approx(stage.left / stage.device.budget * BAR, abs=1)


def test_a_plan_is_plain_json() -> None:
    plan = plan_of("35B-A3B", "Q3_K_M", 16, Wishes(131_072))
    told = json.loads(json.dumps(plan_as_json(plan)))
    assert told == plan_as_json(plan)
    assert told["stages"][0]["pool_pages"] == plan.stage(0).pool_pages
    assert sum(item["bytes"] for item in told["stages"][0]["items"]) == told["stages"][0]["total"]
    assert told["cold_experts"] == plan.cold


def test_the_table_shows_what_the_rule_saves() -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in cold_expert_table().splitlines()[2:]]
    assert len(rows) == 2 * 3 * 8
    assert [row[2] for row in rows[:8]] == [f"{8192 << i:,}" for i in range(8)], "8,192 to 1,048,576"
    at_131072 = next(row for row in rows if row[:3] == ["Q3_K_M", "24", "131,072"])
    assert at_131072[3:5] == ["10.00 GiB", "2.50 GiB"]
    assert at_131072[7] == "0"
    for row in rows:
        if row[6] != "does not fit":
            assert int(row[7].replace(",", "")) <= int(row[6].replace(",", ""))


def test_the_table_runs_as_a_module() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "error", "-m", "rekindle.placement.table"], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == cold_expert_table()

"""From a plan's numbers to a stage whose expert slots KV can get."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rekindle.batch import Batch, Segment, Wanted
from rekindle.bench.synth import write_synthetic
from rekindle.build import build_engine
from rekindle.build.planning import plan_numbers
from rekindle.build.shards import arguments
from rekindle.build.stage import StageConfig, load_stage, stage_configs
from rekindle.config import Config
from rekindle.errors import BadConfig
from rekindle.placement import Device, Machine, Plan, Wishes, known_shapes, make_plan, show_plan
from rekindle.stages import LocalStage
from rekindle.weights import WeightFile, open_weights

PAGES_OF_A_SLOT = 1  # of the model below
TOKENS = np.random.default_rng(2).integers(0, 500, 1024).tolist()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> WeightFile:
    return open_weights(write_synthetic(tmp_path_factory.mktemp("lent") / "tiny-moe.gguf", "tiny-moe"))


def config_of(file: WeightFile, **changes: object) -> StageConfig:
    layers, used = file.spec.layers, file.spec.ffn.used
    hot = (tuple(range(file.spec.ffn.experts - used)),) * layers
    config = StageConfig("cpu", file.spec.whole, 2, 4, 40, hot=hot, cache_slots=(used,) * layers)
    return replace(config, **changes)  # type: ignore[arg-type]


def logits(stage: LocalStage) -> torch.Tensor:
    seen = list[torch.Tensor]()
    for at in range(0, len(TOKENS), 128):
        out = stage.forward(Batch((Segment(0, at, tuple(TOKENS[at : at + 128]), Wanted.LAST),)), None).logits
        assert out is not None
        seen.append(out[-1])
    return torch.stack(seen)


def test_a_stage_that_lends_slots_answers_as_one_with_a_fixed_pool_and_keeps_its_pages(file: WeightFile) -> None:
    lends = load_stage(file, config_of(file, lendable=(3,) * file.spec.layers))
    fixed = load_stage(file, config_of(file))
    assert torch.equal(logits(lends), logits(fixed))
    assert lends.work()["pages:lent"] > 0
    assert lends.pool.places > fixed.pool.places
    assert lends.pool.away < fixed.pool.away
    assert "pages:lent" not in fixed.work()
    lends.check()


def test_the_shared_memory_takes_all_slots_of_the_layers_that_lend(file: WeightFile) -> None:
    """Nothing of what the plan counts lies beside it a second time."""
    stage = load_stage(file, config_of(file, lendable=(3,) * file.spec.layers))
    trade = stage._trade
    assert trade is not None
    run = stage.pool.kv[0]
    first, end = run.data_ptr(), run.data_ptr() + run.nbytes
    for ffn in stage.model.routed:
        for plane in ffn.weights.slot_planes():  # type: ignore[union-attr]
            assert first <= plane.data_ptr() < end


@pytest.mark.parametrize("lendable", [0, 3], ids=["slots alone", "and experts"])
def test_a_stage_that_lends_idle_slots_answers_as_one_with_a_fixed_pool(file: WeightFile, lendable: int) -> None:
    """All of what the plan counts as pages, state and lent experts lies in one run."""
    lent = (lendable,) * file.spec.layers if lendable else ()
    lends = load_stage(file, config_of(file, slots=8, slot_pages=PAGES_OF_A_SLOT, lendable=lent))
    fixed = load_stage(file, config_of(file))
    assert (lends.pool.places - fixed.pool.places, lends.pages().total) == (8 * PAGES_OF_A_SLOT, fixed.pages().total)
    lends.open(0)
    assert torch.equal(logits(lends), logits(fixed))
    assert lends.pool.away < fixed.pool.away
    run = lends.pool.kv[0]
    for layer in lends._state.layers.values():
        for tensor in layer.cleared(0):
            assert run.data_ptr() <= tensor.data_ptr() < run.data_ptr() + run.nbytes
    lends.check()


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"slot_pages": 1000}, "not for 1000"), ({"slot_pages": 1, "kv_mode": "sparse"}, "exact mode")],
)
def test_a_shard_that_is_told_more_than_its_slots_hold_says_so(
    file: WeightFile, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(BadConfig, match=said):
        load_stage(file, config_of(file, **changes))


def test_the_plan_says_what_idle_slots_hold_and_the_stage_is_told() -> None:
    plan = default_plan(1 << 37)
    (config,) = stage_configs(plan, "bfloat16")
    assert config.slot_pages == plan.stages[0].slot_pages == 50
    assert "a slot without a sequence lends" in show_plan(plan).replace("\n    ", " ")
    given = arguments([config], "ipc:///x", 1)
    assert given[given.index("--slot-pages") + 1] == "50"
    for given in ({"live_memory": False}, {"pool": 65_536}, {"kv_mode": "sparse"}):
        assert not default_plan(1 << 37, **given).stages[0].slot_pages


def test_layers_whose_cache_is_too_small_for_a_row_keep_slots_for_one(file: WeightFile) -> None:
    """Also where all of a layer's experts are hot."""
    layers, experts, used = file.spec.layers, file.spec.ffn.experts, file.spec.ffn.used
    hot = (tuple(range(experts)), *((tuple(range(experts - 1)),) * (layers - 1)))
    cached = (0, *(1,) * (layers - 1))
    lends = load_stage(file, config_of(file, hot=hot, cache_slots=cached, lendable=(4,) * layers))
    assert [ffn.residency.kept for ffn in lends.model.routed] == [used] * layers  # type: ignore[union-attr]
    assert torch.equal(logits(lends), logits(load_stage(file, config_of(file))))
    lends.check()


def plan_of(lends: bool = True, ram: int = 1 << 36) -> Plan:
    spec, sizes = known_shapes("35B-A3B", "Q4_K_M")
    machine = Machine((Device("cuda:0", "cuda", int(22.1 * (1 << 30))),), ram)
    wishes = Wishes(131_072, sequences=2, chunk=2048, lends=lends, cache_ram=None)
    return make_plan(machine, spec, sizes, wishes)


def test_memory_is_traded_where_that_was_asked_for() -> None:
    traded, fixed = plan_of(), plan_of(lends=False)
    (config,) = stage_configs(traded, "bfloat16")
    assert any(config.lendable)
    assert config.lendable == traded.stages[0].lendable
    assert "gets the slots of up to" in show_plan(traded)
    assert not fixed.stages[0].lendable
    assert "gets the slots" not in show_plan(fixed)


def default_plan(ram: int, **given: Any) -> Plan:
    spec, sizes = known_shapes("35B-A3B", "Q4_K_M")
    machine = Machine((Device("cuda:0", "cuda", int(22.1 * (1 << 30))),), ram)
    return plan_numbers(Config(context=131_072, sequences=4, **given), spec, sizes, machine)


def test_memory_is_traded_by_default_where_ram_has_room_for_what_is_lent() -> None:
    """Where it has none, a pool of 8,192 tokens that cannot grow would be read over PCIe: it is a large one then."""
    roomy, short = default_plan(1 << 37), default_plan(10 << 30)
    assert roomy.stages[0].lendable and roomy.stages[0].pool_tokens == 8192
    assert not short.stages[0].lendable and short.stages[0].pool_tokens == 65_536
    assert "RAM is short" in show_plan(short) and "RAM is short" not in show_plan(roomy)
    assert default_plan(10 << 30, live_memory=True).stages[0].pool_tokens == 8192, "asked for, it is obeyed"
    for given in ({"live_memory": False}, {"pool": 65_536}, {"kv_mode": "sparse"}):
        assert not default_plan(1 << 37, **given).stages[0].lendable


@pytest.mark.parametrize("other", [{"pool": 65_536}, {"kv_mode": "sparse"}])
def test_a_pool_that_was_asked_for_and_a_sparse_one_are_never_traded(file: WeightFile, other: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match="--live-memory changes the KV pool"):
        build_engine(Config(model=file.path, devices=("cpu",), live_memory=True, **other))


def test_snapshots_come_before_experts_that_lie_in_ram_only_to_be_lent() -> None:
    """As many conversations fit whether slots can be lent or not."""
    for gib in range(8, 24):
        plan = plan_of(ram=gib << 30)
        each = plan.snapshot_bytes.conversation(131_072)
        assert not plan.stages[0].lendable or plan.snapshot_ram >= 2 * each
    assert plan.stages[0].lendable, "and with more RAM slots can be lent"

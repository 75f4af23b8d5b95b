"""From a plan's numbers to a stage whose expert slots KV can get."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from rekindle.batch import Batch, Segment, Wanted
from rekindle.bench.synth import write_synthetic
from rekindle.build.sizes import loaded_sizes
from rekindle.build.stage import StageConfig, load_stage, stage_configs
from rekindle.errors import DoesNotFit
from rekindle.placement import Device, Machine, Plan, Wishes, make_plan
from rekindle.stages import LocalStage
from rekindle.weights import WeightFile, open_weights

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


def plan_of(file: WeightFile, budget: int, **wishes: object) -> Plan:
    machine = Machine((Device("cuda:0", "cuda", budget),), 1 << 34)
    given = {"context": 65_536, "sequences": 2, "chunk": 64, "kv_type": "f32", "expert_cache_share": 0.25, **wishes}
    return make_plan(machine, file.spec, loaded_sizes(file, torch.float32), Wishes(**given))  # type: ignore[arg-type]


def test_a_pool_that_was_asked_for_is_never_traded(file: WeightFile) -> None:
    budget = next(b for b in range(300 << 20, 500 << 20, 1 << 20) if _has_cold(file, b))
    (free,), (asked,) = (plan_of(file, budget, pool=pool).stages for pool in (None, 8192))
    (config,) = stage_configs(plan_of(file, budget), "float32")
    assert any(free.lendable)
    assert config.lendable == free.lendable
    assert not asked.lendable
    assert asked.pool_tokens == 8192
    assert not plan_of(file, budget, kv_mode="sparse").stages[0].lendable


def _has_cold(file: WeightFile, budget: int) -> bool:
    try:
        return any(plan_of(file, budget).stages[0].lendable)
    except DoesNotFit:
        return False

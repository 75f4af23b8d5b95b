"""Where a span may move: to memory that no plan has reserved; and a load that fails is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.bench.synth import write_synthetic
from rekindle.build import build_engine, failover, open_model, plan_model
from rekindle.build.failover import Failover, FreeMemory
from rekindle.build.sizes import loaded_sizes
from rekindle.build.stage import stage_configs
from rekindle.config import Config, parse_shards
from rekindle.errors import BadConfig, StageLost
from rekindle.kernels import native
from rekindle.placement import Device, Machine, Plan, moved_bytes
from rekindle.placement.reserve import smallest_budget

MIB, GIB = 1 << 20, 1 << 30
CPU, FAR_GPU = Device("cpu", "cpu", 64 * MIB, host=True), Device("cuda:0@far", "cuda", GIB, remote=True)
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("failover") / "tiny-moe.gguf", "tiny-moe")


def make_plan(path: Path, *devices: Device, ram: int = 4 * GIB) -> Plan:
    config = Config(model=path, context=1024, sequences=2, grid=64, dtype="bfloat16", cache_ram=64 * MIB)
    return plan_model(config, open_model(path), Machine(devices, ram))


def make_failover(path: Path, plan: Plan, memory: FreeMemory) -> Failover:
    model = open_model(path)
    return Failover(memory, model.file, plan, stage_configs(plan, "bfloat16"), loaded_sizes(model.file, BF16), None)


def test_a_cpu_without_kernels_beside_a_gpu_is_planned_with_expanded_weights(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    mixed = make_plan(path, CPU, FAR_GPU)
    alone = make_plan(path, CPU, replace(CPU, name="cpu@a"))
    assert mixed.spans == alone.spans
    for item in ("mixers", "hot experts"):
        assert mixed.stages[0].bytes_of(item) == alone.stages[0].bytes_of(item)
        assert mixed.stages[1].bytes_of(item) < alone.stages[1].bytes_of(item), "the GPU keeps them quantised"


def test_a_stage_that_moves_needs_what_it_would_have_been_planned_with_there(path: Path) -> None:
    sizes = loaded_sizes(open_model(path).file, BF16)
    mixed, alone = make_plan(path, CPU, FAR_GPU), make_plan(path, CPU, replace(CPU, name="cpu@a"))
    for device, stage in ((CPU, alone.stages[1]), (FAR_GPU, mixed.stages[1])):
        planned = stage.total - stage.bytes_of("margin")
        assert moved_bytes(mixed, sizes, 1, device) == smallest_budget(planned)


def test_ram_that_is_promised_to_snapshots_takes_no_span(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "available_ram", lambda: 64 * GIB)
    plan = make_plan(path, CPU, FAR_GPU)
    tight = make_plan(path, CPU, FAR_GPU, ram=plan.host_total + MIB)
    with pytest.raises(StageLost, match=r"the shard is gone; no other device can take .*: cpu has 1.*are needed"):
        make_failover(path, tight, FreeMemory([tight])).replace_stage(tight.spans[1], StageLost("the shard is gone"))


def test_a_span_taken_in_leaves_less_room_to_all_replicas(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "available_ram", lambda: 64 * GIB)
    monkeypatch.setattr(failover, "load_stage", lambda *_, **__: "a stage")
    plan = make_plan(path, CPU, FAR_GPU)
    needed = moved_bytes(plan, loaded_sizes(open_model(path).file, BF16), 1, CPU)
    memory = FreeMemory([make_plan(path, CPU, FAR_GPU, ram=plan.host_total + needed)])
    assert memory.of("cpu") == needed
    assert make_failover(path, plan, memory).replace_stage(plan.spans[1], StageLost("gone")) == "a stage"
    with pytest.raises(StageLost, match="cpu has 0"):
        make_failover(path, plan, memory).replace_stage(plan.spans[1], StageLost("gone"))


def test_a_load_that_fails_is_a_lost_stage_and_its_room_is_free_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(failover, "available_ram", lambda: 64 * GIB)
    monkeypatch.setattr(failover, "load_stage", fail)
    plan = make_plan(path, CPU, FAR_GPU)
    memory = FreeMemory([plan])
    with pytest.raises(StageLost, match="loading on cpu failed: CUDA out of memory"):
        make_failover(path, plan, memory).replace_stage(plan.spans[1], StageLost("gone"))
    assert memory.of("cpu") == plan.host_left


def test_sparse_replicas_that_are_not_alike_are_refused_with_both_named(path: Path) -> None:
    shards = parse_shards(["a=false", "b=false"], [], [])
    config = Config(
        model=path,
        devices=("cpu", "cpu@a", "cpu@b"),
        shards=shards,
        replicas=2,
        kv_mode="sparse",
        context=1024,
        ram=GIB,
        cache_ram=2 * GIB,
    )
    with pytest.raises(BadConfig, match=r"replica 0 has \d+ pages, replica 1 has \d+: give --pool"):
        build_engine(config)

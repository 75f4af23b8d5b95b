"""What the plan decides about a stage is what the stage is loaded with, in this process or in a shard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from rekindle.batch import Batch, Segment
from rekindle.bench.synth import write_synthetic
from rekindle.build.shards import arguments
from rekindle.build.sizes import loaded_sizes
from rekindle.build.stage import StageConfig, load_stage, stage_configs
from rekindle.cli.commands import app
from rekindle.kernels.matmul.scratch import Scratch, _current
from rekindle.layers.span import ModelSpan
from rekindle.placement import Device, Machine, Wishes, make_plan, sizes_from_tensors
from rekindle.weights import WeightFile, open_weights

ROWS = 16


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> WeightFile:
    return open_weights(write_synthetic(tmp_path_factory.mktemp("orders") / "tiny.gguf", "tiny"))


@pytest.fixture
def orders(file: WeightFile) -> list[StageConfig]:
    machine = Machine((Device("cpu", "cpu", 8 << 30, host=True),), 8 << 30)
    sizes = sizes_from_tensors(file.spec, {name: (info.shape, info.nbytes) for name, info in file.tensors.items()})
    wishes = Wishes(1024, sequences=2, kv_type="f32", rewind_rows=ROWS, compute_bytes=4)
    return stage_configs(make_plan(machine, file.spec, sizes, wishes), "float32")


def test_blocks_that_the_plan_makes_room_for_have_it_in_the_stage(file: WeightFile, orders: list[StageConfig]) -> None:
    assert [order.rewind_rows for order in orders] == [ROWS]
    stage = load_stage(file, orders[0])
    assert stage._state._block_rows == ROWS


def test_a_shard_is_given_the_very_orders_of_the_plan(
    file: WeightFile, orders: list[StageConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list[StageConfig]()

    def note(_model: Path, orders: Sequence[StageConfig], *_: object) -> None:
        given.extend(orders)

    monkeypatch.setattr("rekindle.cli.shard.host_shard", note)
    result = CliRunner().invoke(app, ["shard", "model.gguf", *arguments(orders, "ipc:///nowhere", 1)])
    assert result.exit_code == 0, result.output
    assert given == orders


def test_a_stage_expands_weights_into_one_buffer_as_large_as_the_plan_says(
    file: WeightFile, orders: list[StageConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = load_stage(file, orders[0])
    sizes = loaded_sizes(file, torch.float32)
    gpu = Machine((Device("cuda:0", "cuda", 8 << 30),), 8 << 30)
    planned = make_plan(gpu, file.spec, sizes, Wishes(1024, compute_bytes=4)).stage(0).bytes_of("expand scratch")
    assert 0 < planned == stage.scratch.values * torch.float32.itemsize
    run, given = ModelSpan.run, list[Scratch | None]()

    def note(*args: Any, **fields: Any) -> Any:
        given.append(_current.given)
        return run(*args, **fields)

    monkeypatch.setattr(ModelSpan, "run", note)
    stage.forward(Batch((Segment(0, 0, (1, 2, 3)),)), None)
    assert given == [stage.scratch]
    assert _current.given is None

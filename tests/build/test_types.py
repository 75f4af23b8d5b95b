"""In which types a model is computed, and what the plan counts for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_files import write_tied
from typer.testing import CliRunner

from rekindle.build import StageConfig, choose_types, open_model, plan_model
from rekindle.build.sizes import loaded_sizes
from rekindle.cli.commands import app
from rekindle.config import Config
from rekindle.errors import BadConfig
from rekindle.kernels import native
from rekindle.layers import load_span
from rekindle.layers.embedding import DeviceEmbedding, HostEmbedding
from rekindle.placement import Device, Machine, Plan
from rekindle.placement.units import gib
from rekindle.weights import TensorInfo

GPU, GIB = ["cuda:0"], 1 << 30


@dataclass
class PaperFile:
    """Types and sizes of matrices, and a large vector."""

    tensors: dict[str, TensorInfo] = field(default_factory=dict)

    @classmethod
    def of(cls, **rows: int) -> Any:
        made = {type: TensorInfo(type, (count, 256), type, 0) for type, count in rows.items()}
        return cls({"norm": TensorInfo("norm", (1 << 30,), "F32", 4 << 30), **made})


@pytest.mark.parametrize(
    ("file", "devices", "types"),
    [
        (PaperFile.of(Q4_K=9, F32=1), GPU, ("bfloat16", "bf16")),
        (PaperFile.of(BF16=9, F32=1), GPU, ("bfloat16", "bf16")),
        (PaperFile.of(Q8_0=6, F16=4), GPU, ("bfloat16", "bf16")),
        (PaperFile.of(F16=9, F32=1), GPU, ("float32", "f16")),
        (PaperFile.of(F32=1), GPU, ("float32", "f16")),
        (PaperFile.of(F16=9), ["cuda:0@lab", "cpu"], ("float32", "f16")),
        (PaperFile.of(F16=9), ["cpu", "cpu@lab"], ("float32", "f32")),
        (PaperFile.of(Q4_K=9), ["cpu"], ("float32", "f32")),
    ],
)
def test_a_gpu_computes_in_float32_where_most_weights_have_more_bits_than_bfloat16(
    file: Any, devices: list[str], types: tuple[str, str]
) -> None:
    assert choose_types(file, devices) == types


def test_what_the_user_says_stands() -> None:
    file = PaperFile.of(F16=9)
    assert choose_types(file, GPU, "bfloat16") == ("bfloat16", "bf16")
    assert choose_types(file, GPU, None, "q8") == ("float32", "q8")
    assert choose_types(file, ["cpu"], "bfloat16", "f16") == ("bfloat16", "f16")
    with pytest.raises(BadConfig, match="--dtype is 'float16'; known are float32, bfloat16"):
        choose_types(file, GPU, "float16")


def test_a_shard_started_by_hand_chooses_as_its_head_does(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[StageConfig]()

    def note(_model: Path, orders: Sequence[StageConfig], *_: object) -> None:
        given.extend(orders)

    monkeypatch.setattr("rekindle.cli.shard.host_shard", note)
    stage = ["--listen", "ipc:///nowhere", "--span", "0:4", "--device", "cuda:0", "--pages", "8"]
    for name in ("f16", "Q4_K_M"):
        result = CliRunner().invoke(app, ["shard", str(golden / f"tiny-qwen35-{name}.gguf"), *stage])
        assert result.exit_code == 0, result.output
    assert [(order.dtype, order.kv_type) for order in given] == [("float32", "f16"), ("bfloat16", "bf16")]


def test_the_plan_counts_float16_weights_as_a_gpu_keeps_them(golden: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)  # a CPU then expands them
    model = open_model(golden / "tiny-qwen35-f16.gguf")
    matrices = [info for info in model.file.tensors.values() if info.type == "F16" and info.name.startswith("blk.0.")]
    on_gpu = loaded_sizes(model.file, torch.float32)
    on_cpu = on_gpu.on(Device("cpu", "cpu", GIB, host=True))
    assert on_cpu.layers[0].total - on_gpu.layers[0].total == sum(info.nbytes for info in matrices)
    assert on_gpu.head == model.file.tensors["output.weight"].nbytes
    plan = plan_model(Config(sequences=1, context=1024), model, Machine((Device("cuda:0", "cuda", 4 * GIB),), GIB))
    assert (plan.wishes.kv_type, plan.wishes.compute_bytes) == ("f16", 4)
    assert plan.stage(0).bytes_of("head") == on_gpu.head


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _tensors(each)
    elif is_dataclass(value):
        for each in fields(value):
            if each.name not in (
                "frequencies",
                "prefetch",
            ):  # made by the code; a weight of another block
                yield from _tensors(getattr(value, each.name))


@pytest.mark.parametrize("name", ["tiny-qwen35-Q4_K_M", "tiny-qwen35moe-Q4_K_M"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", ["", "off"])
def test_on_a_cpu_the_plan_counts_what_loading_takes_and_says_what_weights_become(
    golden: Path, name: str, dtype: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(native.SWITCH, kernels)
    monkeypatch.setattr(native, "library", cache(native.library.__wrapped__))
    model, cpu = open_model(golden / f"{name}.gguf"), Device("cpu", "cpu", 4 * GIB, host=True)
    plan = plan_model(Config(sequences=1, context=1024, dtype=dtype), model, Machine((cpu,), 8 * GIB))
    loaded = load_span(model.file, model.spec.whole, torch.device("cpu"), getattr(torch, dtype))
    taken = sum(tensor.nbytes for tensor in _tensors((loaded.layers, loaded.head)))
    names = ("mixers", "dense ffn", "routers and shared experts", "hot experts", "final norm", "head")
    assert sum(map(plan.stage(0).bytes_of, names)) == taken
    (mapped,) = (item.bytes for item in plan.host_items if item.name == "embedding rows (as stored)")
    assert isinstance(loaded.embedding, HostEmbedding)
    assert mapped == loaded.embedding.raw.nbytes
    said = f"weights become {dtype} on a CPU, {gib(taken + mapped)} instead of "
    if not kernels:
        said = f"weights stay quantised, {gib(taken + mapped)}"
        assert taken + mapped <= 1.2 * model.file.path.stat().st_size
    assert any(said in reason for reason in plan.reasons)
    on_gpu = plan_model(Config(sequences=1, context=1024), model, Machine((Device("cuda:0", "cuda", 4 * GIB),), GIB))
    assert not any("weights become" in reason for reason in on_gpu.reasons)


def _planned_embedding(plan: Plan) -> int:
    return sum(item.bytes for item in plan.host_items if item.name == "embedding rows (as stored)")


@pytest.mark.parametrize("kernels", ["", "off"])
def test_an_embedding_that_is_the_head_too_is_counted_once_where_a_cpu_has_both(
    tmp_path: Path, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler, or with the ends apart, rows are kept as stored for looking up."""
    monkeypatch.setenv(native.SWITCH, kernels)
    monkeypatch.setattr(native, "library", cache(native.library.__wrapped__))
    model = open_model(write_tied(tmp_path / "tied.gguf", "tiny-qwen35-Q4_K_M.gguf"))
    stored = model.file.tensors["token_embd.weight"].nbytes
    cpu, card = Device("cpu", "cpu", 4 * GIB, host=True), Device("cuda:0", "cuda", 4 * GIB)
    alone, split, other = (
        plan_model(Config(sequences=1, context=1024, dtype="float32"), model, Machine(devices, 8 * GIB))
        for devices in ((cpu,), (cpu, card), (card, cpu))
    )
    assert [_planned_embedding(plan) for plan in (alone, split, other)] == [stored if kernels else 0, stored, 0]
    assert other.stages[0].bytes_of("embedding") > 0
    assert alone.stage(0).bytes_of("head") == other.stages[1].bytes_of("head") > 0
    loaded = load_span(model.file, model.spec.whole, torch.device("cpu"), torch.float32)
    assert isinstance(loaded.embedding, HostEmbedding if kernels else DeviceEmbedding)


@pytest.mark.skipif(native.library() is None, reason="no compiler")
def test_the_embedded_model_takes_at_most_1_2_times_its_file_on_a_cpu() -> None:
    model, cpu = open_model(None), Device("cpu", "cpu", 4 * GIB, host=True)
    plan = plan_model(Config(sequences=1, context=1024), model, Machine((cpu,), 8 * GIB))
    loaded = load_span(model.file, model.spec.whole, torch.device("cpu"), torch.float32)
    places = {tensor.data_ptr(): tensor.nbytes for tensor in _tensors((loaded.layers, loaded.head, loaded.embedding))}
    taken = sum(places.values())
    assert taken <= 1.2 * model.file.path.stat().st_size
    assert any(f"weights stay quantised, {gib(taken)}" in reason for reason in plan.reasons)

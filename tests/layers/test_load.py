"""What a loaded layer knows of its neighbours, and layers that are loaded at once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from rekindle.bench.synth import write_synthetic
from rekindle.layers import load, load_span
from rekindle.layers.ffn import DenseFfn
from rekindle.weights import WeightFile, open_weights

CPU = torch.device("cpu")


def test_every_block_of_a_dense_model_names_the_matrix_that_is_read_behind_it(make_tiny: Any) -> None:
    layers = make_tiny("dense").stage().model.layers
    for layer, behind in zip(layers, [*layers[1:], None], strict=True):
        assert isinstance(layer.ffn, DenseFfn)
        assert layer.mixer.prefetch is layer.ffn.gate
        assert layer.ffn.prefetch is (None if behind is None else behind.mixer.first)
    firsts = {layer.mixer.first.shape for layer in layers}
    assert len(firsts) == 2, "DeltaNet and attention layers begin with different matrices"


def test_before_routed_experts_nothing_is_named(make_tiny: Any) -> None:
    assert all(layer.mixer.prefetch is None for layer in make_tiny("moe").stage().model.layers)


@pytest.fixture
def file(tmp_path: Path) -> WeightFile:
    return open_weights(write_synthetic(tmp_path / "tiny.gguf", "tiny"))


def test_layers_that_are_loaded_at_once_are_those_that_are_loaded_one_by_one(
    file: WeightFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, layer, threads = threading.Barrier(2, timeout=30), load._Loader.layer, set[str]()

    def meeting(loader: Any, index: int) -> Any:
        if index < 2:
            together.wait()
        threads.add(threading.current_thread().name)
        return layer(loader, index)

    told = list[tuple[int, int]]()
    monkeypatch.setattr(load._Loader, "layer", meeting)
    at_once = load_span(file, file.spec.whole, CPU, torch.float32, lambda *done: told.append(done), at_once=2)
    monkeypatch.undo()
    one_by_one = load_span(file, file.spec.whole, CPU, torch.float32)
    assert len(threads) == 2
    assert [layer.index for layer in at_once.layers] == list(file.spec.whole.layers)
    for ours, other in zip(at_once.layers, one_by_one.layers, strict=True):
        assert torch.equal(ours.mixer_norm, other.mixer_norm)
        assert torch.equal(ours.ffn_norm, other.ffn_norm)
    assert told == sorted(told) and told[-1][0] == told[-1][1]


def test_behind_a_layer_that_cannot_be_loaded_no_other_begins(
    file: WeightFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = list[int]()

    def failing(loader: Any, index: int) -> Any:
        begun.append(index)
        raise OSError("the file is gone")

    monkeypatch.setattr(load._Loader, "layer", failing)
    before = threading.active_count()
    with pytest.raises(OSError, match="the file is gone"):
        load_span(file, file.spec.whole, CPU, torch.float32, at_once=2)
    assert threading.active_count() == before
    assert len(begun) < file.spec.layers

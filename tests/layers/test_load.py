"""What a loaded layer knows of its neighbours."""

from __future__ import annotations

from typing import Any

from rekindle.layers.ffn import DenseFfn


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

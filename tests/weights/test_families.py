"""A family of models is one file and one registry line; nothing in weights/ knows a family by name."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rekindle.batch import Batch, Segment, Wanted
from rekindle.layers import load_span
from rekindle.models import registry
from rekindle.models.base import Change, Family
from rekindle.models.keys import KeysSeen, MetadataKeys
from rekindle.models.readers import read_attention, read_dense_ffn, read_model
from rekindle.placement import known_shapes
from rekindle.spec import AttentionSpec, FfnSpec, MixerSpec, ModelSpec
from rekindle.stages import LocalStage
from rekindle.weights import WeightFile, open_weights

WriteGguf = Callable[[dict[str, Any], dict[str, np.ndarray]], Path]
WEIGHTS = Path(__file__).parents[2] / "src" / "rekindle" / "weights"
HIDDEN, WIDTH, VOCAB = 8, 16, 10


def read_mirror(keys: MetadataKeys, seen: KeysSeen) -> ModelSpec:
    return read_model(keys, seen, mirror_mixers, read_dense_ffn)


def mirror_mixers(keys: MetadataKeys, seen: KeysSeen, layers: int) -> tuple[MixerSpec, ...]:
    return (read_attention(keys, seen, qk_norm=False),) * layers


def upside_down(spec: ModelSpec, name: str) -> Change | None:
    return (lambda rows: rows[::-1]) if name == "attn_q.weight" else None


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Family:
    """A family whose converter writes the rows of attn_q from last to first, and that has a norm of its own name."""
    family = Family(architectures=("mirror",), read=read_mirror, ffn_norm="mirror_norm.weight", gguf_order=upside_down)
    monkeypatch.setattr(registry, "_families", dict(registry._families))
    registry.register(family)
    return family


def mirror_metadata() -> dict[str, Any]:
    numbers = {"block_count": 1, "embedding_length": HIDDEN, "feed_forward_length": WIDTH, "context_length": 64}
    keys = {f"mirror.{key}": number for key, number in numbers.items()}
    heads = {"mirror.attention.head_count": 2, "mirror.attention.layer_norm_rms_epsilon": 1e-5}
    return {"general.architecture": "mirror"} | keys | heads


def mirror_tensors(spec: ModelSpec) -> dict[str, np.ndarray]:
    shapes = spec.mixers[0].tensors(HIDDEN) | spec.ffn.tensors(HIDDEN)
    shapes |= {"attn_norm.weight": (HIDDEN,), "mirror_norm.weight": (HIDDEN,)}
    named = {f"blk.0.{name}": shape for name, shape in shapes.items()}
    named |= {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in named.items()}


def mirror_file(mirror: Family, write_gguf: WriteGguf) -> tuple[WeightFile, dict[str, np.ndarray]]:
    seen = KeysSeen(tensors=99, vocab=VOCAB, tokens=VOCAB, tied=True, rope_factors=None)
    tensors = mirror_tensors(mirror.read(MetadataKeys(Path("mirror"), mirror_metadata(), "mirror"), seen))
    return open_weights(write_gguf(mirror_metadata(), tensors)), tensors


def test_a_registered_family_is_read_without_another_line(mirror: Family, write_gguf: WriteGguf) -> None:
    file, tensors = mirror_file(mirror, write_gguf)
    assert file.spec.architecture == "mirror"
    np.testing.assert_array_equal(file.values("blk.0.attn_q.weight"), tensors["blk.0.attn_q.weight"][::-1])
    np.testing.assert_array_equal(file.values("blk.0.attn_k.weight"), tensors["blk.0.attn_k.weight"])


def test_a_registered_family_runs_with_the_norm_that_it_names(mirror: Family, write_gguf: WriteGguf) -> None:
    file, tensors = mirror_file(mirror, write_gguf)
    span = load_span(file, file.spec.whole, torch.device("cpu"), torch.float32)
    np.testing.assert_array_equal(span.layers[0].ffn_norm.numpy(), tensors["blk.0.mirror_norm.weight"])
    stage = LocalStage(span, slots=1, pages=4, kv_type="f32")
    stage.open(0)
    logits = stage.forward(Batch((Segment(0, 0, (1, 2, 3), Wanted.ALL),)), None).logits
    assert logits is not None and logits.shape == (3, VOCAB)
    assert torch.isfinite(logits).all()


def test_two_families_cannot_have_one_architecture() -> None:
    with pytest.raises(AssertionError, match="two families have the architecture llama"):
        registry.register(Family(architectures=("llama",), read=read_mirror))


def test_weights_name_no_family() -> None:
    known = set(registry._families) | set(registry._hf_formats)
    for path in WEIGHTS.glob("*.py"):
        texts = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        assert not known & texts, f"{path.name} knows a family by name"


# Snapshots on disk are found by the fingerprint, which hashes this text: a change would lose every cache.
DENSE = "6cf9176e28185fe8ebde6e43a9549feb7618ad439c9ecc0ff07616a296b70fb7"
MOE = "177b7ddfa7115e448ae1adf963797ab1b59c592c6687d2cd51a10d2f890c47d3"
PLAIN = "bebd5f13bf890cd07747a6e8fc72670a66bb95a7e68ae44dae728e29fd111c4c"


def plain_spec() -> ModelSpec:
    attention = AttentionSpec(4, 2, head_dim=16, rope_dim=16, rope_theta=1e4, rope_factors=(1.0, 2.0))
    return ModelSpec("llama", "x", 64, 100, (attention,) * 3, FfnSpec(width=128), eps=1e-5, context=4096, tied=True)


@pytest.mark.parametrize(
    ("spec", "digest"),
    [(known_shapes("27B", "Q4_K_M")[0], DENSE), (known_shapes("35B-A3B", "Q4_K_M")[0], MOE), (plain_spec(), PLAIN)],
    ids=["dense", "moe", "plain"],
)
def test_the_text_that_identifies_a_model_never_changes(spec: ModelSpec, digest: str) -> None:
    assert hashlib.sha256(spec.identity.encode()).hexdigest() == digest

"""Metadata → ModelSpec, with every check that the numbers alone allow.

Reads GGUF keys. A Hugging Face config is put into the same keys first, so both formats meet the same checks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rekindle.errors import BadModelFile
from rekindle.spec import AttentionSpec, DeltaSpec, FfnSpec, Mixer, ModelSpec

ARCHITECTURES = ("qwen35", "qwen35moe", "llama", "qwen3")
SOFTMAX_ROUTER = 1


@dataclass(frozen=True, slots=True)
class Seen:
    """What the tensor table says that the metadata does not."""

    tensors: int
    vocab: int  # rows of the embedding; the vocabulary list may be shorter
    tied: bool
    rope_factors: tuple[float, ...] | None


def read_architecture(path: Path, metadata: Mapping[str, Any]) -> str:
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise BadModelFile(f"{path} has the architecture {name!r}; known are {', '.join(ARCHITECTURES)}")
    return str(name)


def read_spec(path: Path, metadata: Mapping[str, Any], seen: Seen) -> ModelSpec:
    keys = _Keys(path, metadata, read_architecture(path, metadata))
    hybrid = keys.architecture in ("qwen35", "qwen35moe")
    nextn = keys.count("nextn_predict_layers", default=0)
    layers = _layer_count(keys, nextn, seen)
    name = metadata.get("general.name")
    return ModelSpec(
        architecture=keys.architecture,
        name=name if isinstance(name, str) and name else path.stem,
        hidden=keys.count("embedding_length"),
        vocab=seen.vocab,
        mixers=_mixers(keys, layers) if hybrid else (Mixer.ATTENTION,) * layers,
        attention=_attention(keys, seen, hybrid),
        delta=_delta(keys) if hybrid else None,
        ffn=_routed_ffn(keys) if keys.architecture == "qwen35moe" else _dense_ffn(keys),
        eps=keys.number("attention.layer_norm_rms_epsilon"),
        context=keys.count("context_length"),
        tied=seen.tied,
        nextn=nextn,
    )


class _Keys:
    """Typed reading of `<architecture>.<key>`; a missing or senseless value is one clear error."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], architecture: str) -> None:
        self.path = path
        self.metadata = metadata
        self.architecture = architecture

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number; a default may also be 0, and then 0 may be written too."""
        value = self._present(key, default)
        least = 0 if default == 0 else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise self.bad(f"{key} is {value!r}, not a whole number of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._present(key, default)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.bad(f"{key} is {value!r}, not a number above 0")
        return float(value)

    def require(self, holds: bool, sentence: str) -> None:
        if not holds:
            raise self.bad(sentence)

    def bad(self, sentence: str) -> BadModelFile:
        return BadModelFile(f"{self.path} ({self.architecture}): {sentence}")

    def _present(self, key: str, default: float | None) -> Any:
        value = self.get(key)
        if value is None and default is None:
            raise self.bad(f"{key} is missing from the metadata")
        return default if value is None else value


def _layer_count(keys: _Keys, nextn: int, seen: Seen) -> int:
    blocks = keys.count("block_count")  # includes the next-token-prediction blocks
    keys.require(blocks <= seen.tensors, f"block_count is {blocks}, but there are only {seen.tensors} tensors")
    keys.require(nextn < blocks, f"nextn_predict_layers is {nextn} of block_count {blocks}, so no layer is left")
    return blocks - nextn


def _mixers(keys: _Keys, layers: int) -> tuple[Mixer, ...]:
    recurrent = keys.get("attention.recurrent_layers")
    if isinstance(recurrent, list):
        keys.require(
            len(recurrent) >= layers, f"recurrent_layers names {len(recurrent)} layers, the model has {layers}"
        )
        return tuple(Mixer.DELTA if flag else Mixer.ATTENTION for flag in recurrent[:layers])
    interval = keys.count("full_attention_interval")
    keys.require(layers % interval == 0, f"{layers} layers are no multiple of full_attention_interval {interval}")
    return tuple(Mixer.DELTA if (i + 1) % interval else Mixer.ATTENTION for i in range(layers))


def _attention(keys: _Keys, seen: Seen, hybrid: bool) -> AttentionSpec:
    heads = keys.count("attention.head_count")
    kv_heads = keys.count("attention.head_count_kv", default=heads)
    keys.require(heads % kv_heads == 0, f"{heads} heads are no multiple of {kv_heads} KV heads")
    head_dim = keys.count("attention.key_length", default=max(1, keys.count("embedding_length") // heads))
    value_dim = keys.count("attention.value_length", default=head_dim)
    keys.require(head_dim == value_dim, f"key_length is {head_dim}, value_length {value_dim}; they must be equal")
    rope_dim = _rope_dim(keys, head_dim, hybrid)
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        rope_theta=keys.number("rope.freq_base", default=10000.0),
        rope_factors=_rope_factors(keys, seen, rope_dim),
        qk_norm=keys.architecture != "llama",
        gated=hybrid,
    )


def _rope_dim(keys: _Keys, head_dim: int, hybrid: bool) -> int:
    rope_dim = keys.count("rope.dimension_count", default=head_dim)
    keys.require(
        rope_dim <= head_dim and rope_dim % 2 == 0,
        f"rope.dimension_count is {rope_dim}; it must be even and at most the head size {head_dim}",
    )
    sections = keys.get("rope.dimension_sections")
    if hybrid and isinstance(sections, list):
        rotated = 2 * sum(sections)
        keys.require(0 < rotated <= head_dim, f"rope.dimension_sections rotate {rotated} of {head_dim} dimensions")
    # the row order of a llama file is defined for heads that rotate as a whole
    keys.require(
        keys.architecture != "llama" or rope_dim == head_dim,
        f"rope.dimension_count is {rope_dim}, but llama heads rotate all their {head_dim} dimensions",
    )
    return rope_dim


def _rope_factors(keys: _Keys, seen: Seen, rope_dim: int) -> tuple[float, ...] | None:
    kind = keys.get("rope.scaling.type")
    linear = keys.number("rope.scaling.factor", default=1.0) if kind == "linear" else 1.0
    keys.require(kind in (None, "none", "linear"), f"rope.scaling.type is {kind!r}; only none and linear are supported")
    if seen.rope_factors is None:
        return None if linear == 1.0 else (linear,) * (rope_dim // 2)
    keys.require(
        len(seen.rope_factors) == rope_dim // 2,
        f"there are {len(seen.rope_factors)} rotary factors for {rope_dim // 2} frequencies",
    )
    keys.require(all(math.isfinite(f) and f > 0 for f in seen.rope_factors), "a rotary factor is not a number above 0")
    return tuple(f * linear for f in seen.rope_factors)


def _delta(keys: _Keys) -> DeltaSpec:
    inner, value_heads, key_heads = (
        keys.count("ssm.inner_size"),
        keys.count("ssm.time_step_rank"),
        keys.count("ssm.group_count"),
    )
    keys.require(inner % value_heads == 0, f"ssm.inner_size {inner} is no multiple of time_step_rank {value_heads}")
    keys.require(value_heads % key_heads == 0, f"{value_heads} value heads are no multiple of {key_heads} key heads")
    conv_width = keys.count("ssm.conv_kernel")
    return DeltaSpec(key_heads, value_heads, keys.count("ssm.state_size"), inner // value_heads, conv_width)


def _dense_ffn(keys: _Keys) -> FfnSpec:
    keys.require(not keys.get("expert_count"), f"expert_count is {keys.get('expert_count')}, expected a dense model")
    return FfnSpec(width=keys.count("feed_forward_length"))


def _routed_ffn(keys: _Keys) -> FfnSpec:
    gating = keys.count("expert_gating_func", default=0)
    keys.require(gating in (0, SOFTMAX_ROUTER), f"expert_gating_func is {gating}; only softmax (1) is supported")
    scale = keys.get("expert_weights_scale")
    keys.require(scale in (None, 0.0, 1.0), f"expert_weights_scale is {scale}; only 1 is supported")
    experts, used = keys.count("expert_count"), keys.count("expert_used_count")
    keys.require(used <= experts, f"expert_used_count is {used} of {experts} experts")
    return FfnSpec(
        experts=experts,
        used=used,
        expert_width=keys.count("expert_feed_forward_length"),
        shared_width=keys.count("expert_shared_feed_forward_length"),
    )

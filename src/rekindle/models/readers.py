"""Metadata that families share → specs, with every check that the numbers alone allow."""

from __future__ import annotations

import math
from collections.abc import Callable

from rekindle.config import printable
from rekindle.models.keys import KeysSeen, MetadataKeys
from rekindle.spec import AttentionSpec, FfnSpec, MixerSpec, ModelSpec

SOFTMAX_ROUTER = 1
LONGEST_NAME = 200  # characters that people are shown

Mixers = Callable[[MetadataKeys, KeysSeen, int], tuple[MixerSpec, ...]]  # of that many layers


def read_model(keys: MetadataKeys, seen: KeysSeen, mixers: Mixers, ffn: Callable[[MetadataKeys], FfnSpec]) -> ModelSpec:
    nextn = keys.count("nextn_predict_layers", default=0)
    name = keys.metadata.get("general.name")
    return ModelSpec(
        architecture=keys.architecture,
        name=printable(name if isinstance(name, str) and name else keys.path.stem)[:LONGEST_NAME],
        hidden=keys.count("embedding_length"),
        vocab=seen.vocab,
        tokens=seen.tokens if seen.tokens < seen.vocab else 0,
        mixers=mixers(keys, seen, _layer_count(keys, nextn, seen)),
        ffn=ffn(keys),
        eps=keys.number("attention.layer_norm_rms_epsilon"),
        context=keys.count("context_length"),
        tied=seen.tied,
        nextn=nextn,
    )


def _layer_count(keys: MetadataKeys, nextn: int, seen: KeysSeen) -> int:
    blocks = keys.count("block_count")  # includes the next-token-prediction blocks
    keys.require(blocks <= seen.tensors, f"block_count is {blocks}, but there are only {seen.tensors} tensors")
    keys.require(nextn < blocks, f"nextn_predict_layers is {nextn} of block_count {blocks}, so no layer is left")
    return blocks - nextn


def read_attention(keys: MetadataKeys, seen: KeysSeen, qk_norm: bool, gated: bool = False) -> AttentionSpec:
    heads = keys.count("attention.head_count")
    kv_heads = keys.count("attention.head_count_kv", default=heads)
    keys.require(heads % kv_heads == 0, f"{heads} heads are no multiple of {kv_heads} KV heads")
    head_dim = keys.count("attention.key_length", default=max(1, keys.count("embedding_length") // heads))
    value_dim = keys.count("attention.value_length", default=head_dim)
    keys.require(head_dim == value_dim, f"key_length is {head_dim}, value_length {value_dim}; they must be equal")
    rope_dim = _rope_dim(keys, head_dim)
    return AttentionSpec(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope_dim=rope_dim,
        rope_theta=keys.number("rope.freq_base", default=10000.0),
        rope_factors=_rope_factors(keys, seen, rope_dim),
        qk_norm=qk_norm,
        gated=gated,
    )


def _rope_dim(keys: MetadataKeys, head_dim: int) -> int:
    rope_dim = keys.count("rope.dimension_count", default=head_dim)
    keys.require(
        rope_dim <= head_dim and rope_dim % 2 == 0,
        f"rope.dimension_count is {rope_dim}; it must be even and at most the head size {head_dim}",
    )
    return rope_dim


def _rope_factors(keys: MetadataKeys, seen: KeysSeen, rope_dim: int) -> tuple[float, ...] | None:
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


def read_dense_ffn(keys: MetadataKeys) -> FfnSpec:
    keys.require(not keys.get("expert_count"), f"expert_count is {keys.get('expert_count')}, expected a dense model")
    return FfnSpec(width=keys.count("feed_forward_length"))


def read_routed_ffn(keys: MetadataKeys) -> FfnSpec:
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

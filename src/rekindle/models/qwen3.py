"""Qwen3, dense: attention in every layer, with a norm on every head's queries and keys."""

from __future__ import annotations

from rekindle.models.base import Family, HfFormat
from rekindle.models.keys import KeysSeen, MetadataKeys
from rekindle.models.readers import read_attention, read_dense_ffn, read_model
from rekindle.spec import MixerSpec, ModelSpec


def _read(keys: MetadataKeys, seen: KeysSeen) -> ModelSpec:
    return read_model(keys, seen, _mixers, read_dense_ffn)


def _mixers(keys: MetadataKeys, seen: KeysSeen, layers: int) -> tuple[MixerSpec, ...]:
    return (read_attention(keys, seen, qk_norm=True),) * layers


FAMILY = Family(architectures=("qwen3",), read=_read, hf=HfFormat(classes={"Qwen3ForCausalLM": "qwen3"}))

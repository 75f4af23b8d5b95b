"""Llama: attention in every layer."""

from __future__ import annotations

import numpy as np

from rekindle.models.base import Change, Family, HfFormat
from rekindle.models.keys import KeysSeen, MetadataKeys
from rekindle.models.readers import read_attention, read_dense_ffn, read_model
from rekindle.spec import MixerSpec, ModelSpec


def _read(keys: MetadataKeys, seen: KeysSeen) -> ModelSpec:
    return read_model(keys, seen, _mixers, read_dense_ffn)


def _mixers(keys: MetadataKeys, seen: KeysSeen, layers: int) -> tuple[MixerSpec, ...]:
    attention = read_attention(keys, seen, qk_norm=False)
    # the row order of a file (below) is defined for heads that rotate as a whole
    keys.require(
        attention.rope_dim == attention.head_dim,
        f"rope.dimension_count is {attention.rope_dim}, "
        f"but llama heads rotate all their {attention.head_dim} dimensions",
    )
    return (attention,) * layers


def _gguf_order(spec: ModelSpec, name: str) -> Change | None:
    """The converter interleaves the rows of attn_q and attn_k so that rotary pairs are neighbours (2j, 2j + 1). Ours
    are (j, j + d/2) for every model. Rows are moved whole, which loses nothing whatever the quantisation."""
    heads = {"attn_q.weight": spec.attention.heads, "attn_k.weight": spec.attention.kv_heads}.get(name)
    return None if heads is None else lambda rows: rows_in_half_order(rows, heads)


def rows_in_half_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """[heads · d, …] from pairs (2j, 2j + 1) to pairs (j, j + d/2), head by head."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])  # [head, pair, member, bytes]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


FAMILY = Family(
    architectures=("llama",),
    read=_read,
    gguf_order=_gguf_order,
    hf=HfFormat(classes={"LlamaForCausalLM": "llama"}),
)

"""Qwen3.5 and 3.6, dense and MoE: Gated DeltaNet in most layers, gated attention in every fourth.

Value heads: a checkpoint groups them by key head (head k·r + j reads key head k, r per key head), the canonical order
is tiled (head j·K + k reads key head k), everywhere a value head has rows, channels, entries or columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rekindle.models.base import Change, Family, HfConfig, HfFormat
from rekindle.models.keys import KeysSeen, MetadataKeys
from rekindle.models.readers import read_attention, read_dense_ffn, read_model, read_routed_ffn
from rekindle.spec import AttentionSpec, DeltaSpec, MixerSpec, ModelSpec

INTERVAL = 4  # layers from one full attention to the next, where a file does not say
RECURRENT = {"linear_attention": True, "full_attention": False}

# checkpoints store these norms less one; canonical is the factor itself
OFFSET_NORMS = (
    "attn_norm",
    "post_attention_norm",
    "attn_q_norm",
    "attn_k_norm",
    "output_norm",
    "nextn.enorm",
    "nextn.hnorm",
    "nextn.shared_head_norm",
)


def _read(keys: MetadataKeys, seen: KeysSeen) -> ModelSpec:
    return read_model(keys, seen, _mixers, read_routed_ffn if keys.architecture == "qwen35moe" else read_dense_ffn)


def _mixers(keys: MetadataKeys, seen: KeysSeen, layers: int) -> tuple[MixerSpec, ...]:
    attention, delta = read_attention(keys, seen, qk_norm=True, gated=True), _delta(keys)
    _check_sections(keys, attention)
    recurrent = keys.get("attention.recurrent_layers")
    if recurrent is not None:
        keys.require(
            isinstance(recurrent, list) and all(isinstance(flag, bool) for flag in recurrent),
            "attention.recurrent_layers is no list of true and false",
        )
        keys.require(
            len(recurrent) >= layers, f"recurrent_layers names {len(recurrent)} layers, the model has {layers}"
        )
        return tuple(delta if flag else attention for flag in recurrent[:layers])
    interval = keys.count("full_attention_interval", default=INTERVAL)
    return tuple(delta if (i + 1) % interval else attention for i in range(layers))


def _check_sections(keys: MetadataKeys, attention: AttentionSpec) -> None:
    sections, head_dim = keys.get("rope.dimension_sections"), attention.head_dim
    if isinstance(sections, list):
        rotated = 2 * sum(sections)
        keys.require(0 < rotated <= head_dim, f"rope.dimension_sections rotate {rotated} of {head_dim} dimensions")


def _delta(keys: MetadataKeys) -> DeltaSpec:
    inner, value_heads, key_heads = (
        keys.count("ssm.inner_size"),
        keys.count("ssm.time_step_rank"),
        keys.count("ssm.group_count"),
    )
    keys.require(inner % value_heads == 0, f"ssm.inner_size {inner} is no multiple of time_step_rank {value_heads}")
    keys.require(value_heads % key_heads == 0, f"{value_heads} value heads are no multiple of {key_heads} key heads")
    conv_width = keys.count("ssm.conv_kernel")
    return DeltaSpec(key_heads, value_heads, keys.count("ssm.state_size"), inner // value_heads, conv_width)


# Hugging Face folders


def _hf_keys(config: HfConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    text = config.values
    found: dict[str, Any] = {"full_attention_interval": text.get("full_attention_interval", INTERVAL)}
    if "ssm.time_step_rank" in keys and "linear_value_head_dim" in text:
        found["ssm.inner_size"] = keys["ssm.time_step_rank"] * config.number("linear_value_head_dim")
    if text.get("layer_types"):
        found["attention.recurrent_layers"] = [RECURRENT[kind] for kind in text["layer_types"]]
    return found


def _hf_move(spec: ModelSpec, name: str) -> Change | None:
    delta = spec.delta
    if delta is None or delta.key_heads == delta.value_heads:
        return None
    if name in ("attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias"):
        return lambda rows: tile_rows(rows, delta)
    if name in ("attn_qkv.weight", "ssm_conv1d.weight"):
        start = 2 * delta.key_heads * delta.key_dim  # rows q | k stay
        return lambda rows: np.concatenate([rows[:start], tile_rows(rows[start:], delta)])
    if name == "ssm_out.weight":
        return lambda matrix: tile_rows(matrix.T, delta).T
    return None


def _hf_compute(spec: ModelSpec, name: str) -> Change | None:
    if name == "ssm_a":
        return lambda log: -np.exp(log)
    if name.removesuffix(".weight") in OFFSET_NORMS:
        return lambda offset: offset + np.float32(1)
    return None


def tile_rows(rows: np.ndarray, delta: DeltaSpec) -> np.ndarray:
    """[value_heads · n, …] from grouped to tiled order; the n rows of a head stay together."""
    grouped = rows.reshape(delta.key_heads, delta.value_heads // delta.key_heads, -1, *rows.shape[1:])
    return grouped.swapaxes(0, 1).reshape(rows.shape)


HF = HfFormat(
    classes={
        "Qwen3_5ForCausalLM": "qwen35",
        "Qwen3_5ForConditionalGeneration": "qwen35",
        "Qwen3_5MoeForCausalLM": "qwen35moe",
        "Qwen3_5MoeForConditionalGeneration": "qwen35moe",
    },
    layer_types=tuple(RECURRENT),
    rotated_share=0.25,
    keys={
        "linear_conv_kernel_dim": "ssm.conv_kernel",
        "linear_key_head_dim": "ssm.state_size",
        "linear_num_key_heads": "ssm.group_count",
        "linear_num_value_heads": "ssm.time_step_rank",
    },
    more_keys=_hf_keys,
    names={
        "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
        "attn_gate.weight": "linear_attn.in_proj_z.weight",
        "ssm_conv1d.weight": "linear_attn.conv1d.weight",
        "ssm_a": "linear_attn.A_log",
        "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
        "ssm_beta.weight": "linear_attn.in_proj_b.weight",
        "ssm_dt.bias": "linear_attn.dt_bias",
        "ssm_norm.weight": "linear_attn.norm.weight",
        "ssm_out.weight": "linear_attn.out_proj.weight",
        "ffn_gate_inp.weight": "mlp.gate.weight",
        "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
        "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
        "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
        "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
    },
    axes_of_one={"ssm_conv1d.weight": 1, "ffn_gate_inp_shexp.weight": 0},
    move=_hf_move,
    compute=_hf_compute,
)

FAMILY = Family(architectures=("qwen35", "qwen35moe"), read=_read, ffn_norm="post_attention_norm.weight", hf=HF)

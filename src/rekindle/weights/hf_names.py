"""How each canonical tensor is made from a Hugging Face checkpoint.

Value heads: a checkpoint groups them by key head (head k·r + j reads key head k, r per key head), the canonical order
is tiled (head j·K + k reads key head k), everywhere a value head has rows, channels, entries or columns.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

import numpy as np

from rekindle.spec import DeltaSpec, ModelSpec
from rekindle.weights.expected import EMBEDDING, OUTPUT, OUTPUT_NORM, expected_outer, expected_tensors

Change = Callable[[np.ndarray], np.ndarray]

LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_qkv.weight": "linear_attn.in_proj_qkv.weight",
    "attn_gate.weight": "linear_attn.in_proj_z.weight",
    "ssm_conv1d.weight": "linear_attn.conv1d.weight",
    "ssm_a": "linear_attn.A_log",
    "ssm_alpha.weight": "linear_attn.in_proj_a.weight",
    "ssm_beta.weight": "linear_attn.in_proj_b.weight",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm.weight": "linear_attn.norm.weight",
    "ssm_out.weight": "linear_attn.out_proj.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_inp_shexp.weight": "mlp.shared_expert_gate.weight",
    "ffn_gate_shexp.weight": "mlp.shared_expert.gate_proj.weight",
    "ffn_up_shexp.weight": "mlp.shared_expert.up_proj.weight",
    "ffn_down_shexp.weight": "mlp.shared_expert.down_proj.weight",
}
OUTER_NAMES = {EMBEDDING: "embed_tokens.weight", OUTPUT_NORM: "norm.weight"}
EXPERT_STACKS = {"ffn_gate_exps.weight": "gate", "ffn_up_exps.weight": "up", "ffn_down_exps.weight": "down"}

# Qwen3.5 checkpoints store these norms less one; canonical is the factor itself
OFFSET_NORMS = ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Source tensors (several are stacked), then elements moved, then values computed."""

    shape: tuple[int, ...]  # canonical
    sources: tuple[str, ...]
    source_shape: tuple[int, ...]  # of each source
    move: Change | None = None  # on the stored elements, whatever their type; only their places change
    compute: Change | None = None  # float32 → float32; the result is stored as F32


def recipes(spec: ModelSpec, prefix: str, present: Container[str]) -> dict[str, Recipe]:
    """Canonical name → recipe. `prefix` leads to the text model; `present` tells fused experts from single ones."""
    found: dict[str, Recipe] = {}
    for name, shape in expected_outer(spec).items():
        source = "lm_head.weight" if name == OUTPUT else prefix + OUTER_NAMES[name]
        found[name] = Recipe(shape, (source,), shape, compute=_computed(spec, name))
    for layer in range(spec.layers):
        for name, shape in expected_tensors(spec, layer).items():
            base = name.removeprefix(f"blk.{layer}.")
            below = f"{prefix}layers.{layer}."
            if base in EXPERT_STACKS:
                found[name] = _experts(below + "mlp.experts.", EXPERT_STACKS[base], shape, present)
            else:
                found[name] = _single(spec, below, base, shape)
    return found


def _single(spec: ModelSpec, below: str, base: str, shape: tuple[int, ...]) -> Recipe:
    source_shape = shape
    if base == "ssm_conv1d.weight":
        source_shape = (shape[0], 1, shape[1])
    elif base == "ffn_gate_inp_shexp.weight":
        source_shape = (1, *shape)
    return Recipe(shape, (below + LAYER_NAMES[base],), source_shape, _moved(spec, base), _computed(spec, base))


def _experts(below: str, part: str, shape: tuple[int, ...], present: Container[str]) -> Recipe:
    """Published checkpoints fuse gate and up and stack the experts; transformers also saves them one by one."""
    experts, rows, columns = shape
    if f"{below}down_proj" not in present:
        return Recipe(shape, tuple(f"{below}{e}.{part}_proj.weight" for e in range(experts)), shape[1:])
    if part == "down":
        return Recipe(shape, (f"{below}down_proj",), shape)
    half = slice(0, rows) if part == "gate" else slice(rows, 2 * rows)
    return Recipe(shape, (f"{below}gate_up_proj",), (experts, 2 * rows, columns), move=lambda both: both[:, half])


def _computed(spec: ModelSpec, base: str) -> Change | None:
    if base == "ssm_a":
        return lambda log: -np.exp(log)
    if spec.delta is not None and base.removesuffix(".weight") in OFFSET_NORMS:
        return lambda offset: offset + np.float32(1)
    return None


def _moved(spec: ModelSpec, base: str) -> Change | None:
    delta = spec.delta
    if delta is None or delta.key_heads == delta.value_heads:
        return None
    if base in ("attn_gate.weight", "ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias"):
        return lambda rows: tile_rows(rows, delta)
    if base in ("attn_qkv.weight", "ssm_conv1d.weight"):
        start = 2 * delta.key_heads * delta.key_dim  # rows q | k stay
        return lambda rows: np.concatenate([rows[:start], tile_rows(rows[start:], delta)])
    if base == "ssm_out.weight":
        return lambda matrix: tile_rows(matrix.T, delta).T
    return None


def tile_rows(rows: np.ndarray, delta: DeltaSpec) -> np.ndarray:
    """[value_heads · n, …] from grouped to tiled order; the n rows of a head stay together."""
    grouped = rows.reshape(delta.key_heads, delta.value_heads // delta.key_heads, -1, *rows.shape[1:])
    return grouped.swapaxes(0, 1).reshape(rows.shape)

"""How each canonical tensor is made from a Hugging Face checkpoint: what all families have in common."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from rekindle.models.base import Change, HfFormat
from rekindle.spec import ModelSpec
from rekindle.weights.expected import (
    EMBEDDING,
    NEXTN_NORM,
    OUTPUT,
    OUTPUT_NORM,
    expected_nextn,
    expected_outer,
    expected_tensors,
)

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
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
OUTER_NAMES = {EMBEDDING: "embed_tokens.weight", OUTPUT_NORM: "norm.weight"}
NEXTN_NAMES = {
    "nextn.eh_proj.weight": "fc.weight",
    "nextn.enorm.weight": "pre_fc_norm_embedding.weight",
    "nextn.hnorm.weight": "pre_fc_norm_hidden.weight",
    "nextn.shared_head_norm.weight": "norm.weight",
}
EXPERT_STACKS = {"ffn_gate_exps.weight": "gate", "ffn_up_exps.weight": "up", "ffn_down_exps.weight": "down"}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Source tensors (several are stacked), then elements moved, then values computed."""

    shape: tuple[int, ...]  # canonical
    sources: tuple[str, ...]
    source_shape: tuple[int, ...]  # of each source
    move: Change | None = None  # on the stored elements, whatever their type; only their places change
    compute: Change | None = None  # float32 → float32; the result is stored as F32


def recipes(spec: ModelSpec, hf: HfFormat, prefix: str, present: Container[str]) -> dict[str, Recipe]:
    """Canonical name → recipe. `prefix` leads to the text model; `present` tells fused experts from single ones."""
    found: dict[str, Recipe] = {}
    for name, shape in expected_outer(spec).items():
        source = "lm_head.weight" if name == OUTPUT else prefix + OUTER_NAMES[name]
        found[name] = Recipe(shape, (source,), shape, compute=hf.compute(spec, name))
    for layer in range(spec.layers):
        for name, shape in expected_tensors(spec, layer).items():
            base = name.removeprefix(f"blk.{layer}.")
            found[name] = _in_layer(spec, hf, f"{prefix}layers.{layer}.", base, shape, present)
    return found


def nextn_recipes(spec: ModelSpec, hf: HfFormat, present: Container[str]) -> dict[str, Recipe]:
    """Of the next-token-prediction block. Nothing where a source is missing: then the folder has none to draft with."""
    found: dict[str, Recipe] = {}
    norm = f"blk.{spec.layers}.{NEXTN_NORM}"
    for name, shape in {**expected_nextn(spec), norm: (spec.hidden,)}.items():
        base = name.removeprefix(f"blk.{spec.layers}.")
        if base in NEXTN_NAMES:
            found[name] = Recipe(shape, (f"mtp.{NEXTN_NAMES[base]}",), shape, compute=hf.compute(spec, base))
        else:
            found[name] = _in_layer(spec, hf, "mtp.layers.0.", base, shape, present)
    return found if all(source in present for recipe in found.values() for source in recipe.sources) else {}


def _in_layer(
    spec: ModelSpec, hf: HfFormat, below: str, base: str, shape: tuple[int, ...], present: Container[str]
) -> Recipe:
    if base in EXPERT_STACKS:
        return _experts(below + "mlp.experts.", EXPERT_STACKS[base], shape, present)
    return _single(spec, hf, below, base, shape)


def _single(spec: ModelSpec, hf: HfFormat, below: str, base: str, shape: tuple[int, ...]) -> Recipe:
    source = below + (hf.names.get(base) or LAYER_NAMES[base])
    axis = hf.axes_of_one.get(base)
    source_shape = shape if axis is None else (*shape[:axis], 1, *shape[axis:])
    return Recipe(shape, (source,), source_shape, hf.move(spec, base), hf.compute(spec, base))


def _experts(below: str, part: str, shape: tuple[int, ...], present: Container[str]) -> Recipe:
    """Published checkpoints fuse gate and up and stack the experts; transformers also saves them one by one."""
    experts, rows, columns = shape
    if f"{below}down_proj" not in present:
        return Recipe(shape, tuple(f"{below}{e}.{part}_proj.weight" for e in range(experts)), shape[1:])
    if part == "down":
        return Recipe(shape, (f"{below}down_proj",), shape)
    half = slice(0, rows) if part == "gate" else slice(rows, 2 * rows)
    return Recipe(shape, (f"{below}gate_up_proj",), (experts, 2 * rows, columns), move=lambda both: both[:, half])

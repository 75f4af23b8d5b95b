"""The two models Rekindle is tuned for, as numbers, so that a plan can be made before a file is downloaded."""

from __future__ import annotations

import math
from dataclasses import replace

from rekindle.errors import BadConfig
from rekindle.placement.sizes import sizes_from_tensors
from rekindle.placement.types import Sizes
from rekindle.spec import AttentionSpec, DeltaSpec, FfnSpec, MixerSpec, ModelSpec, Shapes

# bytes of a block, values in it
BLOCKS = {
    "Q3_K": (110, 256),
    "Q4_K": (144, 256),
    "Q5_K": (176, 256),
    "Q6_K": (210, 256),
    "Q8_0": (34, 32),
    "F16": (2, 1),
    "F32": (4, 1),
}

# What a mix stores each role in. `down` is for value and down projections, `more` for those of the layers that get
# extra bits. Real files differ in a few tensors; the sum comes within a few percent of them.
MIXES = {
    "Q3_K_M": {
        "embedding": "Q3_K",
        "head": "Q6_K",
        "plain": "Q3_K",
        "qkv": "Q4_K",
        "out": "Q4_K",
        "down": "Q3_K",
        "more": "Q4_K",
    },
    "Q4_K_M": {
        "embedding": "Q4_K",
        "head": "Q6_K",
        "plain": "Q4_K",
        "qkv": "Q5_K",
        "out": "Q4_K",
        "down": "Q4_K",
        "more": "Q6_K",
    },
}

FLOATS = ("ssm_conv1d.weight", "ffn_gate_inp.weight")
ROLES = {
    "attn_qkv.weight": "qkv",
    "attn_output.weight": "out",
    "attn_v.weight": "down",
    "ffn_down.weight": "down",
    "ffn_down_exps.weight": "down",
    "ffn_down_shexp.weight": "down",
}


def _mixers(layers: int, heads: int, kv_heads: int, value_heads: int) -> tuple[MixerSpec, ...]:
    attention = AttentionSpec(heads, kv_heads, head_dim=256, rope_dim=64, rope_theta=1e7, qk_norm=True, gated=True)
    delta = DeltaSpec(key_heads=16, value_heads=value_heads, key_dim=128, value_dim=128, conv_width=4)
    return tuple(attention if i % 4 == 3 else delta for i in range(layers))


SPECS = {
    "27B": ModelSpec(
        architecture="qwen35",
        name="27B",
        hidden=5120,
        vocab=248_320,
        mixers=_mixers(64, heads=24, kv_heads=4, value_heads=48),
        ffn=FfnSpec(width=17_408),
        eps=1e-6,
        context=262_144,
        tied=False,
    ),
    "35B-A3B": ModelSpec(
        architecture="qwen35moe",
        name="35B-A3B",
        hidden=2048,
        vocab=248_320,
        mixers=_mixers(40, heads=16, kv_heads=2, value_heads=32),
        ffn=FfnSpec(experts=256, used=8, expert_width=512, shared_width=512),
        eps=1e-6,
        context=262_144,
        tied=False,
    ),
}


USUAL_MIX = "Q4_K_M"  # that most people run, and `--shape` stands for
NAMES = {"qwen3.6-27b": "27B", "qwen3.6-35b-a3b": "35B-A3B"}  # as `--shape` calls them


def shape_named(name: str) -> tuple[ModelSpec, Sizes]:
    """In the usual mix, which is a part of its name."""
    if name not in NAMES:
        raise BadConfig(f"--shape: {name!r} is not known; known are {', '.join(NAMES)}")
    spec, sizes = known_shapes(NAMES[name], USUAL_MIX)
    return replace(spec, name=f"{name} {USUAL_MIX}"), sizes


def known_shapes(model: str, mix: str) -> tuple[ModelSpec, Sizes]:
    """Spec and sizes of '27B' or '35B-A3B' in 'Q3_K_M' or 'Q4_K_M'."""
    if model not in SPECS:
        raise BadConfig(f"model {model!r} is not known, known are {', '.join(SPECS)}")
    if mix not in MIXES:
        raise BadConfig(f"mix {mix!r} is not known, known are {', '.join(MIXES)}")
    spec = SPECS[model]
    return spec, sizes_from_tensors(spec, known_tensors(spec, mix))


def known_tensors(spec: ModelSpec, mix: str) -> dict[str, tuple[tuple[int, ...], int]]:
    """Names, shapes and bytes as the header of such a file would give them."""
    kinds = MIXES[mix]
    stored = {
        "token_embd.weight": ((spec.vocab, spec.hidden), kinds["embedding"]),
        "output.weight": ((spec.vocab, spec.hidden), kinds["head"]),
        "output_norm.weight": ((spec.hidden,), "F32"),
    }
    for i, mixer in enumerate(spec.mixers):
        shapes = _norms(spec) | mixer.tensors(spec.hidden) | spec.ffn.tensors(spec.hidden)
        kinds = MIXES[mix] | ({"down": MIXES[mix]["more"]} if _gets_more_bits(i, spec.layers) else {})
        stored |= {f"blk.{i}.{name}": (shape, _kind(name, shape, kinds)) for name, shape in shapes.items()}
    return {name: (shape, _bytes(shape, kind)) for name, (shape, kind) in stored.items()}


def _kind(name: str, shape: tuple[int, ...], kinds: dict[str, str]) -> str:
    """What a tensor of a layer is stored in: vectors, convolutions and routers as floats."""
    return "F32" if len(shape) == 1 or name in FLOATS else kinds[ROLES.get(name, "plain")]


def _gets_more_bits(layer: int, layers: int) -> bool:
    """The first and last eighth, and every third layer between."""
    eighth = layers // 8
    return layer < eighth or layer >= layers - eighth or (layer - eighth) % 3 == 2


def _norms(spec: ModelSpec) -> Shapes:
    return {"attn_norm.weight": (spec.hidden,), "post_attention_norm.weight": (spec.hidden,)}


def _bytes(shape: tuple[int, ...], kind: str) -> int:
    size, values = BLOCKS[kind]
    assert shape[-1] % values == 0, f"a row of {shape[-1]} values does not fill blocks of {values}"
    return math.prod(shape) // values * size

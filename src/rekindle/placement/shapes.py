"""The two models Rekindle is tuned for, as numbers, so that a plan can be made before a file is downloaded."""

from __future__ import annotations

import math

from rekindle.errors import BadConfig
from rekindle.placement.sizes import sizes_from_tensors
from rekindle.placement.types import Sizes
from rekindle.spec import AttentionSpec, DeltaSpec, FfnSpec, Mixer, ModelSpec

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

# What a mix stores each role in. `more` is for the layers that get extra bits in value and down projections. Real
# files differ in a few tensors; the sum comes within a few percent of them.
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


def _mixers(layers: int) -> tuple[Mixer, ...]:
    return tuple(Mixer.ATTENTION if i % 4 == 3 else Mixer.DELTA for i in range(layers))


SPECS = {
    "27B": ModelSpec(
        architecture="qwen35",
        name="27B",
        hidden=5120,
        vocab=248_320,
        mixers=_mixers(64),
        attention=AttentionSpec(
            heads=24, kv_heads=4, head_dim=256, rope_dim=64, rope_theta=1e7, qk_norm=True, gated=True
        ),
        delta=DeltaSpec(key_heads=16, value_heads=48, key_dim=128, value_dim=128, conv_width=4),
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
        mixers=_mixers(40),
        attention=AttentionSpec(
            heads=16, kv_heads=2, head_dim=256, rope_dim=64, rope_theta=1e7, qk_norm=True, gated=True
        ),
        delta=DeltaSpec(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_width=4),
        ffn=FfnSpec(experts=256, used=8, expert_width=512, shared_width=512),
        eps=1e-6,
        context=262_144,
        tied=False,
    ),
}


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
        down = kinds["more"] if _gets_more_bits(i, spec.layers) else kinds["down"]
        mixed = _attention(spec, kinds, down) if mixer is Mixer.ATTENTION else _delta(spec, kinds)
        layer = _norms(spec) | mixed | (_experts(spec, kinds, down) if spec.ffn.is_moe else _dense(spec, kinds, down))
        stored |= {f"blk.{i}.{name}": tensor for name, tensor in layer.items()}
    return {name: (shape, _bytes(shape, kind)) for name, (shape, kind) in stored.items()}


Stored = dict[str, tuple[tuple[int, ...], str]]


def _gets_more_bits(layer: int, layers: int) -> bool:
    """The first and last eighth, and every third layer between."""
    eighth = layers // 8
    return layer < eighth or layer >= layers - eighth or (layer - eighth) % 3 == 2


def _norms(spec: ModelSpec) -> Stored:
    return {"attn_norm.weight": ((spec.hidden,), "F32"), "post_attention_norm.weight": ((spec.hidden,), "F32")}


def _attention(spec: ModelSpec, kinds: dict[str, str], value: str) -> Stored:
    attention, hidden = spec.attention, spec.hidden
    q, kv = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    return {
        "attn_q.weight": ((2 * q, hidden), kinds["plain"]),
        "attn_k.weight": ((kv, hidden), kinds["plain"]),
        "attn_v.weight": ((kv, hidden), value),
        "attn_output.weight": ((hidden, q), kinds["out"]),
        "attn_q_norm.weight": ((attention.head_dim,), "F32"),
        "attn_k_norm.weight": ((attention.head_dim,), "F32"),
    }


def _delta(spec: ModelSpec, kinds: dict[str, str]) -> Stored:
    delta, hidden = spec.delta, spec.hidden
    assert delta is not None, "a DeltaNet layer in a model without DeltaNet sizes"
    return {
        "attn_qkv.weight": ((delta.conv_channels, hidden), kinds["qkv"]),
        "attn_gate.weight": ((delta.inner, hidden), kinds["plain"]),
        "ssm_conv1d.weight": ((delta.conv_channels, delta.conv_width), "F32"),
        "ssm_a": ((delta.value_heads,), "F32"),
        "ssm_alpha.weight": ((delta.value_heads, hidden), kinds["plain"]),
        "ssm_beta.weight": ((delta.value_heads, hidden), kinds["plain"]),
        "ssm_dt.bias": ((delta.value_heads,), "F32"),
        "ssm_norm.weight": ((delta.value_dim,), "F32"),
        "ssm_out.weight": ((hidden, delta.inner), kinds["plain"]),
    }


def _dense(spec: ModelSpec, kinds: dict[str, str], down: str) -> Stored:
    hidden, width = spec.hidden, spec.ffn.width
    return {
        "ffn_gate.weight": ((width, hidden), kinds["plain"]),
        "ffn_up.weight": ((width, hidden), kinds["plain"]),
        "ffn_down.weight": ((hidden, width), down),
    }


def _experts(spec: ModelSpec, kinds: dict[str, str], down: str) -> Stored:
    hidden, ffn = spec.hidden, spec.ffn
    return {
        "ffn_gate_inp.weight": ((ffn.experts, hidden), "F32"),
        "ffn_gate_exps.weight": ((ffn.experts, ffn.expert_width, hidden), kinds["plain"]),
        "ffn_up_exps.weight": ((ffn.experts, ffn.expert_width, hidden), kinds["plain"]),
        "ffn_down_exps.weight": ((ffn.experts, hidden, ffn.expert_width), down),
        "ffn_gate_inp_shexp.weight": ((hidden,), "F32"),
        "ffn_gate_shexp.weight": ((ffn.shared_width, hidden), kinds["plain"]),
        "ffn_up_shexp.weight": ((ffn.shared_width, hidden), kinds["plain"]),
        "ffn_down_shexp.weight": ((hidden, ffn.shared_width), down),
    }


def _bytes(shape: tuple[int, ...], kind: str) -> int:
    size, values = BLOCKS[kind]
    assert shape[-1] % values == 0, f"a row of {shape[-1]} values does not fill blocks of {values}"
    return math.prod(shape) // values * size

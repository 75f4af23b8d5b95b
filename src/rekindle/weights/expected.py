"""Which tensors a model has, and in which shapes: from the spec alone.

Shapes are row-major, a matrix is [out, in]. Checked against the header when a file is opened, so that whoever loads a
span later finds what the spec promises.
"""

from __future__ import annotations

from rekindle.spec import AttentionSpec, DeltaSpec, FfnSpec, Mixer, ModelSpec

Shapes = dict[str, tuple[int, ...]]

EMBEDDING = "token_embd.weight"
OUTPUT_NORM = "output_norm.weight"
OUTPUT = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"

# the norm in front of the feed-forward has two names in GGUF files
FFN_NORM = {
    "qwen35": "post_attention_norm.weight",
    "qwen35moe": "post_attention_norm.weight",
    "llama": "ffn_norm.weight",
    "qwen3": "ffn_norm.weight",
}


def expected_tensors(spec: ModelSpec, layer: int) -> Shapes:
    """Full names and shapes of one layer."""
    shapes: Shapes = {"attn_norm.weight": (spec.hidden,), FFN_NORM[spec.architecture]: (spec.hidden,)}
    if spec.mixers[layer] is Mixer.ATTENTION:
        shapes |= _attention(spec.hidden, spec.attention)
    else:
        assert spec.delta is not None, f"layer {layer} is a delta layer, but the spec has no delta"
        shapes |= _delta(spec.hidden, spec.delta)
    shapes |= _experts(spec.hidden, spec.ffn) if spec.ffn.is_moe else _dense(spec.hidden, spec.ffn)
    return {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}


def expected_outer(spec: ModelSpec) -> Shapes:
    """Full names and shapes outside the layers."""
    shapes: Shapes = {EMBEDDING: (spec.vocab, spec.hidden), OUTPUT_NORM: (spec.hidden,)}
    if not spec.tied:
        shapes[OUTPUT] = (spec.vocab, spec.hidden)
    return shapes


def expected_model(spec: ModelSpec) -> Shapes:
    """Every tensor of the model; next-token-prediction blocks are nobody's yet."""
    shapes = expected_outer(spec)
    for layer in range(spec.layers):
        shapes |= expected_tensors(spec, layer)
    return shapes


def _attention(hidden: int, spec: AttentionSpec) -> Shapes:
    q_dim = spec.heads * spec.head_dim
    kv_dim = spec.kv_heads * spec.head_dim
    shapes: Shapes = {
        "attn_q.weight": (q_dim * (2 if spec.gated else 1), hidden),  # gated: per head [q | gate]
        "attn_k.weight": (kv_dim, hidden),
        "attn_v.weight": (kv_dim, hidden),
        "attn_output.weight": (hidden, q_dim),
    }
    if spec.qk_norm:
        shapes |= {"attn_q_norm.weight": (spec.head_dim,), "attn_k_norm.weight": (spec.head_dim,)}
    return shapes


def _delta(hidden: int, spec: DeltaSpec) -> Shapes:
    return {
        "attn_qkv.weight": (spec.conv_channels, hidden),  # rows q | k | v
        "attn_gate.weight": (spec.inner, hidden),
        "ssm_conv1d.weight": (spec.conv_channels, spec.conv_width),
        "ssm_a": (spec.value_heads,),
        "ssm_alpha.weight": (spec.value_heads, hidden),
        "ssm_beta.weight": (spec.value_heads, hidden),
        "ssm_dt.bias": (spec.value_heads,),
        "ssm_norm.weight": (spec.value_dim,),
        "ssm_out.weight": (hidden, spec.inner),
    }


def _dense(hidden: int, spec: FfnSpec) -> Shapes:
    return {
        "ffn_gate.weight": (spec.width, hidden),
        "ffn_up.weight": (spec.width, hidden),
        "ffn_down.weight": (hidden, spec.width),
    }


def _experts(hidden: int, spec: FfnSpec) -> Shapes:
    return {
        "ffn_gate_inp.weight": (spec.experts, hidden),
        "ffn_gate_exps.weight": (spec.experts, spec.expert_width, hidden),
        "ffn_up_exps.weight": (spec.experts, spec.expert_width, hidden),
        "ffn_down_exps.weight": (spec.experts, hidden, spec.expert_width),
        "ffn_gate_inp_shexp.weight": (hidden,),
        "ffn_gate_shexp.weight": (spec.shared_width, hidden),
        "ffn_up_shexp.weight": (spec.shared_width, hidden),
        "ffn_down_shexp.weight": (hidden, spec.shared_width),
    }

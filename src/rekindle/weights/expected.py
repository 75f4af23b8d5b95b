"""Which tensors a model has, and in which shapes: from the spec alone.

Shapes are row-major, a matrix is [out, in]. Checked against the header when a file is opened, so that the loader of a
span finds what the spec promises.
"""

from __future__ import annotations

from rekindle.models.registry import family_of
from rekindle.spec import ModelSpec, Shapes

EMBEDDING = "token_embd.weight"
OUTPUT_NORM = "output_norm.weight"
OUTPUT = "output.weight"
ROPE_FACTORS = "rope_freqs.weight"
NEXTN_JOIN = "nextn.eh_proj.weight"
NEXTN_NORM = "nextn.shared_head_norm.weight"
NEXTN_HEAD = "nextn.shared_head_head.weight"
NEXTN_EMBEDDING = "nextn.embed_tokens.weight"


def expected_tensors(spec: ModelSpec, layer: int) -> Shapes:
    """Full names and shapes of one layer."""
    shapes: Shapes = {"attn_norm.weight": (spec.hidden,), family_of(spec.architecture).ffn_norm: (spec.hidden,)}
    shapes |= spec.mixers[layer].tensors(spec.hidden) | spec.ffn.tensors(spec.hidden)
    return {f"blk.{layer}.{name}": shape for name, shape in shapes.items()}


def expected_nextn(spec: ModelSpec) -> Shapes:
    """Full names and shapes of the next-token-prediction (MTP) block, which stands behind the layers."""
    hidden = spec.hidden
    shapes: Shapes = {NEXTN_JOIN: (hidden, 2 * hidden), "attn_norm.weight": (hidden,)}
    shapes |= {f"nextn.{name}.weight": (hidden,) for name in ("enorm", "hnorm")}
    shapes |= {family_of(spec.architecture).ffn_norm: (hidden,)}
    shapes |= spec.attention.tensors(hidden) | spec.ffn.tensors(hidden)
    return {f"blk.{spec.layers}.{name}": shape for name, shape in shapes.items()}


def optional_nextn(spec: ModelSpec) -> Shapes:
    """What such a block may have of its own; else the model's norm, head and embedding serve it."""
    table = (spec.vocab, spec.hidden)
    shapes: Shapes = {NEXTN_NORM: (spec.hidden,), NEXTN_HEAD: table, NEXTN_EMBEDDING: table}
    return {f"blk.{spec.layers}.{name}": shape for name, shape in shapes.items()}


def expected_outer(spec: ModelSpec) -> Shapes:
    """Full names and shapes outside the layers."""
    shapes: Shapes = {EMBEDDING: (spec.vocab, spec.hidden), OUTPUT_NORM: (spec.hidden,)}
    if not spec.tied:
        shapes[OUTPUT] = (spec.vocab, spec.hidden)
    return shapes


def expected_model(spec: ModelSpec) -> Shapes:
    """Every tensor of the model; next-token-prediction blocks are left out."""
    shapes = expected_outer(spec)
    for layer in range(spec.layers):
        shapes |= expected_tensors(spec, layer)
    return shapes

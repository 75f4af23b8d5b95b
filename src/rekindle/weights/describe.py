"""What a weight file holds, as plain data; printing is done elsewhere."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

from rekindle.spec import ModelSpec
from rekindle.weights.expected import EMBEDDING, OUTPUT, OUTPUT_NORM
from rekindle.weights.types import WeightFile


@dataclass(frozen=True, slots=True)
class Description:
    architecture: str
    name: str
    layers: dict[str, int]  # by kind of mixer
    parameters: int  # of the layers, the embedding and the head; not of next-token-prediction blocks
    bytes_by_type: dict[str, int]
    bytes_by_part: dict[str, int]  # embedding, mixers, ffn, experts, head, nextn, other; only those that exist
    nbytes: int
    context: int
    vocab: int
    experts: int  # of one layer; 0 for a dense model
    experts_used: int
    nextn: int


def describe(file: WeightFile) -> Description:
    spec = file.spec
    by_type: Counter[str] = Counter()
    by_part: Counter[str] = Counter()
    parameters = 0
    for info in file.tensors.values():
        part = part_of(spec, info.name)
        by_type[info.type] += info.nbytes
        by_part[part] += info.nbytes
        if part not in ("nextn", "other"):
            parameters += math.prod(info.shape)
    return Description(
        architecture=spec.architecture,
        name=spec.name,
        layers=dict(Counter(mixer.kind for mixer in spec.mixers)),
        parameters=parameters,
        bytes_by_type=dict(by_type.most_common()),
        bytes_by_part=dict(by_part),
        nbytes=by_type.total(),
        context=spec.context,
        vocab=spec.vocab,
        experts=spec.ffn.experts,
        experts_used=spec.ffn.used,
        nextn=spec.nextn,
    )


def part_of(spec: ModelSpec, name: str) -> str:
    """Which part of the model a tensor belongs to; a norm belongs to what it feeds."""
    block = re.match(r"blk\.(\d{1,9})\.(.*)", name)
    if block is None:
        return {EMBEDDING: "embedding", OUTPUT: "head", OUTPUT_NORM: "head"}.get(name, "other")
    if int(block[1]) >= spec.layers:
        return "nextn"
    if block[2].endswith("_exps.weight"):
        return "experts"
    return "ffn" if block[2].startswith(("ffn_", "post_attention_norm")) else "mixers"

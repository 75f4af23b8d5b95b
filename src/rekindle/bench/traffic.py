"""What a decode step must move through memory: the limit that its speed is held against."""

from __future__ import annotations

import math

from rekindle.spec import PAGE, ModelSpec
from rekindle.weights import WeightFile
from rekindle.weights.describe import part_of

EXPANDED = 4  # bytes of a weight on a CPU without kernels in C, where matrices are float32


def bytes_per_token(file: WeightFile, expanded: bool, kv_type: str, context: int, sequences: int = 1) -> float:
    """Bytes that one decoded token reads and writes: its share of the weights, its state, its KV."""
    weights = weight_bytes(file, expanded, sequences) / sequences
    return weights + state_bytes(file.spec) + kv_bytes(file.spec, kv_type, context)


def weight_bytes(file: WeightFile, expanded: bool, sequences: int) -> float:
    """Of one step. The embedding gives one row a token, unless it is the head too; of the experts count those that so
    many sequences choose between them if every choice is as likely as any other."""
    spec, total = file.spec, 0.0
    for info in file.tensors.values():
        part = part_of(spec, info.name)
        size = EXPANDED * math.prod(info.shape) if expanded else info.nbytes
        if part == "experts":
            total += size * chosen_share(spec, sequences)
        elif part in ("mixers", "ffn", "head") or (part == "embedding" and spec.tied):
            total += size
    return total


def chosen_share(spec: ModelSpec, sequences: int) -> float:
    return 1 - (1 - spec.ffn.used / spec.ffn.experts) ** sequences


def state_bytes(spec: ModelSpec) -> int:
    """The state of a fixed size of every layer, read and written."""
    return 2 * sum(sum(mixer.slot_bytes().values()) for mixer in spec.mixers)


def kv_bytes(spec: ModelSpec, kv_type: str, context: int) -> int:
    """The pages of every layer, read."""
    return sum(mixer.page_bytes(kv_type) for mixer in spec.mixers) * context // PAGE

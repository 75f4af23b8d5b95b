"""What a model weighs, from the header of its file: names, shapes and byte counts."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rekindle.errors import BadModelFile
from rekindle.placement.types import LayerSizes, Sizes
from rekindle.spec import ModelSpec

Tensors = Mapping[str, tuple[tuple[int, ...], int]]  # name -> (row-major shape, bytes)

LONGEST_NUMBER = 10  # digits of a layer's number
_EXPERT_STACKS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps")
_DENSE = ("ffn_gate", "ffn_up", "ffn_down")
_SHARED = ("ffn_gate_inp", "ffn_gate_inp_shexp", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp")


def sizes_from_tensors(spec: ModelSpec, tensors: Tensors) -> Sizes:
    """Every tensor of the model is counted once; blocks after the last layer are left out."""
    outer = {name: size for name, (_, size) in tensors.items() if not name.startswith("blk.")}
    embedding = _required(outer, "token_embd.weight")
    head = embedding if spec.tied else _required(outer, "output.weight")
    return Sizes(
        embedding=embedding,
        head=head,
        norms=sum(size for name, size in outer.items() if name not in ("token_embd.weight", "output.weight")),
        layers=_layers(spec, tensors),
        widest=max((_quantised_values(spec, name, *tensor) for name, tensor in tensors.items()), default=0),
    )


def _required(sizes: Mapping[str, int], name: str) -> int:
    if name not in sizes:
        raise BadModelFile(f"the file has no tensor {name}, the model needs it")
    return sizes[name]


def _layers(spec: ModelSpec, tensors: Tensors) -> tuple[LayerSizes, ...]:
    by_layer: list[dict[str, tuple[tuple[int, ...], int]]] = [{} for _ in range(spec.layers)]
    for name, tensor in tensors.items():
        layer = _layer_of(name)
        if layer is not None and layer < spec.layers:
            by_layer[layer][name.split(".", 2)[2]] = tensor
    return tuple(_layer(spec, i, found) for i, found in enumerate(by_layer))


def _layer(spec: ModelSpec, index: int, tensors: Tensors) -> LayerSizes:
    if not tensors:
        raise BadModelFile(f"the file has no tensors of layer {index}, the model has {spec.layers} layers")
    totals = {"mixer": 0, "dense": 0, "shared": 0, "expert": 0}
    for name, (shape, size) in tensors.items():
        role = _role(name)
        totals[role] += _one_expert(spec, index, name, shape, size) if role == "expert" else size
    if spec.ffn.is_moe and not totals["expert"]:
        raise BadModelFile(f"layer {index} has no expert tensors, the model has {spec.ffn.experts} experts per layer")
    return LayerSizes(**totals, experts=spec.ffn.experts if totals["expert"] else 0)


def _role(name: str) -> str:
    base = name.split(".", 1)[0]
    if base in _EXPERT_STACKS:
        return "expert"
    if base in _DENSE:
        return "dense"
    return "shared" if base in _SHARED else "mixer"  # norms, and all other tensors of a layer, go with the mixer


def _one_expert(spec: ModelSpec, index: int, name: str, shape: tuple[int, ...], size: int) -> int:
    experts = spec.ffn.experts
    if not shape or shape[0] != experts:
        found = shape[0] if shape else 0
        raise BadModelFile(f"layer {index}: {name} holds {found} experts, the model has {experts}")
    if size % experts:
        raise BadModelFile(f"layer {index}: {name} has {size} bytes, which {experts} experts cannot share evenly")
    return size // experts


def _quantised_values(spec: ModelSpec, name: str, shape: tuple[int, ...], size: int) -> int:
    """Values that are expanded together before a plain matmul: of a matrix, or of gate and up of all experts of a
    layer; 0 for float tensors."""
    values = math.prod(shape)
    layer = _layer_of(name)
    if size >= 2 * values or (layer is not None and layer >= spec.layers):
        return 0
    return 2 * values if len(shape) == 3 and "gate_up" not in name else values


def _layer_of(name: str) -> int | None:
    parts = name.split(".", 2)
    if parts[0] != "blk" or len(parts) < 3:
        return None
    if not (parts[1].isdecimal() and len(parts[1]) < LONGEST_NUMBER):
        raise BadModelFile(f"tensor {name} names layer {parts[1]!r}, which is not a number")
    return int(parts[1])

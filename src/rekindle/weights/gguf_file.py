"""A GGUF file, or the files of a split one, as a WeightFile.

Two things differ from the file's own table:
- llama: the converter interleaves the rows of attn_q and attn_k so that rotary pairs are neighbours (2j, 2j + 1). Ours
  are (j, j + d/2) for every model, so these rows are given back in that order. Rows are moved whole, which loses
  nothing whatever the quantisation.
- a fused ffn_gate_up_exps (gate rows first) is shown as ffn_gate_exps and ffn_up_exps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.errors import BadModelFile
from rekindle.spec import ModelSpec
from rekindle.weights.expected import EMBEDDING, OUTPUT, ROPE_FACTORS, expected_model
from rekindle.weights.fingerprint import fingerprint
from rekindle.weights.gguf_header import read_part
from rekindle.weights.spec_reader import Seen, read_architecture, read_spec
from rekindle.weights.stored import Stored, decode, require_decodable
from rekindle.weights.types import TensorInfo

_FUSED = "ffn_gate_up_exps.weight"
_SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class GgufFile:
    """Opened by reading headers only; `raw` and `values` touch the pages of the one tensor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._metadata, self._stored = _read_all(path)
        read_architecture(path, self._metadata)
        _refuse_scales(path, self._stored)
        self._spec = read_spec(path, self._metadata, _look(path, self._stored))
        self._tensors = {info.name: info for info in _shown(path, self._stored)}
        _check(path, self._spec, self._tensors)

    @property
    def path(self) -> Path:
        return self._path

    @property
    def spec(self) -> ModelSpec:
        return self._spec

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self._metadata

    def raw(self, name: str) -> np.ndarray:
        """A view of the map; a copy only where rows are moved (llama q and k) or gathered (fused experts)."""
        assert self._stored, f"{self._path} was closed before {name} was read"
        if name not in self._tensors:
            raise BadModelFile(f"{self._path} has no tensor {name}")
        if name not in self._stored:
            return self._half_of_fused(name)
        data = self._stored[name].data
        heads = self._interleaved_heads(name)
        return rows_in_half_order(data, heads) if heads else data

    def values(self, name: str) -> np.ndarray:
        return decode(self.raw(name), self._tensors[name])

    def fingerprint(self) -> str:
        return fingerprint(self._spec, self._stored.values())

    def close(self) -> None:
        """Lets go of the maps; they end with the last view that somebody still holds."""
        self._stored = {}

    def _half_of_fused(self, name: str) -> np.ndarray:
        experts, width, _ = self._tensors[name].shape
        fused = self._stored[re.sub(r"ffn_(gate|up)_exps\.weight$", _FUSED, name)].data
        both = fused.reshape(experts, 2, width, -1)
        return both[:, 0 if "ffn_gate_exps" in name else 1].reshape(experts * width, -1)

    def _interleaved_heads(self, name: str) -> int:
        """How many heads have their rows in neighbour order; 0 where rows lie as they should."""
        if self._spec.architecture != "llama":
            return 0
        if name.endswith(".attn_q.weight"):
            return self._spec.attention.heads
        return self._spec.attention.kv_heads if name.endswith(".attn_k.weight") else 0


def rows_in_half_order(rows: np.ndarray, heads: int) -> np.ndarray:
    """[heads · d, …] from pairs (2j, 2j + 1) to pairs (j, j + d/2), head by head."""
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])  # [head, pair, member, bytes]
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _read_all(path: Path) -> tuple[dict[str, Any], dict[str, Stored]]:
    first = read_part(path)
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int):
        raise BadModelFile(f"{path}: split.count is {count!r}, not a whole number")
    if count <= 1:
        return first.metadata, first.tensors
    tensors = dict(first.tensors)
    for other in _other_parts(path, count):
        part = read_part(other)
        if twice := tensors.keys() & part.tensors.keys():
            raise BadModelFile(f"{other} has the tensor {min(twice)} that another part of {path} has too")
        tensors |= part.tensors
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise BadModelFile(f"{path}: its {count} parts have {len(tensors)} tensors, the first part promises {total}")
    return first.metadata, tensors


def _other_parts(path: Path, count: int) -> list[Path]:
    match = _SPLIT_NAME.search(path.name)
    if match is None or match[2] != f"{count:05d}":
        raise BadModelFile(f"{path} is one of {count} parts, so its name must end in -00001-of-{count:05d}.gguf")
    if match[1] != "00001":
        raise BadModelFile(f"{path} is part {int(match[1])} of {count}; open the first part instead")
    stem = path.name[: match.start()]
    return [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(2, count + 1)]


def _refuse_scales(path: Path, stored: Mapping[str, Stored]) -> None:
    for name in stored:
        if name.endswith((".scale", ".input_scale")):
            raise BadModelFile(f"{path}: tensor {name} scales another one (NVFP4), which is not supported yet")


def _look(path: Path, stored: Mapping[str, Stored]) -> Seen:
    if EMBEDDING not in stored:
        raise BadModelFile(f"{path} has no tensor {EMBEDDING}")
    factors = stored.get(ROPE_FACTORS)
    return Seen(
        tensors=len(stored),
        vocab=stored[EMBEDDING].info.shape[0],
        tied=OUTPUT not in stored,
        rope_factors=None if factors is None else tuple(decode(factors.data, factors.info).reshape(-1).tolist()),
    )


def _shown(path: Path, stored: Mapping[str, Stored]) -> list[TensorInfo]:
    """The table as others see it: fused experts in two halves."""
    infos: list[TensorInfo] = []
    for name, tensor in stored.items():
        shape = tensor.info.shape
        if not name.endswith(_FUSED):
            infos.append(tensor.info)
        elif len(shape) != 3 or shape[1] % 2:
            raise BadModelFile(f"{path}: tensor {name} has the shape {shape}, expected [experts, 2 · width, hidden]")
        else:
            half = (shape[0], shape[1] // 2, shape[2])
            base = name.removesuffix(_FUSED)
            infos += [
                TensorInfo(f"{base}ffn_{part}_exps.weight", half, tensor.info.type, tensor.info.nbytes // 2)
                for part in ("gate", "up")
            ]
    return infos


def _check(path: Path, spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> None:
    """Everything the spec needs is there in its shape, and no layer has more than the spec knows."""
    expected = expected_model(spec)
    for name, shape in expected.items():
        if name not in tensors:
            raise BadModelFile(f"{path} has no tensor {name}, which {spec.architecture} needs in the shape {shape}")
        if tensors[name].shape != shape:
            raise BadModelFile(f"{path}: tensor {name} has the shape {tensors[name].shape}, expected {shape}")
        require_decodable(str(path), tensors[name])
    for name in tensors.keys() - expected.keys():
        block = re.match(r"blk\.(\d+)\.", name)
        if block and int(block[1]) < spec.layers:  # leaving out a bias would change answers without a word
            raise BadModelFile(f"{path}: tensor {name} is not one that {spec.architecture} has in layer {block[1]}")

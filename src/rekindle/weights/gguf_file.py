"""A GGUF file, or the files of a split one, as a WeightFile.

Two things differ from the file's own table:
- rows that a family's converter has moved are given back in the canonical order (`Family.gguf_order`).
- a fused ffn_gate_up_exps (gate rows first) is shown as ffn_gate_exps and ffn_up_exps.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.errors import BadModelFile
from rekindle.models.keys import KeysSeen
from rekindle.spec import ModelSpec
from rekindle.weights.expected import EMBEDDING, NEXTN_JOIN, OUTPUT, ROPE_FACTORS, expected_model
from rekindle.weights.fingerprint import fingerprint
from rekindle.weights.gguf_header import MAX_DIMENSIONS, Strings, read_part
from rekindle.weights.source import SourceFile, SourceFiles
from rekindle.weights.spec_reader import read_family, read_spec
from rekindle.weights.stored import Stored, UnreadRows, decode, require_decodable
from rekindle.weights.types import TensorInfo

MOST_FACTORS = 1 << 12
UNUSED_TOKEN = 5

_FUSED = "ffn_gate_up_exps.weight"
_OTHERS = {
    "mmproj": "a projector for images (mmproj)",
    "adapter": "an adapter (LoRA)",
    "imatrix": "an importance matrix",
    "vocab": "a vocabulary without weights",
}
_DECIDE_NEXTN = (
    "embedding_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
    "expert_count",
    "expert_used_count",
)
_SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


class _Gguf:
    """Opened by reading headers only; `raw` and `values` read the bytes of the one tensor."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._metadata, self._stored, files = _read_all(path)
        self.files = SourceFiles(files)
        _refuse_others(path, self._metadata)
        self._family = read_family(path, self._metadata)
        _refuse_scales(path, self._stored)
        self._spec, self._tensors = self._read()

    def _read(self) -> tuple[ModelSpec, dict[str, TensorInfo]]:
        """The model's numbers, and the tensors that others may read."""
        raise NotImplementedError

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
        rows = self.unread(name)
        return rows if isinstance(rows, np.ndarray) else rows.read()

    def unread(self, name: str) -> np.ndarray | UnreadRows:
        if name not in self._tensors:
            raise BadModelFile(f"{self._path} has no tensor {name}")
        if name not in self._stored:
            return self._half_of_fused(name)
        stored = self._stored[name]
        change = self._family.gguf_order(self._spec, re.sub(r"^blk\.\d+\.", "", name))
        return UnreadRows.of(stored, stored.info.shape) if change is None else change(stored.rows())

    def values(self, name: str) -> np.ndarray:
        return decode(self.raw(name), self._tensors[name])

    @functools.cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self._spec, self._stored.values())

    def fingerprint(self) -> str:
        return self._fingerprint

    def close(self) -> None:
        self.files.close()

    def _half_of_fused(self, name: str) -> np.ndarray:
        experts, width, _ = self._tensors[name].shape
        fused = self._stored[re.sub(r"ffn_(gate|up)_exps\.weight$", _FUSED, name)].rows()
        both = fused.reshape(experts, 2, width, -1)
        return both[:, 0 if "ffn_gate_exps" in name else 1].reshape(experts * width, -1)


class GgufFile(_Gguf):
    """A whole model."""

    def _read(self) -> tuple[ModelSpec, dict[str, TensorInfo]]:
        _refuse_companion(self._path, self._stored)
        spec = read_spec(self._path, self._metadata, _look(self._path, self._stored, self._metadata))
        shown = {info.name: info for info in _shown(self._path, self._stored)}
        return spec, shown | _checked(self._path, spec, shown)


class CompanionFile(_Gguf):
    """A file that holds a model's next-token-prediction block and not its layers. Copies of the embedding and the head
    that it may have are left alone: the model's own serve the block."""

    def __init__(self, path: Path, target: ModelSpec, numbers: Mapping[str, Any]) -> None:
        """numbers: the metadata of the model's own file."""
        self._target = target
        self._numbers = numbers
        super().__init__(path)

    def _read(self) -> tuple[ModelSpec, dict[str, TensorInfo]]:
        _check_companion(self._path, self._stored, self._metadata, self._numbers, self._target)
        return self._target, {info.name: info for info in _shown(self._path, self._stored)}


def is_companion(path: Path) -> bool:
    """Whether a GGUF file holds a next-token-prediction block and no model."""
    return _lacks_layers(read_part(path).tensors)


def _lacks_layers(names: Iterable[str]) -> bool:
    known = set(names)
    return any(".nextn." in name for name in known) and not any(name.startswith("blk.0.") for name in known)


def _refuse_companion(path: Path, stored: Mapping[str, Stored]) -> None:
    if _lacks_layers(stored):
        raise BadModelFile(
            f"{path} holds only next-token-prediction (MTP) layers, not a whole model; name the model's own file"
        )


def _check_companion(
    path: Path, names: Container[str], ours: Mapping[str, Any], theirs: Mapping[str, Any], target: ModelSpec
) -> None:
    """The block is that of the target; where both files give one of the numbers that decide it, they give the same."""
    architecture = ours.get("general.architecture")
    if architecture != target.architecture:
        raise BadModelFile(f"{path} is for models of {architecture}, {target.name} is one of {target.architecture}")
    if f"blk.{target.layers}.{NEXTN_JOIN}" not in names:
        raise BadModelFile(
            f"{path} has no tensor blk.{target.layers}.{NEXTN_JOIN}: {target.name} has {target.layers} layers"
        )
    for key in (f"{architecture}.{number}" for number in _DECIDE_NEXTN):
        if key in ours and key in theirs and not _same_number(ours[key], theirs[key]):
            raise BadModelFile(f"{path} was made with {key} {ours[key]}, {target.name} has {theirs[key]}")


def _same_number(one: Any, other: Any) -> bool:
    """Files keep numbers in 32 bits, configurations in 64."""
    numbers = isinstance(one, int | float) and isinstance(other, int | float)
    return math.isclose(one, other, rel_tol=1e-6) if numbers else bool(one == other)


def _read_all(path: Path) -> tuple[dict[str, Any], dict[str, Stored], list[SourceFile]]:
    first = read_part(path)
    files = [first.file]
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int):
        raise BadModelFile(f"{path}: split.count is {count!r}, not a whole number")
    if count <= 1:
        return first.metadata, first.tensors, files
    tensors = dict(first.tensors)
    for other in _other_parts(path, count):
        part = read_part(other)
        if twice := tensors.keys() & part.tensors.keys():
            raise BadModelFile(f"{other} has the tensor {min(twice)} that another part of {path} has too")
        tensors |= part.tensors
        files.append(part.file)
    total = first.metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise BadModelFile(f"{path}: its {count} parts have {len(tensors)} tensors, the first part promises {total}")
    return first.metadata, tensors, files


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


def _refuse_others(path: Path, metadata: Mapping[str, Any]) -> None:
    """Files that lie beside a model and are none."""
    kind = "mmproj" if metadata.get("general.architecture") == "clip" else metadata.get("general.type")
    if isinstance(kind, str) and kind in _OTHERS:
        raise BadModelFile(f"{path} is {_OTHERS[kind]}, not a language model; name the model's own file")


def _look(path: Path, stored: Mapping[str, Stored], metadata: Mapping[str, Any]) -> KeysSeen:
    if EMBEDDING not in stored:
        raise BadModelFile(f"{path} has no tensor {EMBEDDING}")
    vocab = stored[EMBEDDING].info.shape[0]
    return KeysSeen(
        tensors=len(stored),
        vocab=vocab,
        tokens=min(vocab, _named_tokens(metadata) or vocab),
        tied=OUTPUT not in stored,
        rope_factors=_rope_factors(path, stored[ROPE_FACTORS]) if ROPE_FACTORS in stored else None,
    )


def _named_tokens(metadata: Mapping[str, Any]) -> int:
    """Ids up to the last that has a token; converters fill the rest of the embedding up with unused ones."""
    texts, kinds = (metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if not isinstance(texts, list | Strings):
        return 0
    if not isinstance(kinds, list) or len(kinds) != len(texts):
        return len(texts)
    return next((i + 1 for i in range(len(texts) - 1, -1, -1) if kinds[i] != UNUSED_TOKEN), 0)


def _rope_factors(path: Path, stored: Stored) -> tuple[float, ...]:
    """Checked before they are decoded: a type of one bit makes thirty times its bytes."""
    require_decodable(str(path), stored.info)
    if math.prod(stored.info.shape) > MOST_FACTORS:
        raise BadModelFile(f"{path}: tensor {ROPE_FACTORS} has the shape {stored.info.shape}, more than any head needs")
    return tuple(decode(stored.rows(), stored.info).reshape(-1).tolist())


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


def _checked(path: Path, spec: ModelSpec, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """What the spec needs, in its shapes. Everything is there, and no layer has more than the spec knows."""
    expected = expected_model(spec)
    found: dict[str, TensorInfo] = {}
    for name, shape in expected.items():
        if name not in tensors:
            raise BadModelFile(f"{path} has no tensor {name}, which {spec.architecture} needs in the shape {shape}")
        if not same_shape(tensors[name].shape, shape):
            raise BadModelFile(f"{path}: tensor {name} has the shape {tensors[name].shape}, expected {shape}")
        require_decodable(str(path), tensors[name])
        found[name] = replace(tensors[name], shape=shape)
    for name in tensors.keys() - expected.keys():
        block = re.match(r"blk\.(\d{1,9})\.", name)
        if block and int(block[1]) < spec.layers:  # leaving out a bias would change answers without a word
            raise BadModelFile(f"{path}: tensor {name} is not one that {spec.architecture} has in layer {block[1]}")
    return found


def same_shape(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """As ggml compares: every shape has four sizes, those that are not written are 1."""
    return _padded(one) == _padded(other)


def _padded(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1,) * (MAX_DIMENSIONS - len(shape)) + shape

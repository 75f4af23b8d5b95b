"""A Hugging Face folder (config.json and safetensors) as a WeightFile with canonical names, values and spec.

Tensors are made one by one when asked for, so a span of layers touches only its own bytes.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.errors import BadModelFile
from rekindle.models.keys import KeysSeen
from rekindle.spec import ModelSpec
from rekindle.weights.fingerprint import fingerprint
from rekindle.weights.hf_config import is_tied, metadata_of, read_format, rope_factors, text_config
from rekindle.weights.hf_names import Recipe, nextn_recipes, recipes
from rekindle.weights.safetensors_table import TYPES, read_folder, read_json
from rekindle.weights.source import SourceFiles
from rekindle.weights.spec_reader import read_spec
from rekindle.weights.stored import Stored, UnreadRows, decode
from rekindle.weights.types import TensorInfo

_PREFIXES = ("model.language_model.", "model.")
_BUFFERS = (".rotary_emb.inv_freq",)  # old checkpoints kept it; it follows from the config


class HfFolder:
    """Metadata are the GGUF keys made from the config, and the config itself under "config"."""

    def __init__(self, path: Path) -> None:
        self._path = path
        _refuse_gguf(path)
        config = read_json(path / "config.json")
        metadata = metadata_of(path, config)
        self._stored = read_folder(path)
        prefix = _prefix(path, self._stored)
        self.files = SourceFiles(list({id(each.file): each.file for each in self._stored.values()}.values()))
        vocab = self._stored[f"{prefix}embed_tokens.weight"].info.shape[0]
        seen = KeysSeen(
            tensors=len(self._stored),
            vocab=vocab,
            tokens=min(vocab, _named_tokens(path) or vocab),
            tied=is_tied(path, config),
            rope_factors=rope_factors(path, config),
        )
        spec = read_spec(path, metadata, seen)
        self._spec = replace(spec, nextn=_nextn(text_config(path, config).values, self._stored))
        self._metadata = {**metadata, "config": config}
        hf = read_format(path, config)[1]
        self._recipes = recipes(spec, hf, prefix, self._stored)
        if self._spec.nextn == 1:
            self._recipes |= nextn_recipes(spec, hf, self._stored)
        _check(path, spec, prefix, self._recipes, self._stored)
        self._tensors = {name: _info(name, recipe, self._stored) for name, recipe in self._recipes.items()}
        self._fingerprint = functools.cache(lambda: fingerprint(self._spec, self._stored.values()))

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
        recipe = self._recipe(name)
        if recipe.compute is not None:
            return self.values(name).view(np.uint8).reshape(math.prod(recipe.shape[:-1]), -1)
        if recipe.move is None and len(recipe.sources) == 1:
            return UnreadRows.of(self._stored[recipe.sources[0]], recipe.shape)
        return self._moved(recipe)

    def values(self, name: str) -> np.ndarray:
        recipe = self._recipe(name)
        stored = self._stored[recipe.sources[0]].info
        values = decode(self._moved(recipe), replace(stored, shape=recipe.shape))
        return values if recipe.compute is None else recipe.compute(values)

    def fingerprint(self) -> str:
        return self._fingerprint()

    def close(self) -> None:
        self.files.close()

    def _recipe(self, name: str) -> Recipe:
        if name not in self._recipes:
            raise BadModelFile(f"{self._path} has no tensor {name}")
        return self._recipes[name]

    def _moved(self, recipe: Recipe) -> np.ndarray:
        """uint8 [rows, bytes of a row] of the canonical shape, elements as stored."""
        arrays = [_elements(self._stored[source]) for source in recipe.sources]
        array = arrays[0] if len(arrays) == 1 else np.stack(arrays)
        if array.size == math.prod(recipe.shape):
            array = array.reshape(recipe.shape)  # drops axes of 1; only fused experts hold more than the one tensor
        if recipe.move is not None:
            array = recipe.move(array)
        return np.ascontiguousarray(array).view(np.uint8).reshape(math.prod(recipe.shape[:-1]), -1)


def _refuse_gguf(path: Path) -> None:
    found = sorted(path.glob("*.gguf"))
    if found and not (path / "config.json").exists():
        raise BadModelFile(f"{path} is a folder with {found[0].name} and without a config.json; name that file itself")


def _named_tokens(path: Path) -> int:
    """Ids up to the last that the folder's tokenizer knows; 0 where there is none to ask."""
    if not (path / "tokenizer.json").exists():
        return 0
    content = read_json(path / "tokenizer.json")
    try:
        ids = [*content["model"]["vocab"].values(), *(token["id"] for token in content.get("added_tokens") or ())]
        return max(map(int, ids), default=-1) + 1
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadModelFile(f"{path / 'tokenizer.json'} lists no tokens by id: {error!r}") from error


def _elements(stored: Stored) -> np.ndarray:
    """Stored elements as unsigned integers of their width: moving them needs no number format."""
    width = 4 if stored.info.type == "F32" else 2
    return stored.rows().view(f"u{width}").reshape(stored.info.shape)


def _prefix(path: Path, stored: Mapping[str, Stored]) -> str:
    for prefix in _PREFIXES:
        if f"{prefix}embed_tokens.weight" in stored:
            return prefix
    raise BadModelFile(f"{path} has no tensor embed_tokens.weight below {' or '.join(_PREFIXES)}")


def _nextn(text: Mapping[str, Any], stored: Mapping[str, Stored]) -> int:
    blocks = text.get("mtp_num_hidden_layers")
    return blocks if isinstance(blocks, int) and any(name.startswith("mtp.") for name in stored) else 0


def _info(name: str, recipe: Recipe, stored: Mapping[str, Stored]) -> TensorInfo:
    type = "F32" if recipe.compute is not None else stored[recipe.sources[0]].info.type
    return TensorInfo(name, recipe.shape, type, math.prod(recipe.shape) * (4 if type == "F32" else 2))


def _check(path: Path, spec: ModelSpec, prefix: str, made: Mapping[str, Recipe], stored: Mapping[str, Stored]) -> None:
    """Every source is there in its shape, and no layer has tensors that nothing is made from."""
    used: set[str] = set()
    for name, recipe in made.items():
        used.update(recipe.sources)
        for source in recipe.sources:
            if source not in stored:
                raise BadModelFile(f"{path} has no tensor {source}, from which {name} {recipe.shape} is made")
            if stored[source].info.shape != recipe.source_shape:
                raise BadModelFile(
                    f"{path}: tensor {source} has the shape {stored[source].info.shape}, expected {recipe.source_shape}"
                )
            if stored[source].info.type not in TYPES:
                raise BadModelFile(
                    f"{path}: tensor {source} has type {stored[source].info.type}; {', '.join(TYPES)} can be read"
                )
        if len({stored[source].info.type for source in recipe.sources}) > 1:
            raise BadModelFile(f"{path}: the experts of {name} are stored in different types")
    for name in stored.keys() - used:
        layer = re.match(re.escape(prefix) + r"layers\.(\d{1,9})\.", name)
        if layer and int(layer[1]) < spec.layers and not name.endswith(_BUFFERS):
            raise BadModelFile(f"{path}: tensor {name} is not one that {spec.architecture} has in layer {layer[1]}")

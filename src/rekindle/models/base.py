"""What a family of models is: which files are its own, how its numbers are read, how its tensors are named and stored.

A family is one file beside this one and one line in `registry.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rekindle.errors import BadModelFile
from rekindle.models.keys import KeysSeen, MetadataKeys
from rekindle.spec import ModelSpec

Change = Callable[[np.ndarray], np.ndarray]
ChangeOf = Callable[[ModelSpec, str], Change | None]  # by a tensor's name, without its layer


def unchanged(spec: ModelSpec, name: str) -> Change | None:
    return None


@dataclass(frozen=True, slots=True)
class HfConfig:
    """The language model's part of a config.json."""

    path: Path  # of the folder, for error messages
    values: Mapping[str, Any]

    def number(self, key: str) -> Any:
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise BadModelFile(f"{self.path}: config.json has {key} {value!r}, expected a number")
        return value

    def object(self, key: str) -> dict[str, Any]:
        """Empty where nothing is said."""
        value = self.values.get(key) or {}
        if not isinstance(value, dict):
            raise BadModelFile(f"{self.path}: config.json has {key} {value!r}, expected an object")
        return value


@dataclass(frozen=True, slots=True)
class HfFormat:
    """A family's Hugging Face folders, as far as they differ from what `weights/` knows of all folders."""

    classes: Mapping[str, str]  # name in `architectures` of config.json → GGUF architecture
    layer_types: tuple[str, ...] = ("full_attention",)  # that config.json may list
    rotated_share: float = 1.0  # of a head, where config.json says nothing
    keys: Mapping[str, str] = field(default_factory=dict)  # config key → GGUF key
    more_keys: Callable[[HfConfig, Mapping[str, Any]], dict[str, Any]] = lambda config, keys: {}  # GGUF keys
    names: Mapping[str, str] = field(default_factory=dict)  # canonical tensor in a layer → name in a checkpoint
    axes_of_one: Mapping[str, int] = field(default_factory=dict)  # canonical tensor → axis that a checkpoint adds
    move: ChangeOf = unchanged  # elements, whatever their type, to their canonical places
    compute: ChangeOf = unchanged  # float32 → float32


@dataclass(frozen=True, slots=True)
class Family:
    """Models that are read alike."""

    architectures: tuple[str, ...]  # `general.architecture` of its GGUF files
    read: Callable[[MetadataKeys, KeysSeen], ModelSpec]
    ffn_norm: str = "ffn_norm.weight"  # the norm in front of the feed-forward has two names in GGUF files
    gguf_order: ChangeOf = unchanged  # rows of a GGUF tensor to their canonical places
    hf: HfFormat | None = None

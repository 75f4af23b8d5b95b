"""Metadata → ModelSpec. A Hugging Face config is put into GGUF keys first, so both formats meet the same checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rekindle.models.base import Family
from rekindle.models.keys import KeysSeen, MetadataKeys
from rekindle.models.registry import family_of
from rekindle.spec import ModelSpec


def read_family(path: Path, metadata: Mapping[str, Any]) -> Family:
    return family_of(metadata.get("general.architecture"), str(path))


def read_spec(path: Path, metadata: Mapping[str, Any], seen: KeysSeen) -> ModelSpec:
    family = read_family(path, metadata)
    return family.read(MetadataKeys(path, metadata, metadata["general.architecture"]), seen)

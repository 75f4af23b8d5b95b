"""The families that can be read. A new one is a file beside this one and a line at the end of it."""

from __future__ import annotations

from rekindle.errors import BadModelFile
from rekindle.models import llama, qwen3, qwen35
from rekindle.models.base import Family, HfFormat

_families: dict[str, Family] = {}  # by architecture
_hf_formats: dict[str, tuple[str, HfFormat]] = {}  # (architecture, format) by class name in config.json


def register(family: Family) -> None:
    for architecture in family.architectures:
        assert architecture not in _families, f"two families have the architecture {architecture}"
        _families[architecture] = family
    if family.hf is not None:
        _hf_formats.update({name: (own, family.hf) for name, own in family.hf.classes.items()})


def family_of(architecture: object, where: str = "the model") -> Family:
    """By the name in GGUF metadata. `where` opens the sentence of the error."""
    if not isinstance(architecture, str) or architecture not in _families:
        raise BadModelFile(f"{where} has the architecture {architecture!r}; known are {', '.join(_families)}")
    return _families[architecture]


def hf_format_of(name: object, where: str) -> tuple[str, HfFormat]:
    """Architecture and format by the class that a config.json names."""
    if name is None:
        raise BadModelFile(f"{where} names no architecture: it is no model, or a drafter's, which goes with --drafter")
    if not isinstance(name, str) or name not in _hf_formats:
        raise BadModelFile(f"{where} has the architecture {name!r}; known are {', '.join(_hf_formats)}")
    return _hf_formats[name]


register(qwen35.FAMILY)
register(llama.FAMILY)
register(qwen3.FAMILY)

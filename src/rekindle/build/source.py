"""A model that a server may load: from its settings to an engine and its text, as often as it is asked for."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rekindle.api import ModelFacts, ModelSource, ModelText, ServedModel, Settings
from rekindle.api.cards import FILE_KEYS, card_of, names_in
from rekindle.build.built import Built
from rekindle.build.engine import build_engine, machine_of
from rekindle.build.loaded import LoadedEngine
from rekindle.build.memory import Budgets, as_good, free_memory, tidy
from rekindle.build.model import Model, name_of, open_weights_of
from rekindle.build.planning import plan_model
from rekindle.build.presets import Preset
from rekindle.build.stage import Progress
from rekindle.config import Config
from rekindle.errors import BadConfig, DoesNotFit, RekindleError
from rekindle.placement import Plan
from rekindle.text import TURN_BUDGET, VOLATILE_LINES, TurnMemory
from rekindle.text.parsing.parser import END_THINK
from rekindle.text.template import folder_template
from rekindle.text.tokenizer import read_json
from rekindle.weights import WeightFile
from rekindle.weights.describe import describe

log = logging.getLogger("rekindle.build")


@dataclass(frozen=True, slots=True)
class TextOptions:
    """What the server does for the prompts of every model."""

    normalise: bool = True
    remember_turns: bool = True
    prepare_next: bool = True
    namespaces: frozenset[str] = frozenset({""})


@dataclass(slots=True)
class SharedMemory:
    """Measured whenever nothing is loaded."""

    whole: Budgets | None = None


class ConfiguredModel:
    """Loaded and unloaded by a `ModelHost`. Its memories of turns outlive an unload, as snapshots on disk do."""

    def __init__(self, preset: Preset, options: TextOptions, shared: SharedMemory) -> None:
        self.on_progress: Progress | None = None  # of the next load
        self.on_kernels: Progress | None = None
        self._preset, self._options, self._shared = preset, options, shared
        self._created = int(time.time())
        self._memories: dict[str, TurnMemory] = {}
        self._loaded: LoadedEngine | None = None
        self._settings: Settings | None = None

    @property
    def settings(self) -> Settings:
        if self._settings is None:
            self._settings = self._settings_of(open_weights_of(self._preset.config.model))
        return self._settings

    @property
    def built(self) -> Built | None:
        """None while it is not loaded."""
        return self._loaded.built if self._loaded is not None else None

    def _settings_of(self, file: WeightFile) -> Settings:
        stem, facts = name_of(file), _facts(file)
        return Settings(
            models=tuple(dict.fromkeys((self._preset.name or stem, *self._preset.aliases))),
            unlisted=(stem,),
            context=self._preset.config.context or file.spec.context,
            fingerprint=file.fingerprint(),
            created=self._created,
            facts=facts,
            card=card_of(
                {**file.metadata, **_generation_config(file.path)},
                [*names_in(file.metadata), stem],
                dict(self._preset.defaults),
                thinks=END_THINK in facts.template,
            ),
            prepare_next=self._options.prepare_next,
        )

    # Memory

    @property
    def _shares(self) -> bool:
        """Whether its memory can be told apart from others': replicas and stages elsewhere take all they find."""
        config = self._preset.config
        return config.replicas == 1 and not config.shards and config.ray is None

    def fits_beside(self, others: list[ModelSource]) -> bool:
        neighbours = _configured(others)
        if not neighbours:
            return True
        if not all(model._shares for model in (self, *neighbours)):
            return False
        whole = self._whole
        model = Model(open_weights_of(self._preset.config.model))  # without its text, which no plan needs
        alone = _plan(whole.offer(self._preset.config, whole), model)  # raises where it would not fit even so
        try:
            beside = _plan(self._offer(neighbours), model)
        except DoesNotFit:
            return False
        return as_good(beside, alone)

    @property
    def _whole(self) -> Budgets:
        assert self._shared.whole is not None, "memory is measured before the first model is loaded"
        return self._shared.whole

    def _offer(self, neighbours: Sequence[ConfiguredModel]) -> Config:
        plans = [model.built.plan for model in neighbours if model.built is not None]
        return self._whole.without(plans).offer(self._preset.config, self._whole)

    # Loading

    def load(self, others: list[ModelSource]) -> ServedModel:
        neighbours = _configured(others)
        if not neighbours:
            self._shared.whole = free_memory()
        config = self._offer(neighbours) if neighbours else self._preset.config
        built = build_engine(config, self.on_progress, self.on_kernels, grammars=True)
        self.on_progress = self.on_kernels = None
        with ExitStack() as undo:
            undo.callback(built.stop)  # where the file's settings have gone bad since
            served = self._served(built)
            undo.pop_all()
        return served

    def _served(self, built: Built) -> ServedModel:
        settings = self._settings_of(built.model.file)
        if self._settings is not None and settings.fingerprint != self._settings.fingerprint:
            self._memories = {}  # turns of other weights, perhaps of another vocabulary
        self._settings = settings
        log.info("%s: where a request says nothing, %s", settings.models[0], settings.card.words())
        text = self._text(built)
        self._loaded = LoadedEngine(built)
        return ServedModel(self._loaded, text, settings)

    def _text(self, built: Built) -> ModelText:
        model, options = built.model, self._options
        if options.remember_turns and not self._memories:
            self._memories = {space: self._memory(space) for space in options.namespaces}
        rules = VOLATILE_LINES if options.normalise else ()
        return ModelText(model.tokenizer, model.template, self._memories, rules, built.context, model.grammars)

    def _memory(self, space: str) -> TurnMemory:
        """One for each name space. Turns that a memory has dropped, or never had because the server was restarted, it
        finds in the published prefixes."""
        budget = TURN_BUDGET // len(self._options.namespaces)
        return TurnMemory(budget, partial(self._continuations, namespace=space))

    def _continuations(self, tokens: Sequence[int], longest: int, namespace: str) -> list[list[int]]:
        loaded = self._loaded
        return [] if loaded is None else loaded.continuations(tokens, longest, namespace)

    def reason(self, error: RekindleError) -> str:
        """Clients see nothing of the server's folders. Settings name them anywhere, and are the user's to change."""
        if isinstance(error, BadConfig):
            return "a setting of the server keeps it from being loaded; the server's log has the details"
        path = self._preset.config.model
        return str(error) if path is None else str(error).replace(str(path), path.name)

    def tidy(self) -> None:
        tidy()


def _facts(file: WeightFile) -> ModelFacts:
    found = describe(file)
    most = next(iter(found.bytes_by_type), "unknown")
    is_folder = file.path.is_dir()
    template = folder_template(file.path) if is_folder else file.metadata.get("tokenizer.chat_template")
    kind = "safetensors" if is_folder else "gguf"
    return ModelFacts(found.architecture, found.parameters, found.nbytes, most, kind, str(template or ""))


def _generation_config(path: Path) -> dict[str, Any]:
    """What a Hugging Face folder recommends, under the keys of GGUF files."""
    file = path / "generation_config.json"
    given = read_json(file) if path.is_dir() and file.exists() else {}
    if given.get("do_sample", True) is False:
        return {}
    names = {field: key for key, (field, *_) in FILE_KEYS.items()}
    return {names[field]: value for field, value in given.items() if field in names}


def _configured(sources: Sequence[ModelSource]) -> list[ConfiguredModel]:
    found = [source for source in sources if isinstance(source, ConfiguredModel)]
    assert len(found) == len(sources), "models of one server are configured alike"
    return found


def _plan(config: Config, model: Model) -> Plan:
    _, machine = machine_of(config, None)
    return plan_model(config, model, machine)


def make_sources(presets: Sequence[Preset], options: TextOptions) -> list[ConfiguredModel]:
    """Models that share this machine's memory. The files of several are opened at once, so that one that is no model is
    an error at the start."""
    shared = SharedMemory()
    sources = [ConfiguredModel(preset, options, shared) for preset in presets]
    names = [name for source in sources for name in source.settings.models] if len(sources) > 1 else []
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise BadConfig(f"two models have the name {twice[0]}: give each its own in a --models file")
    return sources

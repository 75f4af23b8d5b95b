"""Live sequences, scheduling, sampling, events."""

from rekindle.engine.engine import Engine, EngineSettings, EngineStatus

__all__ = ["Engine", "EngineSettings", "EngineStatus"]

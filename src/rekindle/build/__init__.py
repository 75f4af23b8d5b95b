"""The one place that wires rooms together."""

from rekindle.build.app import build_app
from rekindle.build.engine import Built, build_engine, plan_model
from rekindle.build.machine import device_names, make_machine
from rekindle.build.model import Model, embedded_model, open_model

__all__ = [
    "Built",
    "Model",
    "build_app",
    "build_engine",
    "device_names",
    "embedded_model",
    "make_machine",
    "open_model",
    "plan_model",
]

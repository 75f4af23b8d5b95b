"""The one place that wires rooms together."""

from rekindle.build.app import build_app
from rekindle.build.engine import Built, build_engine, plan_model
from rekindle.build.machine import RAM_SHARE, VRAM_SHARE, available_ram, device_names, make_machine, vram_by_name
from rekindle.build.model import Model, embedded_model, open_model, open_weights_of
from rekindle.build.probe import probe_device, speeds
from rekindle.build.shards import StageOrder, build_shard, choose_types, host_shard
from rekindle.shards import keygen

__all__ = [
    "RAM_SHARE",
    "VRAM_SHARE",
    "Built",
    "Model",
    "StageOrder",
    "available_ram",
    "build_app",
    "build_engine",
    "build_shard",
    "choose_types",
    "device_names",
    "embedded_model",
    "host_shard",
    "keygen",
    "make_machine",
    "open_model",
    "open_weights_of",
    "plan_model",
    "probe_device",
    "speeds",
    "vram_by_name",
]

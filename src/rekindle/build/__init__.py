"""The one package that wires the others together."""

from rekindle.build.built import Built
from rekindle.build.engine import build_engine
from rekindle.build.machine import RAM_SHARE, VRAM_SHARE, available_ram, device_names, make_machine, vram_by_name
from rekindle.build.model import Model, embedded_model, open_model, open_weights_of
from rekindle.build.planning import plan_model, plan_numbers
from rekindle.build.prefix_cache import own_cache_folder
from rekindle.build.presets import Preset, check_drafter, read_presets, shared_ram
from rekindle.build.probe import probe_device, rates, speeds
from rekindle.build.shard_host import build_shard, host_shard
from rekindle.build.source import ConfiguredModel, TextOptions, make_sources
from rekindle.build.stage import StageConfig
from rekindle.build.types import choose_types
from rekindle.kernels.native import set_threads
from rekindle.shards import keygen

__all__ = [
    "RAM_SHARE",
    "VRAM_SHARE",
    "Built",
    "ConfiguredModel",
    "Model",
    "Preset",
    "StageConfig",
    "TextOptions",
    "available_ram",
    "build_engine",
    "build_shard",
    "check_drafter",
    "choose_types",
    "device_names",
    "embedded_model",
    "host_shard",
    "keygen",
    "make_machine",
    "make_sources",
    "open_model",
    "open_weights_of",
    "own_cache_folder",
    "plan_model",
    "plan_numbers",
    "probe_device",
    "rates",
    "read_presets",
    "set_threads",
    "shared_ram",
    "speeds",
    "vram_by_name",
]

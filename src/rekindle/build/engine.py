"""From settings to a running engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

import torch
from blake3 import blake3

from rekindle.build.machine import device_names, make_machine, torch_device
from rekindle.build.model import Model, open_model
from rekindle.config import Config, show_bytes
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.errors import BadConfig
from rekindle.experts import CountsFile, RoutingCounts, SpanExperts
from rekindle.models import load_span
from rekindle.placement import Machine, Plan, Wishes, make_plan, parse_split, sizes_from_tensors
from rekindle.pool import KvMode
from rekindle.prefix import PrefixCache, check_budget
from rekindle.snapshots.disk import DiskStore
from rekindle.stages import LocalStage, Pipeline, Stage

log = logging.getLogger("rekindle.build")

Progress = Callable[[int, int], None]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Built:
    """A running engine and what it was built from."""

    engine: Engine
    model: Model
    plan: Plan
    context: int
    counts: CountsFile | None = None  # of a model with experts, where there is a folder to keep them in

    def stop(self) -> None:
        """End every request, then save what the next start should know."""
        self.engine.stop()
        if self.counts is not None:
            self.counts.stop()


def build_engine(config: Config, on_progress: Progress | None = None) -> Built:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model = open_model(config.model)
    names = device_names(config.devices)
    plan = plan_model(config, model, make_machine(names, config.vram, config.ram))
    for reason in plan.reasons:
        log.info("plan: %s", reason)
    dtype = _dtype(config, names)
    counts_file = _counts_file(config, model)
    counts = counts_file.counts if counts_file else RoutingCounts(model.spec.layers, model.spec.ffn.experts)
    stages: list[Stage] = []
    for stage in plan.stages:
        experts = SpanExperts(stage.hot, stage.ring_slots, counts) if stage.cold else None
        device = torch_device(stage.device.name)
        span = load_span(model.file, stage.span, device, dtype, on_progress, experts)
        kv_mode: KvMode = "sparse" if plan.wishes.kv_mode == "sparse" else "exact"
        stages.append(
            LocalStage(span, stage.slots, stage.pool_pages, plan.wishes.kv_type, stage.host_pages, kv_mode=kv_mode)
        )
    prefixes = _prefix_cache(config, model, plan)
    settings = EngineSettings(context=plan.wishes.context, queue=config.queue, grid=config.grid, audit=config.audit)
    engine = Engine(Pipeline(stages), prefixes, settings).start()
    return Built(engine, model, plan, plan.wishes.context, counts_file.start() if counts_file else None)


def plan_model(config: Config, model: Model, machine: Machine) -> Plan:
    """Where everything goes; also what `rekindle plan` shows."""
    spec = model.spec
    names = [device.name for device in machine.devices]
    on_cpu = all(name == "cpu" for name in names)
    counts_file = _counts_file(config, model)
    wishes = Wishes(
        context=min(config.context or spec.context, spec.context),
        sequences=config.sequences,
        kv_type=config.kv_type or ("f32" if _dtype(config, names) is torch.float32 else "bf16"),
        pool=config.pool,
        split=parse_split(config.split, len(names), spec.layers),
        compute_bytes=_dtype(config, names).itemsize,
        chunk=config.grid,
        counts=counts_file.counts.for_placement() if counts_file else None,
    )
    if config.context is not None and config.context > spec.context:
        raise BadConfig(f"--context is {config.context}, the model was trained for {spec.context}")
    sizes = sizes_from_tensors(spec, _loaded_sizes(model, expanded=on_cpu, itemsize=wishes.compute_bytes))
    return make_plan(machine, spec, sizes, wishes)


def _counts_file(config: Config, model: Model) -> CountsFile | None:
    """Which experts the last run used, beside its snapshots."""
    spec = model.spec
    if config.cache_dir is None or not spec.ffn.is_moe:
        return None
    return CountsFile(config.cache_dir, model.file.fingerprint(), spec.layers, spec.ffn.experts)


def _loaded_sizes(model: Model, expanded: bool, itemsize: int) -> Mapping[str, tuple[tuple[int, ...], int]]:
    """Shapes and the bytes each tensor takes once loaded: as in the file, or expanded where no kernel reads it so."""
    return {
        name: (info.shape, prod(info.shape) * itemsize if expanded and len(info.shape) > 1 else info.nbytes)
        for name, info in model.file.tensors.items()
    }


def _dtype(config: Config, names: list[str]) -> torch.dtype:
    name = config.dtype or ("float32" if all(device == "cpu" for device in names) else "bfloat16")
    if name not in DTYPES:
        raise BadConfig(f"--dtype is '{name}'; known are {', '.join(DTYPES)}")
    return DTYPES[name]


def _prefix_cache(config: Config, model: Model, plan: Plan) -> PrefixCache:
    disk = None
    if config.cache_dir is not None and config.cache_disk > 0:
        disk = DiskStore(config.cache_dir, _state_identity(model, plan), config.cache_disk)
    fixed = _fixed_snapshot_bytes(plan)
    for warning in check_budget(fixed, config.cache_ram, config.cache_disk if disk else None):
        log.warning("%s", warning)
    log.info("one snapshot takes %s beside its pages", show_bytes(fixed))
    return PrefixCache(config.cache_ram, disk)


def _state_identity(model: Model, plan: Plan) -> str:
    """Weights and everything else that decides what bits a state holds and how they are stored."""
    wishes = plan.wishes
    identity = f"{model.file.fingerprint()} {wishes.kv_type} {wishes.compute_bytes}"
    if wishes.kv_mode == "sparse":  # what was left out depends on the pool
        identity += " ".join(["", "sparse", *(f"{stage.span}:{stage.pool_pages}" for stage in plan.stages)])
    return blake3(identity.encode()).hexdigest()


def _fixed_snapshot_bytes(plan: Plan) -> int:
    spec = plan.spec
    delta = spec.delta
    per_layer = 4 * (delta.state_values + delta.window_values) if delta else 0
    return per_layer * len(spec.delta_layers()) + 4 * spec.vocab

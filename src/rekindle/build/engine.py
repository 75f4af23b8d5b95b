"""From settings to a running engine."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import torch
from blake3 import blake3

from rekindle.build.machine import device_names, device_of, make_machine, shard_of
from rekindle.build.model import Model, open_model
from rekindle.build.probe import speeds
from rekindle.build.shards import DTYPES, Progress, Shards, StageOrder, load_stage, stage_orders
from rekindle.config import Config, show_bytes
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.errors import BadConfig
from rekindle.experts import CountsFile, RoutingCounts
from rekindle.placement import Machine, Plan, Wishes, make_plan, parse_split, sizes_from_tensors
from rekindle.prefix import PrefixCache, check_budget
from rekindle.snapshots.disk import DiskStore
from rekindle.stages import Pipeline, Stage

if TYPE_CHECKING:
    from rekindle.build.ray import RayHosts

log = logging.getLogger("rekindle.build")


@dataclass(frozen=True, slots=True)
class Built:
    """A running engine and what it was built from."""

    engine: Engine
    model: Model
    plan: Plan
    context: int
    counts: CountsFile | None = None  # of a model with experts, where there is a folder to keep them in
    hosts: Shards | RayHosts | None = None  # of stages outside this process

    def stop(self) -> None:
        """End every request, then save what the next start should know."""
        self.engine.stop()
        if self.hosts is not None:
            self.hosts.stop()
        if self.counts is not None:
            self.counts.stop()


def build_engine(config: Config, on_progress: Progress | None = None) -> Built:
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    model = open_model(config.model)
    hosts = _hosts(config)
    try:
        return _build(config, model, hosts, on_progress)
    except BaseException:
        if hosts is not None:
            hosts.stop()
        raise


def _hosts(config: Config) -> Shards | RayHosts | None:
    """Whoever hosts stages outside this process."""
    if config.ray is None:
        return Shards(config) if config.shards else None
    if config.shards or config.devices != ("auto",):
        raise BadConfig("--ray takes the devices of its nodes; leave out --devices and --shard")
    if importlib.util.find_spec("ray") is None:
        raise BadConfig("--ray needs Ray, which is not installed: pip install 'rekindle[ray]'")
    from rekindle.build.ray import RayHosts  # half a second and 79 MB that only this option needs

    return RayHosts(config.ray, config.model, config.threads)


def _build(config: Config, model: Model, hosts: Shards | RayHosts | None, on_progress: Progress | None) -> Built:
    names, machine = _machine(config, hosts)
    plan = plan_model(config, model, machine)
    for reason in plan.reasons:
        log.info("plan: %s", reason)
    dtype = _dtype(config, names)
    counts_file = _counts_file(config, model)
    counts = counts_file.counts if counts_file else RoutingCounts(model.spec.layers, model.spec.ffn.experts)
    orders = stage_orders(plan, dtype)
    stages = _load_stages(model, names, orders, hosts, counts, on_progress)
    prefixes = _prefix_cache(config, model, plan)
    settings = EngineSettings(
        context=plan.wishes.context, queue=config.queue, grid=plan.wishes.chunk, audit=config.audit
    )
    engine = Engine(Pipeline(stages), prefixes, settings).start()
    return Built(engine, model, plan, plan.wishes.context, counts_file.start() if counts_file else None, hosts)


def _machine(config: Config, hosts: Shards | RayHosts | None) -> tuple[list[str], Machine]:
    """The names of the devices, in pipeline order, and what they have."""
    if hosts is None or isinstance(hosts, Shards):
        names = device_names(config.devices)
        relative = speeds(names, config.shards) if config.split == "auto" else None
        return names, make_machine(names, config.vram, config.ram, config.shards, relative)
    return hosts.names, hosts.machine(config.ram)


def _load_stages(
    model: Model,
    names: list[str],
    orders: list[StageOrder],
    hosts: Shards | RayHosts | None,
    counts: RoutingCounts,
    on_progress: Progress | None,
) -> list[Stage]:
    """Local ones are loaded here, the others where they are."""
    if hosts is not None:
        hosts.start(names, orders)
    stages: list[Stage] = []
    for name, order in zip(names, orders, strict=True):
        if hosts is not None and shard_of(name):
            stages.append(hosts.connect(name, order, model.file.fingerprint()))
        else:
            stages.append(load_stage(model.file, order, on_progress, counts))
    return stages


def plan_model(config: Config, model: Model, machine: Machine) -> Plan:
    """Where everything goes; also what `rekindle plan` shows."""
    spec = model.spec
    names = [device.name for device in machine.devices]
    on_cpu = all(device.is_cpu for device in machine.devices)
    counts_file = _counts_file(config, model)
    if config.audit and config.kv_mode == "sparse":
        raise BadConfig(
            "--audit compares with a cold run, which --kv-mode sparse does not promise to equal; leave one out"
        )
    wishes = Wishes(
        context=min(config.context or spec.context, spec.context),
        sequences=config.sequences,
        kv_type=config.kv_type or ("f32" if _dtype(config, names) is torch.float32 else "bf16"),
        pool=config.pool,
        kv_mode=config.kv_mode,
        kv_policy=config.kv_policy,
        split=parse_split(config.split, len(names), spec.layers),
        compute_bytes=_dtype(config, names).itemsize,
        chunk=_grid(config, names),
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


def _grid(config: Config, names: list[str]) -> int:
    """Prefill chunk: a GPU wants many rows at once, and others wait for one chunk at most."""
    return config.grid or (512 if all(device_of(name) == "cpu" for name in names) else 2048)


def _dtype(config: Config, names: list[str]) -> torch.dtype:
    name = config.dtype or ("float32" if all(device_of(name) == "cpu" for name in names) else "bfloat16")
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
    if wishes.kv_mode == "sparse":  # what was left out depends on pool, policy and the chunks after which it is chosen
        rule = ["", "sparse", wishes.kv_policy, str(wishes.chunk)]
        identity += " ".join([*rule, *(f"{stage.span}:{stage.pool_pages}" for stage in plan.stages)])
    return blake3(identity.encode()).hexdigest()


def _fixed_snapshot_bytes(plan: Plan) -> int:
    spec = plan.spec
    delta = spec.delta
    per_layer = 4 * (delta.state_values + delta.window_values) if delta else 0
    return per_layer * len(spec.delta_layers()) + 4 * spec.vocab

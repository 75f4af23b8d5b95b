"""From settings to a running engine."""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from blake3 import blake3

from rekindle.build.machine import device_names, device_of, make_machine, shard_of
from rekindle.build.model import Model, open_model
from rekindle.build.probe import speeds
from rekindle.build.refuge import Refuge, Room
from rekindle.build.shards import DTYPES, Progress, Shards, StageOrder, choose_types, load_stage, stage_orders
from rekindle.build.sizes import loaded_sizes
from rekindle.config import Config, show_bytes
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.router import Router
from rekindle.errors import BadConfig, DoesNotFit
from rekindle.experts import CountsFile, RoutingCounts
from rekindle.placement import Machine, Plan, Wishes, make_plan, parse_split, way_out
from rekindle.pool.choice import LEAD
from rekindle.prefix import PrefixCache, check_budget
from rekindle.snapshots.about import About, describe, strangers
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.files import make_folder
from rekindle.snapshots.slabs import Slabs
from rekindle.stages import LocalStage, Pipeline, Stage

if TYPE_CHECKING:
    from rekindle.build.ray import RayHosts

log = logging.getLogger("rekindle.build")


class SharedPrefixes(PrefixCache):
    """One for all replicas, so that each restores what another has computed. It closes with the last of them."""

    def __init__(self, ram_budget: int, disk: DiskStore | None, slabs: list[Slabs], sharers: int) -> None:
        super().__init__(ram_budget, disk, slabs=slabs)
        self._sharers = sharers

    def close(self) -> None:
        self._sharers -= 1
        if self._sharers == 0:
            super().close()


@dataclass(frozen=True, slots=True)
class Built:
    """A running engine and what it was built from."""

    engine: Engine
    model: Model
    plan: Plan
    context: int
    counts: CountsFile | None = None  # of a model with experts, where there is a folder to keep them in
    hosts: Shards | RayHosts | None = None  # of stages outside this process
    router: Router | None = None  # before several replicas, of which the engine is the first

    @property
    def door(self) -> Engine | Router:
        """Where requests go."""
        return self.router or self.engine

    @property
    def _engines(self) -> tuple[Engine, ...]:
        return self.router.replicas if self.router is not None else (self.engine,)

    def end_requests(self) -> None:
        """Every request gets its last event after the step under way; new ones are refused. Waits for nothing."""
        for engine in self._engines:
            engine.end_requests()

    def wait_for_end(self) -> None:
        """After `end_requests`: until everybody has had a last event."""
        for engine in self._engines:
            engine.wait_for_end()

    def stop(self) -> None:
        """End every request, then save what the next start should know."""
        for engine in self._engines:
            engine.stop()
        if self.hosts is not None:
            self.hosts.stop()
        if self.counts is not None:
            self.counts.stop()


def build_engine(config: Config, on_progress: Progress | None = None, on_kernels: Progress | None = None) -> Built:
    """on_progress hears of bytes loaded, on_kernels of kernels compiled, once per GPU and model: done, in all."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.cache_dir is not None:
        _make_cache_folder(config.cache_dir)
    model = open_model(config.model)
    hosts = _hosts(config)
    try:
        return _build(config, model, hosts, on_progress, on_kernels)
    except BaseException:
        if hosts is not None:
            hosts.stop()
        raise


def _make_cache_folder(folder: Path) -> None:
    """One that is there but cannot be written is still good for hits."""
    try:
        make_folder(folder)
    except OSError as error:
        raise BadConfig(f"--cache-dir {folder} is no folder and cannot be made: {error.strerror}") from error


def _hosts(config: Config) -> Shards | RayHosts | None:
    """Whoever hosts stages outside this process."""
    if config.ray is None:
        return Shards(config) if config.shards else None
    if config.shards or config.devices != ("auto",) or config.vram is not None:
        raise BadConfig("--ray takes the devices of its nodes; leave out --devices, --shard and --vram")
    if importlib.util.find_spec("ray") is None:
        raise BadConfig("--ray needs Ray, which is not installed: pip install 'rekindle[ray]'")
    from rekindle.build.ray import RayHosts  # half a second and 79 MB that only this option needs

    return RayHosts(config.ray, config.model, config.threads)


def _build(
    config: Config,
    model: Model,
    hosts: Shards | RayHosts | None,
    on_progress: Progress | None,
    on_kernels: Progress | None,
) -> Built:
    names, machine = _machine(config, hosts)
    config, dtype = _settled(config, model, names)
    plans = [plan_model(config, model, part) for part in _divide(machine, config.replicas)]
    for reason in (reason for plan in plans for reason in plan.reasons):
        log.info("plan: %s", reason)
    _check_alike(plans)
    orders = [stage_orders(plan, dtype) for plan in plans]
    if hosts is not None:
        hosts.start(names, [order for its_orders in orders for order in its_orders])
    counts_file = _counts_file(config, model)
    counts = [RoutingCounts(model.spec.layers, model.spec.ffn.experts) for _ in plans]
    if counts_file is not None:
        counts[0] = counts_file.counts  # kept for the next start; the other replicas route alike
    sizes, room = loaded_sizes(model.file, dtype), Room(plans)
    pipelines, slabs = list[Pipeline](), list[Slabs]()
    for plan, its_orders, its_counts in zip(plans, orders, counts, strict=True):
        stages = _load_stages(model, plan, its_orders, hosts, its_counts, on_progress, on_kernels)
        refuge = Refuge(room, model.file, plan, its_orders, sizes, its_counts)
        pipelines.append(Pipeline(stages, refuge.take_in))
        slabs += [stage.slabs for stage in stages if isinstance(stage, LocalStage) and stage.slabs is not None]
    plan = plans[0]
    prefixes = _prefix_cache(config, model, plan, sum(plan.snapshot_ram for plan in plans), slabs)
    settings = EngineSettings(
        context=plan.wishes.context, queue=config.queue, grid=plan.wishes.chunk, audit=config.audit
    )
    engines = [Engine(pipeline, prefixes, settings).start() for pipeline in pipelines]
    router = Router(engines) if len(engines) > 1 else None
    counting = counts_file.start() if counts_file else None
    return Built(engines[0], model, plan, plan.wishes.context, counting, hosts, router)


def _settled(config: Config, model: Model, names: list[str]) -> tuple[Config, torch.dtype]:
    """What depends on the devices, decided once for all replicas: they restore each other's snapshots."""
    dtype, kv_type = choose_types(model.file, names, config.dtype, config.kv_type)
    log.info("activations are %s, KV is %s", dtype, kv_type)
    return replace(config, dtype=dtype, kv_type=kv_type, grid=_grid(config, names)), DTYPES[dtype]


def _divide(machine: Machine, replicas: int) -> list[Machine]:
    """The devices in order, as evenly as can be; each replica has its share of the RAM beside them."""
    count = len(machine.devices)
    if replicas > count:
        names = ", ".join(device.name for device in machine.devices)
        raise BadConfig(f"--replicas is {replicas}, each needs a device of its own and there is only {names}")
    edges = [count * index // replicas for index in range(replicas + 1)]
    return [Machine(machine.devices[a:b], machine.ram // replicas) for a, b in pairwise(edges)]


def _check_alike(plans: list[Plan]) -> None:
    """Replicas restore each other's snapshots; what a sparse one has left out depends on its stages and their pools."""
    if plans[0].wishes.kv_mode != "sparse":
        return
    told = [", ".join(f"layers {stage.span} with {stage.pool_pages} pages" for stage in plan.stages) for plan in plans]
    for index, other in enumerate(told):
        if other != told[0]:
            raise BadConfig(
                f"--kv-mode sparse needs like replicas; replica 0 has {told[0]}, replica {index} has {other}: "
                "give each as many devices, and --pool"
            )


def _machine(config: Config, hosts: Shards | RayHosts | None) -> tuple[list[str], Machine]:
    """The names of the devices, in pipeline order, and what they have."""
    if hosts is None or isinstance(hosts, Shards):
        names = device_names(config.devices)
        relative = speeds(names, config.shards) if config.split == "auto" else None
        return names, make_machine(names, config.vram, config.ram, config.shards, relative)
    return hosts.names, hosts.machine(config.ram)


def _load_stages(
    model: Model,
    plan: Plan,
    orders: list[StageOrder],
    hosts: Shards | RayHosts | None,
    counts: RoutingCounts,
    on_progress: Progress | None,
    on_kernels: Progress | None,
) -> list[Stage]:
    """Local ones are loaded here, the others where they are."""
    stages: list[Stage] = []
    for name, order in zip((stage.device.name for stage in plan.stages), orders, strict=True):
        if hosts is not None and shard_of(name):
            stages.append(hosts.connect(name, order, model.file.fingerprint()))
        else:
            stages.append(load_stage(model.file, order, on_progress, counts, on_kernels))
    return stages


def plan_model(config: Config, model: Model, machine: Machine) -> Plan:
    """Where everything goes; also what `rekindle plan` shows."""
    spec = model.spec
    names = [device.name for device in machine.devices]
    dtype, kv_type = choose_types(model.file, names, config.dtype, config.kv_type)
    counts_file = _counts_file(config, model)
    if config.audit and config.kv_mode == "sparse":
        raise BadConfig(
            "--audit compares with a cold run, which --kv-mode sparse does not promise to equal; leave one out"
        )
    if config.context is not None and config.context > spec.context:
        raise BadConfig(f"--context is {config.context:,}, the model was trained for {spec.context:,}")
    wishes = Wishes(
        context=config.context or spec.context,
        sequences=config.sequences,
        kv_type=kv_type,
        pool=config.pool,
        kv_mode=config.kv_mode,
        kv_policy=config.kv_policy,
        split=parse_split(config.split, len(names), spec.layers),
        compute_bytes=DTYPES[dtype].itemsize,
        chunk=_grid(config, names),
        counts=counts_file.counts.for_placement() if counts_file else None,
        cache_ram=config.cache_ram // config.replicas,
    )
    sizes = loaded_sizes(model.file, DTYPES[dtype])
    try:
        return make_plan(machine, spec, sizes, wishes)
    except DoesNotFit as error:
        chosen = config.replicas == 1 and config.ray is None  # else devices and their split are not the user's own
        way = way_out(machine, spec, sizes, wishes) if chosen else None
        if way is None:
            raise
        raise DoesNotFit(f"{error}; {way}") from error


def _counts_file(config: Config, model: Model) -> CountsFile | None:
    """Which experts the last run used, beside its snapshots."""
    spec = model.spec
    if config.cache_dir is None or not spec.ffn.is_moe:
        return None
    return CountsFile(config.cache_dir, model.file.fingerprint(), spec.layers, spec.ffn.experts)


def _grid(config: Config, names: list[str]) -> int:
    """Prefill chunk: a GPU wants many rows at once, and others wait for one chunk at most."""
    return config.grid or (512 if all(device_of(name) == "cpu" for name in names) else 2048)


def _prefix_cache(config: Config, model: Model, plan: Plan, ram: int, slabs: list[Slabs]) -> PrefixCache:
    """`ram` is what the plans of all replicas leave for snapshots; what is loaded lies in the slabs of the first GPU,
    if there is one: every other of this process reads them too."""
    disk = None
    if config.cache_dir is not None and config.cache_disk > 0:
        traits = _traits(model, plan)
        disk = DiskStore(
            config.cache_dir, _state_identity(traits), config.cache_disk, slabs=slabs[0] if slabs else None
        )
        _say_what_is_there(config.cache_dir, disk, _about(traits))
    fixed = _fixed_snapshot_bytes(plan)
    if ram < config.cache_ram // config.replicas * config.replicas:
        log.warning("snapshots get %s of RAM, --cache-ram is %s", show_bytes(ram), show_bytes(config.cache_ram))
    for warning in check_budget(fixed, ram, config.cache_disk if disk else None):
        log.warning("%s", warning)
    log.info("one snapshot takes %s beside its pages", show_bytes(fixed))
    return SharedPrefixes(ram, disk, slabs, config.replicas)


def _say_what_is_there(folder: Path, disk: DiskStore, about: About) -> None:
    """A folder filled under another setting looks empty; say what it was."""
    describe(disk, about)
    if not len(disk):
        for found in strangers(folder, disk, about):
            log.info("%d snapshots in %s are of another model or setting: %s", found.count, folder, found.differs)


class _Trait(NamedTuple):
    """One of the things that decide whether a snapshot can be restored here."""

    name: str
    words: str  # what people are told
    key: str  # what the identity holds of it


def _traits(model: Model, plan: Plan) -> list[_Trait]:
    """Weights and everything else that decides what bits a state holds and how they are stored."""
    wishes, weights = plan.wishes, model.file.fingerprint()
    dtype = next(name for name, dtype in DTYPES.items() if dtype.itemsize == wishes.compute_bytes)
    traits = [
        _Trait("model", model.name, ""),  # the same weights under another name are the same
        _Trait("weights", weights[:12], weights),
        _Trait("KV", wishes.kv_type, wishes.kv_type),
        _Trait("activations", dtype, str(wishes.compute_bytes)),
    ]
    if wishes.kv_mode != "sparse":
        return [*traits, _Trait("KV mode", wishes.kv_mode, "")]
    # What was left out depends on pool, policy and the chunks after which it is chosen.
    pools = " and ".join(f"{stage.pool_tokens:,} tokens for layers {stage.span}" for stage in plan.stages)
    return [
        *traits,
        _Trait("KV mode", "sparse", "sparse"),
        _Trait("policy", wishes.kv_policy, wishes.kv_policy),
        _Trait("chunks", str(wishes.chunk), str(wishes.chunk)),
        _Trait("lead", str(LEAD), str(LEAD)),
        _Trait("pool", pools, " ".join(f"{stage.span}:{stage.pool_pages}" for stage in plan.stages)),
    ]


def _about(traits: list[_Trait]) -> About:
    return {trait.name: trait.words for trait in traits}


def _state_identity(traits: list[_Trait]) -> str:
    return blake3(" ".join(trait.key for trait in traits if trait.key).encode()).hexdigest()


def _fixed_snapshot_bytes(plan: Plan) -> int:
    spec = plan.spec
    delta = spec.delta
    per_layer = 4 * (delta.state_values + delta.window_values) if delta else 0
    return per_layer * len(spec.delta_layers()) + 4 * spec.vocab

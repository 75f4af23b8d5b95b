"""From settings to a running engine."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from rekindle.build.built import Built
from rekindle.build.drafts import DraftWeights, drafts_of, load_drafter, open_drafter_of
from rekindle.build.failover import Failover, FreeMemory
from rekindle.build.machine import device_names, make_machine, shard_of
from rekindle.build.model import Model, open_weights_of
from rekindle.build.planning import check_alike, counts_file_of, divide, plan_model, resolve
from rekindle.build.prefix_cache import make_cache_folder, make_prefix_cache
from rekindle.build.probe import speeds
from rekindle.build.shards import Shards
from rekindle.build.sizes import loaded_sizes
from rekindle.build.stage import Progress, StageConfig, load_stage, stage_configs
from rekindle.build.types import DTYPES
from rekindle.build.watch import FileWatcher
from rekindle.config import Config
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.router import Router
from rekindle.errors import BadConfig
from rekindle.experts import RoutingCounts
from rekindle.kernels.native import set_threads
from rekindle.placement import Machine, Plan
from rekindle.prefix import PrefixCache
from rekindle.snapshots.slabs import Slabs
from rekindle.speculative.context import layers_read
from rekindle.stages import LocalStage, Pipeline, Stage

if TYPE_CHECKING:
    from rekindle.build.ray import RayHosts

log = logging.getLogger("rekindle.build")

# Milliseconds between two tokens of an answer while prompts come in, where nobody says how many: with chunks that
# pause, which costs the prompt little; with chunks that are made shorter, each of which reads all weights; and where
# these share their batches with steps, since a device is slow or far away.
PAUSED_GAP, SHORTER_GAP, SHARED_GAP = 16, 50, 250


def build_engine(
    config: Config,
    on_progress: Progress | None = None,
    on_kernels: Progress | None = None,
    grammars: bool = False,
) -> Built:
    """on_progress is called with bytes loaded, on_kernels with kernels compiled ahead: done, in all. grammars: whether
    requests may bring some."""
    if config.threads is not None:
        set_threads(config.threads)
    if config.cache_dir is not None:
        make_cache_folder(config.cache_dir)
    model = Model(open_weights_of(config.model))
    hosts = _hosts(config)
    # Threads and the lock of the cache folder would outlive a load that fails, and this process may try again.
    with ExitStack() as undo:
        if hosts is not None:
            undo.callback(hosts.stop)
        undo.callback(model.wait_for_text)
        # Some thousand short reads: beside the thread of the text most of them would wait for the interpreter.
        model.file.fingerprint()
        model.read_ahead(grammars)
        built = _build(config, model, hosts, _checking(model, on_progress), on_kernels, undo)
        model.wait_for_text()
        model.check_text()
        undo.pop_all()
    return built


def _checking(model: Model, on_progress: Progress | None) -> Progress:
    """A text that cannot be read ends a load of minutes as soon as that is known."""

    def show(done: int, total: int) -> None:
        model.check_text()
        if on_progress is not None:
            on_progress(done, total)

    return show


def _hosts(config: Config) -> Shards | RayHosts | None:
    """Shards or a Ray cluster that host stages outside this process."""
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
    undo: ExitStack,
) -> Built:
    """undo: told how to stop all that has threads or holds a lock."""
    names, machine = machine_of(config, hosts)
    config = resolve(config, model, names)
    plans = _plans(config, model, machine)
    drafter_file = open_drafter_of(config, model, names)
    taps = () if drafter_file is None else layers_read(drafter_file.spec)
    configs = [stage_configs(plan, str(config.dtype), taps) for plan in plans]
    if hosts is not None:
        hosts.start(names, [each for its_configs in configs for each in its_configs])
    counts_file = counts_file_of(config, model)
    counts = [RoutingCounts(model.spec.layers, model.spec.ffn.experts) for _ in plans]
    if counts_file is not None:
        counts[0] = counts_file.counts  # kept for the next start; the other replicas route alike
    sizes, memory = loaded_sizes(model.file, DTYPES[str(config.dtype)]), FreeMemory(plans)
    pipelines, slabs = list[Pipeline](), list[Slabs]()
    for plan, its_configs, its_counts in zip(plans, configs, counts, strict=True):
        with ExitStack() as half:
            stages = _load_stages(model, plan, its_configs, hosts, its_counts, on_progress, on_kernels, half)
            failover = Failover(memory, model.file, plan, its_configs, sizes, its_counts)
            drafter = None
            if drafter_file is not None:
                dtype = DTYPES[str(config.dtype)]
                drafter = load_drafter(drafter_file, model.file, stages, dtype, plan.wishes.context)
            pipelines.append(Pipeline(stages, failover.replace_stage, drafter))
            half.pop_all()  # the pipeline stops its stages
        undo.callback(pipelines[-1].stop)
        slabs += [stage.slabs for stage in stages if isinstance(stage, LocalStage) and stage.slabs is not None]
    engines = list[Engine]()

    def busy() -> bool:
        return any(engine.busy for engine in engines)

    def serving() -> bool:
        return any(engine.has_requests for engine in engines)

    prefixes = make_prefix_cache(config, model, plans, slabs, serving)
    undo.callback(PrefixCache.close, prefixes)  # at once: no replica will
    settings = _engine_settings(config, model, plans, drafter_file)
    model.file.files.check()  # the fingerprint is of the bytes that were loaded
    engines += [Engine(pipeline, prefixes, settings) for pipeline in pipelines]
    for each in slabs:
        each.busy = busy
    for engine in engines:
        engine.make_ready(model.spec.vocab)
        engine.start()
        undo.callback(engine.wait_for_end)
        undo.callback(engine.end_requests)
    router = Router(engines) if len(engines) > 1 else None
    counting = counts_file.start() if counts_file else None
    watcher = FileWatcher(model.file.files, lambda reason: _degrade(engines, reason))
    return Built(engines[0], model, plans[0], watcher, counting, hosts, router)


def machine_of(config: Config, hosts: Shards | RayHosts | None) -> tuple[list[str], Machine]:
    """The names of the devices, in pipeline order, and what they have."""
    if hosts is None or isinstance(hosts, Shards):
        names = device_names(config.devices)
        relative = speeds(names, config.shards) if config.split == "auto" else None
        return names, make_machine(names, config.vram, config.ram, config.shards, relative)
    return hosts.names, hosts.machine(config.ram)


def _plans(config: Config, model: Model, machine: Machine) -> list[Plan]:
    """One for each replica."""
    parts = divide(machine, config.replicas)
    plans = [plan_model(config, model, part) for part in parts]
    fewest = min(plan.wishes.sequences for plan in plans)
    if any(plan.wishes.sequences != fewest for plan in plans):  # replicas serve alike
        why = next(plan.reasons[-1] for plan in plans if plan.wishes.sequences == fewest)
        plans = [plan_model(replace(config, sequences=fewest), model, part) for part in parts]
        plans = [replace(plan, reasons=(*plan.reasons, why)) for plan in plans]
    check_alike(plans)
    log.info("activations are %s, KV is %s", config.dtype, config.kv_type)
    for reason in (reason for plan in plans for reason in plan.reasons):
        log.info("plan: %s", reason)
    return plans


def _load_stages(
    model: Model,
    plan: Plan,
    configs: list[StageConfig],
    hosts: Shards | RayHosts | None,
    counts: RoutingCounts,
    on_progress: Progress | None,
    on_kernels: Progress | None,
    undo: ExitStack,
) -> list[Stage]:
    """Stages of this process are loaded here; to the others a link is opened."""
    stages: list[Stage] = []
    for name, config in zip((stage.device.name for stage in plan.stages), configs, strict=True):
        if hosts is not None and shard_of(name):
            stages.append(hosts.connect(name, config, model.file.fingerprint()))
        else:
            stages.append(load_stage(model.file, config, on_progress, counts, on_kernels))
        undo.callback(stages[-1].stop)
    return stages


def _engine_settings(
    config: Config, model: Model, plans: Sequence[Plan], drafter: DraftWeights | None
) -> EngineSettings:
    plan, devices = plans[0], [stage.device.name for plan in plans for stage in plan.stages]
    turns = _takes_turns(plan)
    gap, shorter_gap = _gaps(config.max_gap, turns)
    return EngineSettings(
        context=plan.wishes.context,
        queue=config.queue,
        grid=plan.wishes.chunk,
        turns=turns,
        max_gap=gap,
        shorter_gap=shorter_gap,
        audit=config.audit,
        drawable=model.spec.drawable,
        drafts=drafts_of(config, devices, drafter),
        measure_drafts=True,
    )


def _gaps(asked: int | None, turns: bool) -> tuple[float, float]:
    """Seconds between two tokens of an answer while prompts come in, with chunks that pause and with shorter ones."""
    usual = (PAUSED_GAP, SHORTER_GAP) if turns else (SHARED_GAP, SHARED_GAP)
    pausing, shorter = usual if asked is None else (asked, asked)
    return pausing / 1000, shorter / 1000


def _takes_turns(plan: Plan) -> bool:
    """Whether prefill chunks and decode steps run in turns: on GPUs of this process, where they are recorded steps."""
    return not any(stage.device.is_cpu or shard_of(stage.device.name) for stage in plan.stages)


def _degrade(engines: list[Engine], reason: str) -> None:
    log.error("%s; answers come from what was loaded, nothing more is saved, and a restart is needed", reason)
    for engine in engines:
        engine.degrade(reason)

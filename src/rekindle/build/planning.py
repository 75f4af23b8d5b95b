"""From settings to a plan: types, machine, wishes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from rekindle.buffers import RECORDED_ROWS, USUAL_ROWS
from rekindle.build.drafts import NO_DRAFTER, DrafterBytes, drafter_bytes, open_drafter_of, rewind_rows
from rekindle.build.machine import device_of, shard_of
from rekindle.build.model import Model
from rekindle.build.sizes import loaded_sizes
from rekindle.build.types import DTYPES, check_heads, choose_types
from rekindle.config import Config
from rekindle.errors import BadConfig, DoesNotFit
from rekindle.experts import CountsFile
from rekindle.placement import Machine, Plan, Sizes, StagePlan, Wishes, make_plan, parse_split, way_out
from rekindle.placement.stage import POOL_TARGET
from rekindle.spec import PAGE, ModelSpec

# At once, where no number is asked for: the first with which a conversation as long as the pool's target stays on the
# devices, and every expert does.
SEQUENCES = (16, 8, 4)
LONG = POOL_TARGET * PAGE  # tokens
# Rows of a prefill chunk on GPUs: others wait for one chunk at most, and a snapshot can be taken at its end.
CHUNK = USUAL_ROWS
# Longer ones read the weights half as often. They are taken on one GPU with every expert, where their work and the
# captures of all that may share one need no more than this part of its memory more.
LONG_CHUNK, LONG_CHUNK_PART = RECORDED_ROWS, 48


def resolve(config: Config, model: Model, names: list[str]) -> Config:
    """Decide what depends on the devices, once for all replicas: they restore each other's snapshots."""
    dtype, kv_type = choose_types(model.file, names, config.dtype, config.kv_type)
    grid = _grid(config, names) if config.replicas > 1 else config.grid
    return replace(config, dtype=dtype, kv_type=kv_type, grid=grid)


def divide(machine: Machine, replicas: int) -> list[Machine]:
    """The devices in order, as evenly as can be; each replica has its share of the RAM beside them."""
    count = len(machine.devices)
    if replicas > count:
        names = ", ".join(device.name for device in machine.devices)
        raise BadConfig(f"--replicas is {replicas}, each needs a device of its own and there is only {names}")
    edges = [count * index // replicas for index in range(replicas + 1)]
    return [Machine(machine.devices[a:b], machine.ram // replicas) for a, b in pairwise(edges)]


def check_alike(plans: list[Plan]) -> None:
    """Replicas restore each other's snapshots; which pages a sparse one leaves out depends on its pool."""
    if plans[0].wishes.kv_mode != "sparse":
        return
    pools = [plan.pool_pages for plan in plans]
    for index, other in enumerate(pools):
        if other != pools[0]:
            raise BadConfig(
                f"--kv-mode sparse needs replicas with one pool; replica 0 has {pools[0]} pages, replica {index} has "
                f"{other}: give --pool"
            )


def plan_model(config: Config, model: Model, machine: Machine) -> Plan:
    """Where everything goes. `rekindle plan` shows the same plan without loading anything."""
    names = [device.name for device in machine.devices]
    dtype, kv_type = choose_types(model.file, names, config.dtype, config.kv_type)
    check_heads(model.file, names, kv_type)
    counts_file = counts_file_of(config, model)
    counts = counts_file.counts.for_placement() if counts_file else None
    drafter = partial(drafter_wishes, config, model, names, DTYPES[dtype])
    sizes = loaded_sizes(model.file, DTYPES[dtype])
    return plan_numbers(config, model.spec, sizes, machine, drafter, dtype=dtype, kv_type=kv_type, counts=counts)


def plan_numbers(
    config: Config,
    spec: ModelSpec,
    sizes: Sizes,
    machine: Machine,
    drafter: Callable[[int, int], DrafterBytes] = lambda sequences, chunk: NO_DRAFTER,
    dtype: str = "bfloat16",
    kv_type: str = "bf16",
    counts: Sequence[Sequence[float]] | None = None,
) -> Plan:
    """The same from numbers alone: of a model whose file is not at hand, the types that a GPU computes in. drafter: its
    bytes beside so many sequences."""
    names = [device.name for device in machine.devices]
    if config.audit and config.kv_mode == "sparse":
        raise BadConfig(
            "--audit compares logits with a cold run; with --kv-mode sparse a rounding may choose another page, which "
            "is no fault and looks like one; leave one out"
        )
    if config.live_memory and (config.pool is not None or config.kv_mode == "sparse"):
        fixed = "--pool fixes" if config.pool is not None else "answers of --kv-mode sparse depend on"
        raise BadConfig(f"--live-memory changes the KV pool as contexts grow, and {fixed} its size; leave one out")
    if config.context is not None and config.context > spec.context:
        raise BadConfig(f"--context is {config.context:,}, the model was trained for {spec.context:,}")
    lends = config.live_memory is not False and config.pool is None and config.kv_mode == "exact"
    wishes = Wishes(
        context=config.context or spec.context,
        kv_type=kv_type,
        pool=config.pool,
        lends=lends,
        lends_slots=lends,
        kv_mode=config.kv_mode,
        kv_policy=config.kv_policy,
        split=parse_split(config.split, len(names), spec.layers),
        compute_bytes=DTYPES[dtype].itemsize,
        chunk=_grid(config, names),
        counts=counts,
        cache_ram=None if config.cache_ram is None else config.cache_ram // config.replicas,
        rewind_rows=rewind_rows(config, names),
    )

    def wishes_of(sequences: int, chunk: int = wishes.chunk) -> Wishes:
        return _beside(drafter(sequences, chunk), names, replace(wishes, sequences=sequences, chunk=chunk))

    def plan_for(sequences: int, chunk: int = wishes.chunk) -> Plan:
        plan = make_plan(machine, spec, sizes, wishes_of(sequences, chunk))
        if config.live_memory is not None or not plan.wishes.lends or plan.lends_everywhere:
            return plan
        fixed = make_plan(machine, spec, sizes, replace(plan.wishes, lends=False))
        why = "KV does not grow into the slots of experts: RAM is short of a copy of those it would take (--ram)"
        would_grow = fixed.pool_may_fill and _has_cold_on_gpus(fixed)
        return replace(fixed, reasons=(*fixed.reasons, why)) if would_grow else fixed

    counts_tried = SEQUENCES if config.sequences is None else (config.sequences,)
    try:
        plan = _first_roomy(plan_for, counts_tried)
    except DoesNotFit as error:
        chosen = config.replicas == 1 and config.ray is None  # else the user did not choose devices and split
        way = way_out(machine, spec, sizes, wishes_of(counts_tried[-1])) if chosen else None
        if way is None:
            raise
        raise DoesNotFit(f"{error}; {way}") from error
    if config.grid is None and config.pool is None and config.replicas == 1 and _is_one_whole_gpu(plan):
        with contextlib.suppress(DoesNotFit):
            longer = _first_roomy(partial(plan_for, chunk=LONG_CHUNK), counts_tried)
            costs = _work_bytes(longer.stage(0)) - _work_bytes(plan.stage(0))
            is_small = LONG_CHUNK_PART * costs <= plan.stage(0).device.budget and _keeps_its_pool(plan, longer)
            if _is_one_whole_gpu(longer) and is_small:
                more = f"which take {costs >> 20:,} MiB more than chunks of {wishes.chunk:,}"
                why = f"prompts run in chunks of {LONG_CHUNK:,} tokens, {more}; --grid asks for another number"
                return replace(longer, reasons=(*longer.reasons, why))
    return plan


def _keeps_its_pool(plan: Plan, longer: Plan) -> bool:
    """As many requests at once, and all but a thirty-second of the pool."""
    return longer.wishes.sequences == plan.wishes.sequences and 32 * longer.pool_pages >= 31 * plan.pool_pages


def _is_one_whole_gpu(plan: Plan) -> bool:
    """Of this process, with memory of its own, and every expert in it."""
    device = plan.stage(0).device
    return len(plan.stages) == 1 and not (device.is_cpu or device.host or device.remote or plan.cold)


def _work_bytes(stage: StagePlan) -> int:
    """All but the pages, of which there are as many as fit."""
    return stage.total - stage.pool_pages * stage.page_bytes


def _has_cold_on_gpus(plan: Plan) -> bool:
    return any(stage.cold and not stage.device.host for stage in plan.stages)


def _first_roomy(plan_for: Callable[[int], Plan], counts: Sequence[int]) -> Plan:
    """The plan with the most sequences that leave one of them what it needs on the devices. Where none does, fewer have
    to be worth it."""
    plans = list[Plan]()
    for count in counts:
        try:
            plans.append(plan_for(count))
        except (DoesNotFit, BadConfig):  # a pool that was asked for may be too small for so many
            if count == counts[-1] and not plans:
                raise
            continue
        if _is_roomy(plans[-1]):
            break
    chosen = plans[0]
    for other in plans[1:]:
        chosen = other if _is_worth_it(chosen, other) else chosen
    if chosen.wishes.sequences == counts[0]:
        return chosen
    said = f"{chosen.wishes.sequences} requests run at once: " + _why_fewer(plans[0], chosen, counts[0])
    return replace(chosen, reasons=(*chosen.reasons, f"{said}; --sequences asks for another number"))


def _is_roomy(plan: Plan) -> bool:
    """No expert is cold, and a long conversation fits the pool, or the pool that was asked for. What lies in RAM is not
    looked at."""
    wishes = plan.wishes
    if all(stage.device.is_cpu or stage.device.host for stage in plan.stages):
        return True
    return not plan.cold and _pool(plan) >= min(wishes.context, wishes.pool or LONG, LONG)


def _pool(plan: Plan) -> int:
    """Tokens of one sequence on the devices, while it runs alone."""
    return min(plan.pages_beside(1) * PAGE, plan.wishes.context)


def _is_worth_it(plan: Plan, fewer: Plan) -> bool:
    """A quarter more of one sequence on the devices, or a seventh of the cold experts hot."""
    return _pool(fewer) >= 1.25 * _pool(plan) or 7 * fewer.cold <= 6 * plan.cold != 0


def _why_fewer(most: Plan, chosen: Plan, count: int) -> str:
    """most: the plan with the most sequences that fit at all."""
    if most.wishes.sequences != count:
        asked = "" if most.wishes.pool is None else f" with --pool {most.wishes.pool}"
        return f"what {count} need does not fit{asked}"
    pools, costs = [_pool(plan) for plan in (most, chosen)], list[str]()
    if pools[0] < pools[1]:
        costs.append(f"leave one that runs alone {pools[0]:,} tokens of KV on the devices instead of {pools[1]:,}")
    if most.cold > chosen.cold:
        costs.append(f"make {most.cold - chosen.cold:,} more experts cold")
    return f"state and KV of {count} would {' and '.join(costs)}"


def _beside(drafter: DrafterBytes, names: list[str], wishes: Wishes) -> Wishes:
    here = 0 if shard_of(names[-1]) else drafter.total
    return replace(
        wishes,
        drafter_bytes=here,
        drafter_ram=drafter.total - here,
        drafter_context=drafter.context,
        taps=drafter.taps,
    )


def drafter_wishes(
    config: Config, model: Model, names: list[str], dtype: torch.dtype, sequences: int, chunk: int
) -> DrafterBytes:
    """Of the drafter that the settings name, beside so many sequences and chunks of so many rows."""
    file = open_drafter_of(config, model, names)
    if file is None:
        return NO_DRAFTER
    context = config.context or model.spec.context
    return drafter_bytes(file, model, names, sequences, context, chunk, dtype)


def counts_file_of(config: Config, model: Model) -> CountsFile | None:
    """The file in the cache folder that says how often the last runs routed to each expert."""
    spec = model.spec
    if config.cache_dir is None or not spec.ffn.is_moe:
        return None
    return CountsFile(config.cache_dir, model.file.fingerprint(), spec.layers, spec.ffn.experts)


def _grid(config: Config, names: list[str]) -> int:
    """Rows of a prefill chunk, as long as it is not known what else the devices hold."""
    return config.grid or (512 if all(device_of(name) == "cpu" for name in names) else CHUNK)

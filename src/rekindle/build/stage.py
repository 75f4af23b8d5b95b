"""One stage: its numbers, from the plan, and the way from them to a loaded stage on a device of this process."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import zip_longest

import torch

from rekindle.buffers import STOCK
from rekindle.build.machine import device_of, torch_device
from rekindle.build.sizes import loaded_sizes
from rekindle.build.types import DTYPES, check_heads
from rekindle.errors import BadConfig
from rekindle.experts import RoutingCounts, SpanExperts, kept_slots
from rekindle.kernels.device_memory import DeviceMemory, PagePlaces
from rekindle.kernels.first_launches import preparing_launches, watch_first_launches
from rekindle.layers import load_span
from rekindle.layers.base import page_shapes
from rekindle.layers.slot_memory import state_slots
from rekindle.placement import Plan, expanded_values, pages_for
from rekindle.pool import KvMode, Policy
from rekindle.shards import Terms
from rekindle.spec import Span
from rekindle.stages import LocalStage
from rekindle.warmup.compile_ahead import CompileJob, compiling_ahead, make_job
from rekindle.warmup.steps import warm_up
from rekindle.weights import WeightFile

log = logging.getLogger("rekindle.build")

Progress = Callable[[int, int], None]  # done, in all


@dataclass(frozen=True, slots=True)
class StageConfig:
    """All that is decided about one stage before it is loaded, by whichever process loads it."""

    device: str  # in the process that loads it
    span: Span
    slots: int
    pages: int
    host_pages: int = 0
    kv_type: str = "f32"
    kv_mode: str = "exact"
    kv_policy: str = "qk"
    attended: int = 0  # pages that a row attends at most in sparse mode, in every stage alike; 0: what `pages` says
    dtype: str = "float32"
    hot: tuple[tuple[int, ...], ...] | None = None  # None: every expert is on the device
    cache_slots: tuple[int, ...] = ()
    lendable: tuple[int, ...] = ()  # of the hot experts of each layer, the last ones, whose slots KV may get; (): none
    slot_pages: int = 0  # that lie in the memory of a slot while no sequence lives there; 0: it is not lent
    rewind_rows: int = 0  # of the longest block to verify
    slabs: int = STOCK  # of pinned RAM, kept for captures; on a GPU only
    chunk: int = 0  # most rows of a prefill chunk
    table_width: int = 0  # pages of a sequence at the context limit; 0: not known, and no step is recorded ahead
    taps: tuple[int, ...] = ()  # layers, of all stages, that a drafter reads

    @property
    def kv_term(self) -> str:
        """What the two ends of a link compare: rows of another type, or pages left out, are another state."""
        if self.kv_mode == "exact":
            return self.kv_type
        return f"{self.kv_type} {self.kv_mode} {self.kv_policy} over {self.attended or self.pages} pages"

    def terms(self, fingerprint: str) -> Terms:
        """One sequence at the context limit must fit; a shard that was started by hand may hold fewer than planned."""
        pages = min(self.table_width, self.pages + self.host_pages)
        return Terms(fingerprint, self.span, self.dtype, self.kv_term, self.slots, pages, self.rewind_rows)


def stage_configs(plan: Plan, dtype: str, taps: tuple[int, ...] = ()) -> list[StageConfig]:
    """What the plan says about each stage, in pipeline order. dtype: of activations. taps: of the drafter."""
    return [
        StageConfig(
            device=device_of(stage.device.name),
            span=stage.span,
            slots=stage.slots,
            pages=stage.pool_pages,
            host_pages=stage.host_pages,
            kv_type=plan.wishes.kv_type,
            kv_mode=plan.wishes.kv_mode,
            kv_policy=plan.wishes.kv_policy,
            attended=plan.pool_pages,
            dtype=dtype,
            hot=stage.hot if stage.cold else None,
            cache_slots=stage.expert_cache_slots if stage.cold else (),
            lendable=stage.lendable,
            slot_pages=stage.slot_pages,
            rewind_rows=plan.wishes.rewind_rows,
            slabs=stage.slabs,
            chunk=plan.wishes.chunk,
            table_width=pages_for(plan.wishes.context),
            taps=taps,
        )
        for stage in plan.stages
    ]


def load_stage(
    file: WeightFile,
    config: StageConfig,
    on_progress: Progress | None = None,
    counts: RoutingCounts | None = None,
    on_kernels: Progress | None = None,
) -> LocalStage:
    """The stage, on a device of this process; on a GPU with its kernels compiled and its steps recorded."""
    check_heads(file, [config.device], config.kv_type)
    dtype = DTYPES[config.dtype]
    device = torch_device(config.device)
    experts = memory = None
    if config.hot is not None:
        counts = counts or RoutingCounts(file.spec.layers, file.spec.ffn.experts)
        memory = _shared_memory(file, config, device, dtype) if any(config.lendable) else None
        experts = SpanExperts(config.hot, config.cache_slots, counts, lendable=config.lendable, memory=memory)
    with ExitStack() as loading:
        if device.type == "cuda":
            loading.enter_context(torch.cuda.device(device))  # kernels pack the weights, on the current device
            watch_first_launches()  # imports Triton before threads do: two at once may find it half imported
            loading.enter_context(compiling_ahead(_compile_job(file, config), on_kernels))
        with preparing_launches() if device.type == "cuda" else nullcontext():
            span = load_span(file, config.span, device, dtype, on_progress, experts)
        file.files.check()
        if memory is None and config.slot_pages:  # after the weights, which take more while they are loaded
            memory = _shared_memory(file, config, device, dtype)
        stage = LocalStage(
            span,
            config.slots,
            config.pages,
            config.kv_type,
            config.host_pages,
            *kv_choice(config.kv_mode, config.kv_policy),
            config.rewind_rows,
            slabs=config.slabs,
            widest=expanded_values(loaded_sizes(file, dtype)),
            table_width=config.table_width,
            attended=config.attended or None,
            memory=memory,
            taps=config.taps,
        )
    if device.type == "cuda" and config.table_width:
        with ExitStack() as undo:
            undo.callback(stage.stop)  # a stage that cannot be warmed up leaves no threads
            _warm_up(stage, config)
            undo.pop_all()
    return stage


def _shared_memory(file: WeightFile, config: StageConfig, device: torch.device, dtype: torch.dtype) -> DeviceMemory:
    """For the pages of the pool, the state of slots that are lent, and the expert slots of layers some of which may be.
    Expert slots that begin on the edge of a page leave at most a page in front of each of three planes, and tensors of
    state begin on an EDGE: the margin has these bytes."""
    shapes = page_shapes(file.spec, config.span, config.kv_type)
    if not shapes or config.kv_mode != "exact":
        raise BadConfig(f"layers {config.span} lend memory to KV pages of exact mode, and have none")
    (shape,) = set(shapes.values())
    pages = PagePlaces(shape.page_bytes, len(shapes), config.pages + 1)
    layers, sizes = loaded_sizes(file, dtype).layers, 0
    for i, lendable in enumerate(config.lendable):
        if lendable:
            assert config.hot is not None, "slots are lent where experts are cold"
            count = len(config.hot[i]) + config.cache_slots[i]
            sizes += count * layers[config.span.start + i].expert + 3 * pages.page_bytes
    states = state_slots(file.spec, config.span, config.slots) if config.slot_pages else None
    memory = DeviceMemory(pages, sizes, device, states)
    held = min(len(memory.places_in_slot(slot)) for slot in range(config.slots)) if states else 0
    if held < config.slot_pages:
        raise BadConfig(f"a slot of layers {config.span} has room for {held} pages, not for {config.slot_pages}")
    return memory


def _compile_job(file: WeightFile, config: StageConfig) -> CompileJob:
    return make_job(
        file,
        config.span,
        device=torch_device(config.device),
        dtype=config.dtype,
        slots=config.slots,
        kv=(config.kv_type, *kv_choice(config.kv_mode, config.kv_policy)),
        cache_slots=[] if config.hot is None else _cache_sizes(config, file.spec.ffn.used),
    )


def _cache_sizes(config: StageConfig, used: int) -> list[tuple[int, int]]:
    """Per layer: slots of the expert cache that follow the routing, and that can be lent."""
    found = list[tuple[int, int]]()
    for cached, lendable in zip_longest(config.cache_slots, config.lendable, fillvalue=0):
        kept = kept_slots(cached, lendable, used)
        found.append((kept, cached + lendable - kept))
    return found


def _warm_up(stage: LocalStage, config: StageConfig) -> None:
    began = time.perf_counter()
    steps = warm_up(stage, config.chunk)
    log.info(
        "layers %s on %s: %d steps recorded in %.1f s", stage.span, stage.device, steps, time.perf_counter() - began
    )


def kv_choice(mode: str, policy: str) -> tuple[KvMode, Policy]:
    """The strings as the pool's types: whether every page is attended, and else how pages are chosen."""
    return "sparse" if mode == "sparse" else "exact", "lru" if policy == "lru" else "qk"

"""Stages from the plan's numbers: in this process, or in shards that are started here or were started elsewhere.

A shard that the head starts gets the plan's numbers as arguments behind its command. One that runs already was given
them by whoever started it; the handshake compares and refuses, with both sides named.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from rekindle.build.machine import device_of, shard_of, torch_device
from rekindle.build.model import open_weights_of
from rekindle.build.sizes import loaded_sizes
from rekindle.build.warm import warming
from rekindle.config import Config, ShardSetting
from rekindle.errors import BadConfig
from rekindle.experts import RoutingCounts, SpanExperts
from rekindle.models import load_span
from rekindle.placement import Plan, expanded_values
from rekindle.pool import STOCK, KvMode, Policy
from rekindle.shards import (
    Deadlines,
    HeadKeys,
    RemoteStage,
    ShardKeeper,
    ShardKeys,
    ShardServer,
    Terms,
    load_keys,
    load_public,
    serve_forever,
)
from rekindle.spec import Span
from rekindle.stages import LocalStage, Stage
from rekindle.weights import WeightFile

Progress = Callable[[int, int], None]

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
START_SECONDS = 900.0  # a large span comes from a slow disk


def choose_types(
    file: WeightFile, devices: Sequence[str], dtype: str | None = None, kv_type: str | None = None
) -> tuple[str, str]:
    """Types of the activations and of KV pages on these devices, where the user has named none.

    A CPU computes in float32, a GPU in bfloat16; but in float32 too where the weights have more bits than bfloat16.
    Such weights stay in 16 bits, and so does KV, whose rounding costs far less than that of activations (docs/LOG.md).
    """
    on_cpu = all(device_of(name) == "cpu" for name in devices)
    dtype = dtype or ("float32" if on_cpu or _has_wide_weights(file) else "bfloat16")
    if dtype not in DTYPES:
        raise BadConfig(f"--dtype is '{dtype}'; known are {', '.join(DTYPES)}")
    if dtype == "float32":
        return dtype, kv_type or ("f32" if on_cpu else "f16")
    return dtype, kv_type or "bf16"


def _has_wide_weights(file: WeightFile) -> bool:
    """Most values of its matrices are float16 or float32, which bfloat16 would cut short."""
    matrices = [info for info in file.tensors.values() if len(info.shape) > 1]
    wide = sum(prod(info.shape) for info in matrices if info.type in ("F16", "F32"))
    return 2 * wide > sum(prod(info.shape) for info in matrices)


@dataclass(frozen=True, slots=True)
class StageOrder:
    """All that is decided about one stage before it is loaded, wherever that happens."""

    device: str  # in the process that loads it
    span: Span
    slots: int
    pages: int
    host_pages: int = 0
    kv_type: str = "f32"
    kv_mode: str = "exact"
    kv_policy: str = "qk"
    dtype: str = "float32"
    hot: tuple[tuple[int, ...], ...] | None = None  # None: every expert is on the device
    ring: tuple[int, ...] = ()
    rewind_rows: int = 0  # of the longest block to verify
    slabs: int = STOCK  # of pinned RAM that wait for captures, on a GPU

    @property
    def kv_term(self) -> str:
        """What a link compares: rows of another type, or pages left out, are another state."""
        return self.kv_type if self.kv_mode == "exact" else f"{self.kv_type} {self.kv_mode} {self.kv_policy}"

    def terms(self, fingerprint: str) -> Terms:
        return Terms(fingerprint, self.span, self.dtype, self.kv_term, self.slots)


def stage_orders(plan: Plan, dtype: torch.dtype) -> list[StageOrder]:
    """What the plan says about each stage, in pipeline order."""
    name = next(name for name, known in DTYPES.items() if known is dtype)
    return [
        StageOrder(
            device_of(stage.device.name),
            stage.span,
            stage.slots,
            stage.pool_pages,
            stage.host_pages,
            plan.wishes.kv_type,
            plan.wishes.kv_mode,
            plan.wishes.kv_policy,
            name,
            stage.hot if stage.cold else None,
            stage.ring_slots if stage.cold else (),
            plan.wishes.rewind_rows,
            stage.slabs,
        )
        for stage in plan.stages
    ]


def load_stage(
    file: WeightFile,
    order: StageOrder,
    on_progress: Progress | None = None,
    counts: RoutingCounts | None = None,
    on_kernels: Progress | None = None,
) -> LocalStage:
    """The stage, on a device of this process; on a GPU with every kernel that it needs."""
    experts = None
    if order.hot is not None:
        counts = counts or RoutingCounts(file.spec.layers, file.spec.ffn.experts)
        experts = SpanExperts(order.hot, order.ring, counts)
    dtype = DTYPES[order.dtype]
    device = torch_device(order.device)
    with ExitStack() as loading:
        if device.type == "cuda":
            loading.enter_context(torch.cuda.device(device))  # kernels pack the weights, on the current device
            loading.enter_context(warming(file, order, on_kernels))
        span = load_span(file, order.span, device, dtype, on_progress, experts)
        return LocalStage(
            span,
            order.slots,
            order.pages,
            order.kv_type,
            order.host_pages,
            *kv_choice(order.kv_mode, order.kv_policy),
            order.rewind_rows,
            slabs=order.slabs,
            widest=expanded_values(loaded_sizes(file, dtype)),
        )


def kv_choice(mode: str, policy: str) -> tuple[KvMode, Policy]:
    """Whether every page counts, and else by what they are chosen."""
    return "sparse" if mode == "sparse" else "exact", "lru" if policy == "lru" else "qk"


# The shard's side


def build_shard(
    model: Path | None, orders: Sequence[StageOrder], endpoint: str, keys: ShardKeys | None = None
) -> ShardServer:
    """Stages of one model behind one address, by the names of their devices. Not started yet."""
    file = open_weights_of(model)
    for order in orders:
        if order.span.stop > file.spec.layers:
            raise BadConfig(f"--span {order.span} reaches beyond the model, which has {file.spec.layers} layers")
    first = orders[0]
    return ShardServer(
        {order.device: load_stage(file, order) for order in orders},
        endpoint,
        fingerprint=file.fingerprint(),
        hidden_dtype=first.dtype,
        kv_dtype=first.kv_term,
        keys=keys,
    )


def host_shard(
    model: Path | None, orders: Sequence[StageOrder], endpoint: str, key: Path | None, allowed: Sequence[Path]
) -> None:
    """Serve the stages until told to stop."""
    keys = ShardKeys(load_keys(key), frozenset(map(load_public, allowed))) if key is not None else None
    serve_forever(build_shard(model, orders, endpoint, keys))


def arguments(orders: Sequence[StageOrder], endpoint: str, threads: int) -> list[str]:
    """The orders as `rekindle shard` reads them."""
    first = orders[0]
    common = ["--listen", endpoint, "--slots", str(first.slots), "--kv-type", first.kv_type, "--dtype", first.dtype]
    given = [*common, "--kv-mode", first.kv_mode, "--kv-policy", first.kv_policy, "--threads", str(threads)]
    given += ["--rewind-rows", str(first.rewind_rows)]
    for order in orders:
        given += ["--device", order.device, "--span", f"{order.span.start}:{order.span.stop}"]
        given += ["--pages", str(order.pages), "--host-pages", str(order.host_pages)]
        given += ["--slabs", str(order.slabs)]
        experts = None if order.hot is None else {"hot": order.hot, "ring": order.ring}
        given += ["--experts", json.dumps(experts, separators=(",", ":"))]
    return given


# The head's side


class Shards:
    """The shards of one head: those it starts, and those it only knows the address of."""

    def __init__(self, config: Config) -> None:
        self._settings = {shard.name: shard for shard in config.shards}
        self._link_key = config.link_key
        self._folder = Path(tempfile.mkdtemp(prefix="rekindle-"))  # for its owner only, like the sockets in it
        self._keepers: dict[str, ShardKeeper] = {}
        self._threads = config.threads or torch.get_num_threads()

    def start(self, names: Sequence[str], orders: Sequence[StageOrder]) -> None:
        """Start the processes, all at once: each of them loads for a while. `names` are the plan's device names."""
        wanted = {
            shard.name: [order for name, order in zip(names, orders, strict=True) if shard_of(name) == shard.name]
            for shard in self._settings.values()
            if shard.command
        }
        if not wanted:
            return
        with ThreadPoolExecutor(len(wanted)) as pool:
            started = [pool.submit(self._start, name, its_orders) for name, its_orders in wanted.items()]
        errors = [error for future in started if (error := future.exception()) is not None]
        if errors:
            raise errors[0]

    def _start(self, name: str, orders: Sequence[StageOrder]) -> None:
        endpoint = self._endpoint(self._settings[name])
        command = [*self._settings[name].command, *arguments(orders, endpoint, self._threads)]
        self._keepers[name] = ShardKeeper(command, endpoint, START_SECONDS)

    def connect(self, name: str, order: StageOrder, fingerprint: str) -> Stage:
        """The stage on the device `name`, say cuda:0@lab."""
        setting = self._settings[shard_of(name)]
        return RemoteStage(
            self._endpoint(setting),
            order.device,
            order.terms(fingerprint),
            keys=self._keys(setting),
            deadlines=Deadlines(),
            keeper=self._keepers.get(setting.name),
        )

    def pid(self, name: str) -> int:
        return self._keepers[name].pid

    def stop(self) -> None:
        for keeper in self._keepers.values():
            keeper.stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _endpoint(self, setting: ShardSetting) -> str:
        return setting.endpoint or f"ipc://{self._folder / setting.name}"

    def _keys(self, setting: ShardSetting) -> HeadKeys | None:
        if setting.key is None:
            return None
        if self._link_key is None:
            raise BadConfig(f"--shard-key {setting.name}={setting.key} needs this head's own --link-key too")
        return HeadKeys(load_keys(self._link_key), load_public(setting.key))

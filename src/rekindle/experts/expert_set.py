"""The feed-forward part of an MoE layer whose experts are not all on the device.

Three ways to run the cold ones:

    CACHE   few pairs: missing experts are brought into the expert cache (LRU), then the pairs run as if every expert
            were hot. A share of the missing, as measured, is meanwhile computed by CPU threads that the device asks
            through a mailbox. Python is not asked, so the step can be recorded and replayed.
    STREAM  many pairs: the cold experts pass through a small staging area, group by group, while the resident run; for
            very many, also while earlier layers run. Python is not asked here either.
    HOST    the cold experts are computed on the CPU while the resident run; the most used one then enters the cache.

A forward's way depends on its number of rows alone. Without CPU threads, or with more rows than the cache takes, a
measured cost model decides between bringing experts to the device and computing them on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rekindle.experts.cost import CostModel
from rekindle.experts.counts import LayerCounter
from rekindle.experts.cpu_experts import LayerCpuExperts
from rekindle.experts.residency import Residency
from rekindle.experts.swaps import choose_swaps
from rekindle.kernels.matmul import Lanes
from rekindle.kernels.moe import ExpertStack, SharedExpert, add_shared, moe, route


class Way(Enum):
    """Values are the names in the metrics."""

    CACHE = "cache"
    STREAM = "stream"
    HOST = "host"


class Weights(Protocol):
    """The experts of a layer: slots on the device, and all or the cold ones in host memory."""

    stacks: tuple[ExpertStack, ExpertStack, ExpertStack]
    expert_bytes: int  # of one expert, over PCIe
    recordable: bool  # an expert enters the cache without the host
    cpu_experts: LayerCpuExperts | None  # CPU threads that take a share of the missing experts

    def most_rows(self, at_once: int) -> int:
        """Rows of a batch that may go through the cache, `at_once` at a time."""
        ...

    def slot_planes(self) -> list[Tensor]:
        """The memory of the slots, in tensors [slots, …]."""
        ...

    def take_in(self, load: Tensor) -> None:
        """Put expert load[i], unless it is -1, into cache slot i."""
        ...

    def run_row(self, h: Tensor, router: Tensor, used: int, tally: Tensor, shared: SharedExpert) -> Tensor | None:
        """The whole layer for one row, through the cache, in launches that bring missing experts by themselves; None
        where there are no such launches for h."""
        ...

    def swap(self, slot: int, goes: int, comes: int) -> None:
        """The weights in a hot slot become those of the expert that comes."""
        ...

    def begin(self) -> None:
        """A forward begins that streams; tables do not change before its end."""
        ...

    def stream(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Σ of the routed experts, float32 [rows, hidden]; cold ones by the staging area."""
        ...

    def host(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The same; cold ones on the CPU."""
        ...


@dataclass(slots=True, eq=False)
class ExpertSet:
    router: Tensor | Lanes  # [experts, hidden], float32
    used: int
    weights: Weights
    residency: Residency
    shared: SharedExpert
    cost: CostModel
    counter: LayerCounter
    swaps: int = 0  # so far
    may_swap: bool = False  # the counts have changed since experts changed places
    polls: int = 0  # so far
    swapped_at: int = 0  # polls until the last time that experts might change places
    _arriving: _Arrival | None = field(default=None)

    @property
    def all_resident(self) -> bool:
        return False

    @property
    def cache_sizes(self) -> tuple[int, int, bool, bool]:
        """By which the kernels of layers differ that are otherwise alike: slots of the expert cache, those of them that
        follow the routing, whether CPU threads take a share, and whether cold experts may come in whole groups."""
        shared = self.weights.cpu_experts is not None
        return self.residency.cache_slots, self.residency.kept, shared, self.residency.holds_few_cold

    def can_record(self, rows: int) -> bool:
        """A step with this many rows never asks the host."""
        return self.weights.recordable and self.way(rows) is not Way.HOST

    def way(self, rows: int) -> Way:
        pairs, experts = rows * self.used, self.residency.experts
        cold = experts - len(self.residency.hot)
        fits = 0 < rows <= self.weights.most_rows(self._at_once)
        if fits and self.weights.cpu_experts is not None:
            return Way.CACHE
        if self.cost.prefers_host(pairs, cold, experts, self.weights.expert_bytes):
            return Way.HOST
        return Way.CACHE if fits else Way.STREAM

    def way_name(self, rows: int) -> str:
        way = self.way(rows)
        with_cpu = way is Way.CACHE and self.weights.cpu_experts is not None
        return f"{way.value} and cpu" if with_cpu else way.value

    @property
    def _at_once(self) -> int:
        """Rows whose experts certainly find room in the cache together."""
        return self.residency.kept // self.used

    def begin(self, rows: int) -> None:
        """A forward of so many rows begins, in which this layer has its turn."""
        if self.way(rows) is Way.STREAM:
            self.weights.begin()

    def forward(self, h: Tensor) -> Tensor:
        way = self.way(h.shape[0])
        self._finish_arrival()
        if way is Way.CACHE:
            total = None
            if isinstance(self.router, Tensor):
                total = self.weights.run_row(h, self.router, self.used, self.counter.tally, self.shared)
            if total is not None:
                return total
        ids, weights = route(h, self.router, self.used)
        if way is Way.CACHE:
            turns = zip(*(tensor.split(self._at_once) for tensor in (h, ids, weights)), strict=True)
            parts = [self._by_cache(*turn) for turn in turns]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        self.counter.note(ids)
        if way is Way.STREAM:
            return add_shared(self.weights.stream(h, ids, weights), h, self.shared).to(h.dtype)
        total = add_shared(self.weights.host(h, ids, weights), h, self.shared).to(h.dtype)
        self._begin_arrival(ids)
        return total

    def _by_cache(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        cpu = self.weights.cpu_experts
        slots, load = self.residency.admit(ids, self.counter.tally, None if cpu is None else cpu.takes)
        if cpu is not None:
            weights = cpu.ask(h, ids, slots, weights)
        self.weights.take_in(load)
        total = moe(h, slots, weights, *self.weights.stacks, self.shared)
        if cpu is not None:
            cpu.collect(total)
        return total

    # Between forwards

    def poll(self, rows: int) -> None:
        """`rows` rows have passed; the counts are brought up to date from time to time."""
        self.polls += 1
        self._finish_arrival()
        if self.weights.cpu_experts is not None:
            self.weights.cpu_experts.check()
        self.may_swap |= self.counter.poll(rows)

    def swap_some(self) -> None:
        """A few experts change places, if the counts say so."""
        self.may_swap, self.swapped_at = False, self.polls
        for goes, comes in choose_swaps(self.counter.row, self.residency.staying):
            self.swap(goes, comes)

    def swap(self, goes: int, comes: int) -> None:
        """A hot and a cold expert change places, in the order of the stream: forwards see them before or after."""
        self._finish_arrival()
        if goes in self.residency.pinned:
            slot = self.residency.pinned.index(goes)
            self.weights.take_in(self.residency.pin(range(slot, slot + 1), [comes]))
        else:
            slot = self.residency.swap(goes, comes)
            self.weights.swap(slot, goes, comes)
        self.swaps += 1

    @property
    def chances(self) -> np.ndarray:
        """That a row asks for each expert, by the routing as it was counted; all alike before that."""
        row = self.counter.row
        total = row.sum()
        even = np.full(len(row), self.used / len(row))
        return np.minimum(1.0, self.used * row / total) if total else even

    @property
    def missing_bytes(self) -> float:
        """That an expert which is asked for and missing brings over the link: less where the CPU computes some."""
        cpu = self.weights.cpu_experts
        return self.weights.expert_bytes * (1.0 if cpu is None else cpu.stage.link_share)

    # Slots that change hands, between forwards and in the order of the stream

    def lend(self, slots: range) -> None:
        """The memory of these slots, counted from the first one that can be lent, is another's. No byte moves: host
        memory has these experts too."""
        self._finish_arrival()
        self.residency.lend(slots)

    def take_back(self, slots: range) -> None:
        """The experts that are used most of those that do not stay, come to the slots."""
        self._finish_arrival()
        away = np.ones(self.residency.experts, bool)
        away[self.residency.staying] = False
        ranked = np.argsort(-np.where(away, self.counter.row, -1.0), kind="stable")
        self.weights.take_in(self.residency.pin(slots, ranked[: len(slots)].tolist()))

    # An expert that the CPU has just computed enters the cache while later layers run

    def _begin_arrival(self, ids: Tensor) -> None:
        if not self.residency.kept:
            return
        load = self.residency.make_room(ids)
        arrival = _Arrival(load)
        with arrival.aside():
            self.weights.take_in(load)
        self._arriving = arrival

    def _finish_arrival(self) -> None:
        if self._arriving is not None:
            self._arriving.wait()
            self.residency.finish_loading(self._arriving.load)
            self._arriving = None


class _Arrival:
    """A copy under way beside the forwards."""

    def __init__(self, load: Tensor) -> None:
        self.load = load
        self._stream = torch.cuda.Stream() if load.is_cuda else None

    @contextmanager
    def aside(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

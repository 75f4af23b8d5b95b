"""The feed-forward part of an MoE layer, and loading it: all experts on the device, or some of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rekindle.experts.cost import CostModel
from rekindle.experts.counts import LayerCounter, RoutingCounts
from rekindle.experts.cpu_experts import CpuExperts
from rekindle.experts.expert_set import ExpertSet
from rekindle.experts.looped import DenseWeights, LaneWeights
from rekindle.experts.packed import PackedWeights
from rekindle.experts.probe import measure_costs, measure_takes
from rekindle.experts.residency import Residency
from rekindle.experts.staging import Staging
from rekindle.experts.stored import StoredExperts, stored_experts
from rekindle.kernels.device_memory import DeviceMemory
from rekindle.kernels.matmul import Lanes, Matrix, make_matrix, stays_quantised
from rekindle.kernels.moe import ExpertStack, SharedExpert, make_router, make_stack, moe, route
from rekindle.kernels.upload import upload_values
from rekindle.weights import WeightFile

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoutedFfn:
    """A router, the experts it chooses from, and the shared expert that every row takes. All are on the device."""

    router: torch.Tensor | Lanes  # [experts, hidden], float32
    used: int
    gate: ExpertStack
    up: ExpertStack
    down: ExpertStack
    shared: SharedExpert
    counter: LayerCounter | None = None  # where other layers have cold experts: all layers compete for hot slots

    @property
    def all_resident(self) -> bool:
        return True

    def can_record(self, rows: int) -> bool:
        """Whether a step never asks the host, as the loop over dense experts does."""
        return all(stack.dense is None for stack in (self.gate, self.up, self.down))

    def poll(self, rows: int) -> None:
        if self.counter is not None:
            self.counter.poll(rows)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        ids, weights = route(h, self.router, self.used)
        if self.counter is not None:
            self.counter.note(ids)
        return moe(h, ids, weights, self.gate, self.up, self.down, self.shared)


def kept_slots(cached: int, lendable: int, used: int) -> int:
    """Slots of an expert cache that follow the routing. Where some can be lent a row must find room in the others, so
    the first of them are not, if the cache is too small."""
    return cached + min(lendable, max(0, used - cached))


@dataclass
class SpanExperts:
    """What placement decided for the layers of a span, and what its layers share."""

    hot: Sequence[Sequence[int]]  # expert ids per layer of the span, most used first
    cache_slots: Sequence[int]  # of the expert cache, per layer of the span
    counts: RoutingCounts
    cost: CostModel | None = None  # measured at the first layer if left out
    keep: int = 0  # expanded experts that the CPU keeps per layer
    use_cpu: bool = True  # CPU threads may take a share of a step
    lendable: Sequence[int] = ()  # of the hot experts of every layer, the last ones, whose slots may be lent; () : none
    memory: DeviceMemory | None = None  # that the slots of such layers are cut from
    _staging: dict[object, Staging] = field(default_factory=dict)
    _cpu_experts: CpuExperts | None = None
    _measured: bool = False  # a layer has measured whether CPU threads gain anything

    def has_cold(self, experts: int) -> bool:
        return any(len(hot) < experts for hot in self.hot)

    def fixed(self, place: int) -> int:
        """Hot experts of the layer at `place` in the span that no other takes the place of but by a swap."""
        return len(self.hot[place]) - (self.lendable[place] if self.lendable else 0)

    def residency_of(self, place: int, experts: int, used: int, device: torch.device) -> Residency:
        hot, fixed, cached = self.hot[place], self.fixed(place), self.cache_slots[place]
        slots = cached + len(hot) - fixed
        kept = kept_slots(cached, slots - cached, used)
        return Residency(hot[:fixed], slots, experts, device, hot[len(hot) - (slots - kept) :])

    def staging_like(self, stored: StoredExperts) -> Staging | None:
        return self._staging.get(_kind(stored))

    def keep_staging(self, stored: StoredExperts, staging: Staging) -> None:
        self._staging[_kind(stored)] = staging

    def attach_cpu_experts(self, weights: PackedWeights, used: int, width: int, x: torch.Tensor) -> None:
        """Give the layer the CPU threads of the span, if they can read its types; the first such layer starts them and
        measures, with x [1, hidden], which share of the missing experts they should take."""
        lendable = self.lendable or [0] * len(self.cache_slots)
        pairs = max(kept_slots(*slots, used) for slots in zip(self.cache_slots, lendable, strict=True))
        if not self.use_cpu or pairs < used or not weights.cpu_reads_types:
            return
        if not self._measured:
            self._measured = True
            self._cpu_experts = CpuExperts.start(pairs // used, pairs, x.shape[1], width, x.device)
            if self._cpu_experts is not None and not self._is_worth_it(self._cpu_experts, weights, x):
                self._cpu_experts = None  # its threads end
        if self._cpu_experts is not None:
            weights.use_cpu_experts(self._cpu_experts)

    @staticmethod
    def _is_worth_it(cpu_experts: CpuExperts, weights: PackedWeights, x: torch.Tensor) -> bool:
        """Whether the CPU should take any; how many is written to `takes`, which the device reads."""
        weights.use_cpu_experts(cpu_experts)
        assert weights.cpu_experts is not None, "it has just been given them"
        takes = measure_takes(weights, weights.cpu_experts, x)
        if cpu_experts.lost[0]:  # timings of dead threads are discarded
            log.warning("cold experts come over PCIe alone: the CPU threads did not answer")
            takes = [0]
        if not any(takes):
            weights.cpu_experts = None
            return False
        cpu_experts.takes.copy_(torch.tensor(takes))
        cpu_experts.link_share = 1 - takes[-1] / (len(takes) - 1)
        return True


def load_routed_ffn(
    file: WeightFile,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    plan: SpanExperts | None = None,
    place: int = 0,
    layer: int = 0,
) -> RoutedFfn | ExpertSet:
    """The experts of the layer whose tensors begin with `name`; it is the layer at `place` in the plan's span."""

    def stack(part: str) -> ExpertStack:
        info = file.tensors[f"{name}.{part}.weight"]
        experts, rows, columns = info.shape
        return make_stack(file.unread(info.name), info.type, (experts, rows, columns), device, dtype)

    def matrix(part: str) -> Matrix:
        info = file.tensors[f"{name}.{part}.weight"]
        rows, columns = info.shape
        return make_matrix(file.unread(info.name), info.type, (rows, columns), device, dtype)

    def values(part: str) -> torch.Tensor:
        return upload_values(file.values(f"{name}.{part}.weight"), device)

    router, used = make_router(values("ffn_gate_inp")), file.spec.ffn.used
    shared = SharedExpert(
        gate=matrix("ffn_gate_shexp"),
        up=matrix("ffn_up_shexp"),
        down=matrix("ffn_down_shexp"),
        scale=values("ffn_gate_inp_shexp").flatten(),
    )
    counter = None
    if plan is not None and plan.has_cold(file.spec.ffn.experts):
        counter = LayerCounter(plan.counts, layer, device)
        if plan.fixed(place) < file.spec.ffn.experts:
            stored = stored_experts(file, name)
            return make_expert_set(stored, plan, place, counter, router, used, shared, device, dtype)
    gate, up, down = stack("ffn_gate_exps"), stack("ffn_up_exps"), stack("ffn_down_exps")
    return RoutedFfn(router, used, gate, up, down, shared, counter)


def make_expert_set(
    stored: StoredExperts,
    plan: SpanExperts,
    place: int,
    counter: LayerCounter,
    router: torch.Tensor | Lanes,
    used: int,
    shared: SharedExpert,
    device: torch.device,
    dtype: torch.dtype,
) -> ExpertSet:
    residency = plan.residency_of(place, stored.count, used, device)
    weights: DenseWeights | PackedWeights | LaneWeights
    if isinstance(router, Lanes):
        weights = LaneWeights(stored, residency, dtype, plan.memory)
    elif all(stays_quantised(part.type, device) for part in stored.parts):
        weights = PackedWeights(stored, residency, device, plan.staging_like(stored), plan.keep, plan.memory)
        plan.keep_staging(stored, weights.staging)
        plan.cost = plan.cost or measure_costs(weights, residency, router.shape[1], dtype)
        x = torch.randn(1, router.shape[1], device=device).to(dtype)
        plan.attach_cpu_experts(weights, used, stored.parts[0].shape[1], x)
    else:
        weights = DenseWeights(stored, residency, device, dtype, plan.keep, plan.memory)
    return ExpertSet(router, used, weights, residency, shared, plan.cost or CostModel.same_memory(), counter)


def _kind(stored: StoredExperts) -> object:
    return tuple((part.type, part.shape[1:]) for part in stored.parts)

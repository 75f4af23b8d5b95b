"""The feed-forward part of an MoE layer, and loading it: all experts on the device, or some of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from rekindle.experts.cost import CostModel
from rekindle.experts.counts import LayerCounter, RoutingCounts
from rekindle.experts.dense import DenseWeights
from rekindle.experts.expert_set import ExpertSet
from rekindle.experts.helper import Helper
from rekindle.experts.packed import PackedWeights, Staging
from rekindle.experts.probe import measure_costs, measure_takes
from rekindle.experts.residency import Residency
from rekindle.experts.stored import StoredExperts, stored_experts
from rekindle.kernels.matmul import Matrix, make_matrix, stays_quantised
from rekindle.kernels.moe import ExpertStack, SharedExpert, make_stack, moe, route
from rekindle.weights import WeightFile

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RoutedFfn:
    """A router, the experts it chooses from, and the shared expert that every row takes. All are on the device."""

    router: torch.Tensor  # [experts, hidden], float32: near ties must not be decided by rounding
    used: int
    gate: ExpertStack
    up: ExpertStack
    down: ExpertStack
    shared: SharedExpert
    counter: LayerCounter | None = None  # only beside layers with cold experts, whose share of memory it may claim

    @property
    def all_resident(self) -> bool:
        return True

    def can_record(self, rows: int) -> bool:
        """Dense experts are looped over on the host."""
        return all(stack.packed is not None for stack in (self.gate, self.up, self.down))

    def settle(self, rows: int) -> None:
        if self.counter is not None:
            self.counter.poll(rows)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        ids, weights = route(h, self.router, self.used)
        if self.counter is not None:
            self.counter.note(ids)
        return moe(h, ids, weights, self.gate, self.up, self.down, self.shared)


@dataclass
class SpanExperts:
    """What placement decided for the layers of a span, and what its layers share."""

    hot: Sequence[Sequence[int]]  # expert ids per layer of the span
    ring: Sequence[int]  # spare slots per layer of the span
    counts: RoutingCounts
    cost: CostModel | None = None  # measured at the first layer if left out
    keep: int = 0  # expanded experts that the CPU keeps per layer
    helps: bool = True  # CPU threads may take a share of a step
    _staging: dict[object, Staging] = field(default_factory=dict)
    _helper: Helper | None = None
    _measured: bool = False  # a layer has found out whether a helper is worth it

    def has_cold(self, experts: int) -> bool:
        return any(len(hot) < experts for hot in self.hot)

    def staging_like(self, stored: StoredExperts) -> Staging | None:
        return self._staging.get(_kind(stored))

    def keep_staging(self, stored: StoredExperts, staging: Staging) -> None:
        self._staging[_kind(stored)] = staging

    def bring_helper(self, weights: PackedWeights, used: int, width: int, x: torch.Tensor) -> None:
        """Give the layer the helper of the span, if it can read the layer's types; the first such layer starts it and
        measures, with x [1, hidden], what it is worth."""
        pairs = max(self.ring)
        if not self.helps or pairs < used or not weights.can_be_helped:
            return
        if not self._measured:
            self._measured = True
            self._helper = Helper.start(pairs // used, pairs, x.shape[1], width, x.device)
            if self._helper is not None and not self._is_worth_it(self._helper, weights, x):
                self._helper = None  # its threads end
        if self._helper is not None:
            weights.let_help(self._helper)

    @staticmethod
    def _is_worth_it(helper: Helper, weights: PackedWeights, x: torch.Tensor) -> bool:
        """Whether the CPU takes any; how many is written where the device reads it."""
        weights.let_help(helper)
        assert weights.helper is not None, "it has just been given one"
        takes = measure_takes(weights, weights.helper, x)
        if helper.lost[0]:  # whoever does not answer looks quick
            log.warning("cold experts come over the link alone: the CPU threads did not answer")
            takes = [0]
        if not any(takes):
            weights.helper = None
            return False
        helper.takes.copy_(torch.tensor(takes))
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
        return make_stack(file.raw(info.name), info.type, (experts, rows, columns), device, dtype)

    def matrix(part: str) -> Matrix:
        info = file.tensors[f"{name}.{part}.weight"]
        rows, columns = info.shape
        return make_matrix(file.raw(info.name), info.type, (rows, columns), device, dtype)

    def values(part: str) -> torch.Tensor:
        return torch.from_numpy(file.values(f"{name}.{part}.weight").copy()).to(device)

    router, used = values("ffn_gate_inp"), file.spec.ffn.used
    shared = SharedExpert(
        gate=matrix("ffn_gate_shexp"),
        up=matrix("ffn_up_shexp"),
        down=matrix("ffn_down_shexp"),
        scale=values("ffn_gate_inp_shexp").flatten(),
    )
    counter = None
    if plan is not None and plan.has_cold(file.spec.ffn.experts):
        counter = LayerCounter(plan.counts, layer, device)
        if len(plan.hot[place]) < file.spec.ffn.experts:
            stored = stored_experts(file, name)
            return make_expert_set(stored, plan, place, counter, router, used, shared, device, dtype)
    gate, up, down = stack("ffn_gate_exps"), stack("ffn_up_exps"), stack("ffn_down_exps")
    return RoutedFfn(router, used, gate, up, down, shared, counter)


def make_expert_set(
    stored: StoredExperts,
    plan: SpanExperts,
    place: int,
    counter: LayerCounter,
    router: torch.Tensor,
    used: int,
    shared: SharedExpert,
    device: torch.device,
    dtype: torch.dtype,
) -> ExpertSet:
    residency = Residency(plan.hot[place], plan.ring[place], stored.count, device)
    weights: DenseWeights | PackedWeights
    if all(stays_quantised(part.type, device) for part in stored.parts):
        weights = PackedWeights(stored, residency, device, plan.staging_like(stored), plan.keep)
        plan.keep_staging(stored, weights.staging)
        plan.cost = plan.cost or measure_costs(weights, residency, router.shape[1], dtype)
        x = torch.randn(1, router.shape[1], device=device).to(dtype)
        plan.bring_helper(weights, used, stored.parts[0].shape[1], x)
    else:
        weights = DenseWeights(stored, residency, device, dtype, plan.keep)
    return ExpertSet(router, used, weights, residency, shared, plan.cost or CostModel.same_memory(), counter)


def _kind(stored: StoredExperts) -> object:
    return tuple((part.type, part.shape[1:]) for part in stored.parts)

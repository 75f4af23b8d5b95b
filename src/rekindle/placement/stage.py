"""One stage: what a span needs on a device, and what the rest of the budget holds there."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from rekindle.buffers import STOCK
from rekindle.errors import BadConfig
from rekindle.placement.allocate import (
    Allocation,
    Candidates,
    Share,
    allocate,
    allocate_share,
    expert_order,
    hot_of,
    ranked_experts,
    spare_slots,
)
from rekindle.placement.lending import lendable_slots, may_lend, slot_pages
from rekindle.placement.mixers import MixerSums, SpanMixers
from rekindle.placement.reserve import (
    SpanWeights,
    Weigher,
    expert_layers,
    fixed_items,
    least_pages,
    margin,
    smallest_budget,
    staging_bytes,
)
from rekindle.placement.types import Device, Item, LayerSizes, Machine, Sizes, StagePlan, Wishes, pages_for
from rekindle.spec import PAGE, ModelSpec, Span

# Pages that are worth as much as experts; no context limit from here on makes an expert cold. Of a live context every
# byte is read at every step, of an expert one in thirty: the 35B-A3B with 1,978 cold experts and such a pool decoded at
# 344 instead of 433 tok/s (1,375 cold, 8,192 tokens) at a context of 1,024, and at 380 instead of 40 at 65,536
# (docs/bench.md). 1.25 GiB of bf16 KV there.
POOL_TARGET = 65_536 // PAGE
SMALL_TARGET = 8_192 // PAGE  # where KV that outgrows the pool gets experts' slots, or is not attended


@dataclass(frozen=True, slots=True)
class Space:
    """What a span finds on a device, in bytes."""

    room: int  # for experts, pages and staging
    page_bytes: int
    staging: int  # that only cold experts need
    least: int  # with which it runs at all


@dataclass(frozen=True, slots=True)
class NonWeightBytes:
    """What a span needs on a device that is not a weight of its layers."""

    fixed: int  # whatever the number of pages
    page: int  # of one page in all its layers


@dataclass(frozen=True, slots=True)
class StageCandidate:
    """A stage before its experts and pages are chosen."""

    device: Device
    span: Span
    fixed: tuple[Item, ...]  # without the margin
    candidates: Candidates
    staging: int = 0  # bytes that only a stage with cold experts needs
    share: Share | None = None  # of what all devices hold together; None where the stage allocates for itself

    @property
    def room(self) -> int:
        """Bytes for experts and pages."""
        return self.device.budget - margin(self.device.budget) - sum(item.bytes for item in self.fixed)

    @property
    def least_budget(self) -> int:
        """The smallest budget with which the stage can run at all, its experts cold."""
        return self.budget_for(self.candidates.least, self.staging)

    def allocate(self, candidates: Candidates | None = None) -> Allocation | None:
        """Experts and pages: the share, or everything, or as much as fits beside the staging area."""
        if candidates is None and self.share is not None:
            return allocate_share(self.candidates, self.share, self.room)
        candidates = candidates or self.candidates
        if self.room >= candidates.least * candidates.page_bytes + candidates.expert_bytes:  # else some stay cold
            allocation = allocate(candidates, self.room)
            if allocation is not None and not allocation.leaves_cold(candidates):
                return allocation
        return allocate(candidates, self.room - self.staging)

    def budget_for(self, pages: int, experts: int) -> int:
        """The smallest budget that holds `pages` pages and `experts` bytes of experts."""
        fixed = sum(item.bytes for item in self.fixed)
        return smallest_budget(fixed + pages * self.candidates.page_bytes + experts)

    def left(self, allocation: Allocation) -> int:
        """Bytes of `room` that are still free."""
        experts = sum(count * self.candidates.layers[layer].expert for layer, count in allocation.resident.items())
        staging = self.staging if allocation.leaves_cold(self.candidates) else 0
        return self.room - experts - staging - allocation.pages * self.candidates.page_bytes


class StagePlanner:
    """Answers what any span is on any device of the machine. No device in RAM has a larger budget than the RAM."""

    def __init__(self, machine: Machine, spec: ModelSpec, sizes: Sizes, wishes: Wishes) -> None:
        self.machine, self.spec, self.sizes, self.wishes = machine, spec, sizes, wishes
        self._sums = MixerSums(spec)
        self.page_bytes = self._sums.of(spec.whole).page_bytes(wishes.kv_type)  # of one page in all layers
        self.least, self.target, self.most = _pool_sizes(wishes)
        self.order = expert_order(spec, expert_layers(sizes, spec.whole), wishes)
        self._weighers = [Weigher(spec, sizes.on(device)) for device in machine.devices]
        self._asked, self._asked_order = set[int](), self.order  # layers asked for last, and their order
        self._spaces: dict[tuple[int, int, int], Space] = {}  # by device and span
        self._non_weights: dict[tuple[int, SpanMixers, int], NonWeightBytes] = {}  # by device, mixers and taps

    def stage_candidate(self, index: int, span: Span) -> StageCandidate:
        device, weights = self.machine.devices[index], self._weighers[index].weigh(span)
        fixed = self._fixed(index, weights, self.wishes.tapped(span))
        routed = expert_layers(self.sizes.on(device), span)
        if device.is_cpu:  # RAM is where cold experts would be, so there all of them are hot
            fixed, routed = [*fixed, Item("hot experts", weights.experts)], {}
        candidates = self.candidates(routed, weights.state.page_bytes(self.wishes.kv_type))
        return StageCandidate(device, span, tuple(fixed), candidates, staging_bytes(routed))

    def candidates(self, routed: dict[int, LayerSizes], page_bytes: int) -> Candidates:
        return Candidates(
            order=self.order_of(routed) if routed else (),
            floor=sum(min(self.spec.ffn.used, layer.experts) for layer in routed.values()),
            layers=routed,
            page_bytes=page_bytes,
            least=self.least,
            target=self.target,
            most=self.most,
            full=self.wishes.full_pages,
            bounded=self.wishes.pool is not None and self.most < self.wishes.full_pages,
            powers_of_two=self.wishes.power_of_two_pool,
        )

    def order_of(self, routed: dict[int, LayerSizes]) -> tuple[int, ...]:
        """Of these layers alone. A search asks for one span after the other, most of them inside the one before."""
        if not routed.keys() <= self._asked:
            self._asked_order = self.order
        self._asked, self._asked_order = set(routed), tuple(filter(routed.__contains__, self._asked_order))
        return self._asked_order

    def space(self, index: int, span: Span) -> Space:
        """As a candidate would say, without its order; a search asks for every span of every device, so it is kept."""
        found = self._spaces.get((index, span.start, span.stop))
        if found is None:
            device, weights = self.machine.devices[index], self._weighers[index].weigh(span)
            staging = 0 if device.is_cpu else staging_bytes(expert_layers(self.sizes.on(device), span))
            taken = weights.mixers + weights.dense + weights.shared + (weights.experts if device.is_cpu else 0)
            others = self._non_weight(index, weights.state, self.wishes.tapped(span))
            room = device.budget - margin(device.budget) - taken - others.fixed
            found = Space(room, others.page, staging, self.least * others.page + staging)
            self._spaces[index, span.start, span.stop] = found
        return found

    def missing(self, index: int, span: Span) -> int:
        """Bytes missing to run at all."""
        space = self.space(index, span)
        return max(0, space.least - space.room)

    def plan(self, stage: StageCandidate, ceiling: int, lends: bool = False) -> StagePlan:
        """With at most `ceiling` pages where the stage lives in RAM, which others need too.

        lends: KV may get the slots of some experts, whose weights then are in RAM too.
        """
        allocation = stage.allocate(_below(ceiling, stage))
        assert allocation is not None, "budgets were checked before anything was allocated"
        hot = tuple(self._hot(allocation, layer) for layer in stage.span.layers)
        cache = self._cache_slots(stage, allocation, hot)
        cold = allocation.leaves_cold(stage.candidates)
        layers = [self.sizes.on(stage.device).layers[layer] for layer in stage.span.layers]
        items = [
            *(item for item in stage.fixed if item.name != "hot experts"),
            Item("hot experts", sum(len(ids) * layer.expert for ids, layer in zip(hot, layers, strict=True))),
            Item("expert staging", stage.staging if cold else 0),
            Item("expert cache", sum(slots * layer.expert for slots, layer in zip(cache, layers, strict=True))),
            Item("KV pool", allocation.pages * stage.candidates.page_bytes),
            Item("margin", margin(stage.device.budget)),
        ]
        return StagePlan(
            device=stage.device,
            span=stage.span,
            items=tuple(item for item in items if item.bytes),
            hot=hot,
            expert_cache_slots=cache,
            cold=sum(layer.experts for layer in layers) - sum(map(len, hot)),
            slots=self.wishes.sequences,
            pool_pages=allocation.pages,
            full_pages=stage.candidates.full,
            host_pages=0,
            page_bytes=stage.candidates.page_bytes,
            slabs=STOCK if stage.device.remote else 0,
            lendable=self._lendable(stage, layers, hot, allocation.pages) if cold and lends else (),
            slot_pages=slot_pages(self.wishes, stage.device, self._sums.of(stage.span), allocation.pages),
        )

    def _lendable(
        self, stage: StageCandidate, layers: list[LayerSizes], hot: tuple[tuple[int, ...], ...], pages: int
    ) -> tuple[int, ...]:
        page_bytes = stage.candidates.page_bytes
        if not (may_lend(self.wishes, stage.device) and page_bytes):
            return ()
        lendable = lendable_slots(self.wishes, layers, list(map(len, hot)), self.spec.ffn.used, page_bytes, pages)
        return lendable if any(lendable) else ()

    def _fixed(self, index: int, weights: SpanWeights, tapped: int) -> list[Item]:
        device, first, last = self.machine.devices[index], index == 0, index == len(self.machine.devices) - 1
        return fixed_items(self.spec, self.sizes.on(device), self.wishes, device, weights, first, last, tapped)

    def _non_weight(self, index: int, mixers: SpanMixers, tapped: int) -> NonWeightBytes:
        """For layers with such mixers. Kept: most spans of a model have equal numbers of each."""
        key = (index, mixers, tapped)
        if key not in self._non_weights:
            fixed = sum(item.bytes for item in self._fixed(index, SpanWeights(0, 0, 0, 0, mixers), tapped))
            self._non_weights[key] = NonWeightBytes(fixed, mixers.page_bytes(self.wishes.kv_type))
        return self._non_weights[key]

    def _hot(self, allocation: Allocation, layer: int) -> tuple[int, ...]:
        experts = self.sizes.layers[layer].experts
        ranked = ranked_experts(layer, experts, self.wishes)
        if layer not in allocation.resident:  # dense, or on a CPU
            return tuple(ranked)
        count = hot_of(allocation.resident[layer], experts, self.spec.ffn.used, self.wishes.expert_cache_share)
        return tuple(ranked[:count])

    def _cache_slots(
        self, stage: StageCandidate, allocation: Allocation, hot: tuple[tuple[int, ...], ...]
    ) -> tuple[int, ...]:
        """Slots of the expert cache of each layer of the span."""
        spare = self._spare(stage, allocation)
        return tuple(
            allocation.resident.get(layer, len(ids)) - len(ids) + spare[layer]
            for layer, ids in zip(stage.span.layers, hot, strict=True)
        )

    def _spare(self, stage: StageCandidate, allocation: Allocation) -> Counter[int]:
        """Further slots of the expert cache per layer, where a device has bytes left beside its share."""
        if stage.share is None or stage.share.whole or not self.wishes.expert_cache_share:
            return Counter()
        return spare_slots(stage.candidates, stage.share, stage.left(allocation))


def _below(ceiling: int, stage: StageCandidate) -> Candidates | None:
    """The candidates of a stage in RAM with at most `ceiling` pages; None where they stay as they are."""
    if not (stage.device.host and stage.candidates.page_bytes):
        return None
    return replace(stage.candidates, target=min(stage.candidates.target, ceiling), ceiling=ceiling)


def _pool_sizes(wishes: Wishes) -> tuple[int, int, int]:
    """Pages that must be, that are worth as much as experts, and that are taken if nothing else wants the memory."""
    least, full = least_pages(wishes), wishes.full_pages
    if wishes.pool is not None:
        asked = pages_for(wishes.pool)
        if asked < least:
            raise BadConfig(
                f"a pool of {wishes.pool:,} tokens is too small: {wishes.sequences} sequences and chunks of "
                f"{wishes.chunk} tokens need at least {least * PAGE:,}"
            )
        asked = min(asked, full)
        return asked, asked, asked
    small = wishes.lends or wishes.kv_mode == "sparse"
    return least, min(full, max(least, SMALL_TARGET if small else POOL_TARGET)), full

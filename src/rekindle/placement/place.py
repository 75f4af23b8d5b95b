"""Machine + model + wishes -> spans, experts, pages and every byte of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rekindle.errors import BadConfig, DoesNotFit
from rekindle.placement.buy import Bought, Shelf, buy, buying_order, check_counts, hot_of, ranked_experts
from rekindle.placement.reserve import (
    KEYED_PAGES,
    REMOTE_STOCK,
    SLAB,
    STAGING_SLABS,
    SpanWeights,
    Weigher,
    chooses_by_keys,
    expert_layers,
    fixed_items,
    kv_token_bytes,
    least_pages,
    margin,
    pins_ram,
    smallest_budget,
    staging_bytes,
    stock_bytes,
)
from rekindle.placement.split import spans_from_wish
from rekindle.placement.types import (
    CAPTURES,
    SNAPSHOTS,
    Device,
    Item,
    Machine,
    Plan,
    Sizes,
    StagePlan,
    Wishes,
    pages_for,
)
from rekindle.placement.units import gib
from rekindle.spec import PAGE, ModelSpec, Span

POOL_TARGET = (
    8_192 // PAGE
)  # pages; no context limit from here on makes an expert cold. 160 MiB of bf16 KV on the 35B-A3B


@dataclass(frozen=True, slots=True)
class Draft:
    """A stage before its experts and pages are chosen."""

    device: Device
    span: Span
    fixed: tuple[Item, ...]  # without the margin
    shelf: Shelf
    staging: int = 0  # bytes that only a stage with cold experts needs

    @property
    def room(self) -> int:
        """Bytes for experts and pages."""
        return self.device.budget - margin(self.device.budget) - sum(item.bytes for item in self.fixed)

    @property
    def least_budget(self) -> int:
        """The smallest budget with which the stage can run at all, its experts cold."""
        return self.budget_for(self.shelf.least, self.staging)

    def buy(self, shelf: Shelf | None = None) -> Bought | None:
        """What the room buys: everything, or as much as fits beside the staging area."""
        shelf = shelf or self.shelf
        bought = buy(shelf, self.room)
        if bought is None or not bought.leaves_cold(shelf):
            return bought
        return buy(shelf, self.room - self.staging)

    def budget_for(self, pages: int, experts: int) -> int:
        """The smallest budget that holds so many pages and so many bytes of experts."""
        fixed = sum(item.bytes for item in self.fixed)
        return smallest_budget(fixed + pages * self.shelf.page_bytes + experts)


class Placer:
    """Shared by the plan, its reasons and its alternatives, so that all of them count alike."""

    def __init__(self, machine: Machine, spec: ModelSpec, sizes: Sizes, wishes: Wishes) -> None:
        check_counts(spec, wishes)
        self.machine, self.spec, self.sizes, self.wishes = machine, spec, sizes, wishes
        self._weighers = [Weigher(spec, sizes.on(device)) for device in machine.devices]
        self._kv_page = PAGE * kv_token_bytes(spec, wishes.kv_type)  # of one layer
        self.least, self.target, self.most = _pool_sizes(wishes)

    def place(self) -> Plan:
        drafts = self.drafts()
        _check_budgets(drafts)
        stages = [self._stage(draft) for draft in drafts]
        return self._with_host(stages)

    def drafts(self) -> list[Draft]:
        return [self._draft(i, span) for i, span in enumerate(self.spans())]

    def spans(self) -> tuple[Span, ...]:
        devices, layers = len(self.machine.devices), self.spec.layers
        if devices > layers:
            raise BadConfig(f"{devices} devices cannot share {layers} layers, each needs at least one")
        if devices == 1 and self.wishes.split is None:
            return (self.spec.whole,)
        if self.wishes.split is not None:
            return spans_from_wish(self.wishes.split, devices, layers)
        return self._auto_spans()

    # One stage

    def _draft(self, index: int, span: Span) -> Draft:
        device, weights = self.machine.devices[index], self._weighers[index].weigh(span)
        fixed = self._fixed(index, weights)
        routed = expert_layers(self.sizes.on(device), span)
        if device.is_cpu:  # RAM is where cold experts would be, so there all of them are hot
            fixed, routed = [*fixed, Item("hot experts", weights.experts)], {}
        shelf = Shelf(
            order=buying_order(self.spec, routed, self.wishes),
            floor=sum(min(self.spec.ffn.used, layer.experts) for layer in routed.values()),
            layers=routed,
            page_bytes=weights.attention_layers * self._kv_page,
            least=self.least,
            target=self.target,
            most=self.most,
            full=self.wishes.full_pages,
            doubling=self.wishes.doubles_pool,
        )
        return Draft(device, span, tuple(fixed), shelf, staging_bytes(routed))

    def _fixed(self, index: int, weights: SpanWeights) -> list[Item]:
        device, first, last = self.machine.devices[index], index == 0, index == len(self.machine.devices) - 1
        return fixed_items(self.spec, self.sizes.on(device), self.wishes, device, weights, first, last)

    def _stage(self, draft: Draft) -> StagePlan:
        bought = draft.buy()
        assert bought is not None, "budgets were checked before anything was bought"
        hot = tuple(self._hot(draft, bought, layer) for layer in draft.span.layers)
        ring = tuple(
            bought.resident.get(layer, len(ids)) - len(ids) for layer, ids in zip(draft.span.layers, hot, strict=True)
        )
        layers = [self.sizes.on(draft.device).layers[layer] for layer in draft.span.layers]
        experts = [
            Item("hot experts", sum(len(ids) * layer.expert for ids, layer in zip(hot, layers, strict=True))),
            Item("expert staging", draft.staging if bought.leaves_cold(draft.shelf) else 0),
            Item("spare ring", sum(slots * layer.expert for slots, layer in zip(ring, layers, strict=True))),
        ]
        items = [
            *(item for item in draft.fixed if item.name != "hot experts"),
            *experts,
            Item("KV pool", bought.pages * draft.shelf.page_bytes),
            Item("margin", margin(draft.device.budget)),
        ]
        return StagePlan(
            device=draft.device,
            span=draft.span,
            items=tuple(item for item in items if item.bytes),
            hot=hot,
            ring_slots=ring,
            cold=sum(layer.experts for layer in layers) - sum(map(len, hot)),
            slots=self.wishes.sequences,
            pool_pages=bought.pages,
            full_pages=draft.shelf.full,
            host_pages=0,
            page_bytes=draft.shelf.page_bytes,
            slabs=REMOTE_STOCK if draft.device.remote else 0,
        )

    def _hot(self, draft: Draft, bought: Bought, layer: int) -> tuple[int, ...]:
        experts = self.sizes.layers[layer].experts
        ranked = ranked_experts(layer, experts, self.wishes)
        if layer not in bought.resident:  # dense, or on a CPU
            return tuple(ranked)
        count = hot_of(bought.resident[layer], experts, self.spec.ffn.used, self.wishes.ring_share)
        return tuple(ranked[:count])

    # The split

    def _auto_spans(self) -> tuple[Span, ...]:
        """The split that misses least memory; among those, the one whose slowest stage is fastest.

        best[stop] is the best way to put layers [0, stop) on the devices so far. Each rank is a sum or a maximum over
        the stages, so the best way to a longer piece goes through a best way to a shorter one.
        """
        layers, devices = self.spec.layers, len(self.machine.devices)
        best: dict[int, tuple[tuple[float, float, float], tuple[Span, ...]]] = {0: ((0, 0, 0), ())}
        for i in range(devices):
            to_come = devices - 1 - i
            stops = range(i + 1, layers - to_come + 1) if to_come else (layers,)
            best = {
                stop: min(
                    (
                        (self._join(rank, i, Span(start, stop)), (*spans, Span(start, stop)))
                        for start, (rank, spans) in best.items()
                        if start < stop
                    ),
                    key=lambda way: way[0],
                )
                for stop in stops
            }
        return best[layers][1]

    def _join(self, rank: tuple[float, float, float], index: int, span: Span) -> tuple[float, float, float]:
        missing, cold, slowest = rank
        stage_missing, stage_cold = self._shortfall(index, span)
        stage_time = len(span) / self.machine.devices[index].speed
        return missing + stage_missing, cold + stage_cold, max(slowest, stage_time)

    def _shortfall(self, index: int, span: Span) -> tuple[int, int]:
        """Bytes missing to run at all, and to keep every expert hot beside the target pool."""
        device, weights = self.machine.devices[index], self._weighers[index].weigh(span)
        page = weights.attention_layers * self._kv_page
        room = device.budget - margin(device.budget) - sum(item.bytes for item in self._fixed(index, weights))
        staging = staging_bytes(expert_layers(self.sizes.on(device), span))
        needed = self.least * page + (weights.experts if device.is_cpu else staging)
        return max(0, needed - room), max(0, self.target * page + weights.experts - room)

    # The host

    def _with_host(self, stages: list[StagePlan]) -> Plan:
        items = self._host_items(stages)
        left = self.machine.ram - sum(item.bytes for item in items)
        longest, full = pages_for(self.wishes.context), self.wishes.full_pages
        if chooses_by_keys(self.wishes):
            full = min(full, max(KEYED_PAGES, *(stage.pool_pages for stage in stages)))
        least = _evicted_bytes(stages, longest)
        if left < least:
            _refuse_ram(self.machine.ram, items, least, stages, left)
        gpus = sum(pins_ram(stage.device) for stage in stages)
        stock = stock_bytes(self.machine.ram, gpus, left - least)
        items.append(Item("pinned stock", stock))
        left -= stock
        snapshots = min(self.wishes.cache_ram, left - least)  # one long sequence comes first, several come after
        live = _most_pages(stages, left - snapshots, longest, full)
        slabs = stock // SLAB // max(1, gpus)
        placed = tuple(
            replace(
                stage,
                host_pages=max(0, live - stage.pool_pages),
                slabs=slabs if pins_ram(stage.device) else stage.slabs,
            )
            for stage in stages
        )
        items += [Item("evicted KV pages", _evicted_bytes(stages, live)), Item(SNAPSHOTS, snapshots)]
        named = tuple(item for item in items if item.bytes)
        return Plan(self.spec, self.machine, self.wishes, placed, named, live_pages=live)

    def _host_items(self, stages: list[StagePlan]) -> list[Item]:
        cold = sum(
            (layers[index].experts - len(hot)) * layers[index].expert
            for stage in stages
            for layers in [self.sizes.on(stage.device).layers]
            for index, hot in zip(stage.span.layers, stage.hot, strict=True)
        )
        in_flight = sum(stage.bytes_of(CAPTURES) for stage in stages if not stage.device.is_cpu)
        gpus = sum(pins_ram(stage.device) for stage in stages)
        first = self.machine.devices[0]  # a GPU has the embedding itself
        return [
            Item("embedding rows (mapped)", self.sizes.on(first).embedding if first.is_cpu else 0),
            *(Item(f"all of {stage.device.name}", stage.total) for stage in stages if stage.device.host),
            Item("cold experts", cold),
            Item(CAPTURES, in_flight),  # the pinned ends of the copies
            Item("pinned staging", gpus * STAGING_SLABS * SLAB),
        ]


def moved_bytes(plan: Plan, sizes: Sizes, index: int, device: Device) -> int:
    """What a stage of the plan needs on another device, with the same pool; on a GPU its cold experts stay cold."""
    stage, there = plan.stages[index], sizes.on(device)
    weights = Weigher(plan.spec, there).weigh(stage.span)
    first, last = index == 0, index == len(plan.stages) - 1
    fixed = sum(item.bytes for item in fixed_items(plan.spec, there, plan.wishes, device, weights, first, last))
    planned = sum(map(stage.bytes_of, ("hot experts", "expert staging", "spare ring")))
    experts = planned if stage.cold and not device.is_cpu else weights.experts
    return smallest_budget(fixed + experts + stage.pool_pages * stage.page_bytes)


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
    return least, min(full, max(least, POOL_TARGET)), full


def _check_budgets(drafts: list[Draft]) -> None:
    short = [draft for draft in drafts if draft.device.budget < draft.least_budget]
    if not short:
        return
    raise DoesNotFit("; ".join(_describe_missing(draft) for draft in short))


def _describe_missing(draft: Draft) -> str:
    device, least = draft.device, draft.least_budget
    pool = Item(f"KV pool of {draft.shelf.least * PAGE:,} tokens", draft.shelf.least * draft.shelf.page_bytes)
    largest = sorted((*draft.fixed, pool), key=lambda item: -item.bytes)[:4]
    parts = ", ".join(f"{item.name} {gib(item.bytes)}" for item in largest if item.bytes)
    return (
        f"{device.name} has a budget of {gib(device.budget)}, layers {draft.span} need at least {gib(least)} "
        f"({least} bytes), {gib(least - device.budget)} more; the largest parts: {parts}"
    )


def _evicted_bytes(stages: list[StagePlan], pages: int) -> int:
    """What RAM holds when the sequences hold so many pages."""
    return sum(max(0, pages - stage.pool_pages) * stage.page_bytes for stage in stages)


def _most_pages(stages: list[StagePlan], left: int, low: int, high: int) -> int:
    """The most pages in [low, high] whose evicted part fits; low is known to."""
    while low < high:
        middle = (low + high + 1) // 2
        if _evicted_bytes(stages, middle) <= left:
            low = middle
        else:
            high = middle - 1
    return low


def _refuse_ram(ram: int, items: list[Item], least: int, stages: list[StagePlan], left: int) -> None:
    needed = sum(item.bytes for item in items) + least
    named = [*items, Item("evicted KV of one sequence", least)]
    parts = ", ".join(f"{item.name} {gib(item.bytes)}" for item in named if item.bytes)
    message = f"RAM of {gib(ram)} is too small, at least {gib(needed)} ({needed} bytes) are needed: {parts}"
    if left >= 0:
        pool = min(stage.pool_pages for stage in stages)
        longest = _most_pages(stages, left, pool, max(pool, pages_for(1 << 20))) * PAGE
        message += f"; this RAM is enough for a context of {longest:,}"
    raise DoesNotFit(message)

"""Machine + model + wishes -> spans, experts, pages and every byte of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NoReturn

from rekindle.errors import BadConfig, DoesNotFit
from rekindle.placement.buy import (
    Bought,
    Share,
    Shelf,
    buy,
    buy_share,
    buying_order,
    check_counts,
    hot_of,
    ranked_experts,
    spare_slots,
)
from rekindle.placement.reach import CommonList, Reach, largest
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
    weight_bytes,
)
from rekindle.placement.split import best_spans, can_tile, spans_from_wish
from rekindle.placement.types import (
    CAPTURES,
    LONGEST_CONTEXT,
    SNAPSHOTS,
    Device,
    Item,
    LayerSizes,
    Machine,
    Plan,
    Sizes,
    StagePlan,
    Wishes,
    pages_for,
)
from rekindle.placement.units import at_least, gib
from rekindle.spec import PAGE, ModelSpec, Span

POOL_TARGET = (
    8_192 // PAGE
)  # pages; no context limit from here on makes an expert cold. 160 MiB of bf16 KV on the 35B-A3B

ENDLESS = 1 << 60  # bytes of RAM that nothing fills


@dataclass(frozen=True, slots=True)
class Space:
    """What a span finds on a device, in bytes."""

    room: int  # for experts, pages and staging
    page_bytes: int
    staging: int  # that only cold experts need
    least: int  # with which it runs at all


@dataclass(frozen=True, slots=True)
class Draft:
    """A stage before its experts and pages are chosen."""

    device: Device
    span: Span
    fixed: tuple[Item, ...]  # without the margin
    shelf: Shelf
    staging: int = 0  # bytes that only a stage with cold experts needs
    share: Share | None = None  # of what all devices buy together; None where the stage buys for itself

    @property
    def room(self) -> int:
        """Bytes for experts and pages."""
        return self.device.budget - margin(self.device.budget) - sum(item.bytes for item in self.fixed)

    @property
    def least_budget(self) -> int:
        """The smallest budget with which the stage can run at all, its experts cold."""
        return self.budget_for(self.shelf.least, self.staging)

    def buy(self, shelf: Shelf | None = None) -> Bought | None:
        """What the room buys: its share, or everything, or as much as fits beside the staging area."""
        if shelf is None and self.share is not None:
            return buy_share(self.shelf, self.share, self.room)
        shelf = shelf or self.shelf
        if self.room >= shelf.least * shelf.page_bytes + shelf.expert_bytes:  # else something stays cold
            bought = buy(shelf, self.room)
            if bought is not None and not bought.leaves_cold(shelf):
                return bought
        return buy(shelf, self.room - self.staging)

    def budget_for(self, pages: int, experts: int) -> int:
        """The smallest budget that holds so many pages and so many bytes of experts."""
        fixed = sum(item.bytes for item in self.fixed)
        return smallest_budget(fixed + pages * self.shelf.page_bytes + experts)

    def left(self, bought: Bought) -> int:
        """Bytes of the room that are still free."""
        experts = sum(count * self.shelf.layers[layer].expert for layer, count in bought.resident.items())
        staging = self.staging if bought.leaves_cold(self.shelf) else 0
        return self.room - experts - staging - bought.pages * self.shelf.page_bytes


class Placer:
    """Shared by the plan, its reasons and its alternatives, so that all of them count alike."""

    def __init__(self, machine: Machine, spec: ModelSpec, sizes: Sizes, wishes: Wishes) -> None:
        check_counts(spec, wishes)
        self.machine, self.spec, self.sizes, self.wishes = _within_ram(machine), spec, sizes, wishes
        self._weighers = [Weigher(spec, sizes.on(device)) for device in machine.devices]
        self._kv_page = PAGE * kv_token_bytes(spec, wishes.kv_type)  # of one layer
        self.least, self.target, self.most = _pool_sizes(wishes)
        self._order = buying_order(spec, expert_layers(sizes, spec.whole), wishes)
        self._asked, self._asked_order = set[int](), self._order  # layers asked for last, and their order
        self._spaces: dict[tuple[int, int, int], Space] = {}  # by device and span
        self._besides: dict[tuple[int, int, int], int] = {}  # by device and numbers of layers

    def place(self, frugal: tuple[Span, ...] | None = None) -> Plan:
        """On the best split; where that one wants more RAM than there is every device buys for itself, which leaves
        fewer experts cold; beside stages in RAM on the split that needs least of it.

        To look for that one takes seconds on three devices: `frugal` is one to try instead.
        """
        spans, chosen = self.spans(), len(self.machine.devices) > 1 and self.wishes.split is None
        drafts = self.drafts(spans)
        stages = self._stages(self._with_shares(drafts) if chosen else drafts)
        if stages is None and chosen:
            if self.has_host_stage:
                spans = frugal or self._with_ram(ENDLESS).frugal_spans()
            stages = self._stages(self.drafts(spans))
        if stages is None:
            self._refuse(spans)
        return self._with_host(stages)

    def drafts(self, spans: tuple[Span, ...] | None = None) -> list[Draft]:
        """On the best split if none is named."""
        return [self._draft(i, span) for i, span in enumerate(spans or self.spans())]

    def spans(self) -> tuple[Span, ...]:
        devices, layers = len(self.machine.devices), self.spec.layers
        if devices > layers:
            raise BadConfig(f"{devices} devices cannot share {layers} layers, each needs at least one")
        if devices == 1 and self.wishes.split is None:
            return (self.spec.whole,)
        if self.wishes.split is not None:
            return spans_from_wish(self.wishes.split, devices, layers)
        return self._furthest_spans()

    def frugal_spans(self) -> tuple[Span, ...]:
        """The split that needs least RAM, of those that miss least memory elsewhere."""
        return self._best_spans(self._ram_cost)

    @property
    def has_host_stage(self) -> bool:
        return any(device.host for device in self.machine.devices)

    # One stage

    def _draft(self, index: int, span: Span) -> Draft:
        device, weights = self.machine.devices[index], self._weighers[index].weigh(span)
        fixed = self._fixed(index, weights)
        routed = expert_layers(self.sizes.on(device), span)
        if device.is_cpu:  # RAM is where cold experts would be, so there all of them are hot
            fixed, routed = [*fixed, Item("hot experts", weights.experts)], {}
        return Draft(device, span, tuple(fixed), self._shelf(routed, weights.attention_layers), staging_bytes(routed))

    def _shelf(self, routed: dict[int, LayerSizes], attention_layers: int) -> Shelf:
        return Shelf(
            order=self._order_of(routed) if routed else (),
            floor=sum(min(self.spec.ffn.used, layer.experts) for layer in routed.values()),
            layers=routed,
            page_bytes=attention_layers * self._kv_page,
            least=self.least,
            target=self.target,
            most=self.most,
            full=self.wishes.full_pages,
            powers_of_two=self.wishes.power_of_two_pool,
        )

    def _order_of(self, routed: dict[int, LayerSizes]) -> tuple[int, ...]:
        """Of these layers alone. A search asks for one span after the other, most of them inside the one before."""
        if not routed.keys() <= self._asked:
            self._asked_order = self._order
        self._asked, self._asked_order = set(routed), tuple(filter(routed.__contains__, self._asked_order))
        return self._asked_order

    def _fixed(self, index: int, weights: SpanWeights) -> list[Item]:
        device, first, last = self.machine.devices[index], index == 0, index == len(self.machine.devices) - 1
        return fixed_items(self.spec, self.sizes.on(device), self.wishes, device, weights, first, last)

    def _stage(self, draft: Draft, ceiling: int) -> StagePlan:
        """With at most `ceiling` pages where it lives in RAM, which others need too."""
        shelf = None
        if draft.device.host and draft.shelf.page_bytes:
            shelf = replace(draft.shelf, target=min(draft.shelf.target, ceiling), ceiling=ceiling)
        bought = draft.buy(shelf)
        assert bought is not None, "budgets were checked before anything was bought"
        hot = tuple(self._hot(draft, bought, layer) for layer in draft.span.layers)
        spare = self._spare(draft, bought)
        ring = tuple(
            bought.resident.get(layer, len(ids)) - len(ids) + spare[layer]
            for layer, ids in zip(draft.span.layers, hot, strict=True)
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

    def _spare(self, draft: Draft, bought: Bought) -> Counter[int]:
        """Further ring slots per layer, where a device has room beside its share; none for who wants no ring."""
        if draft.share is None or draft.share.whole or not self.wishes.ring_share:
            return Counter()
        return spare_slots(draft.shelf, draft.share, draft.left(bought))

    # The split

    def _furthest_spans(self) -> tuple[Span, ...]:
        """The split that reaches furthest in the list of all devices; of equals the fastest."""
        layers, devices = self.spec.layers, len(self.machine.devices)

        def tiles(reach: Reach) -> bool:
            return can_tile(layers, devices, lambda index, span: self._holds(index, span, reach))

        reach = self._list().furthest(tiles)
        if reach is None:
            return self._best_spans(lambda index, span: (self._missing(index, span), 0))
        return self._best_spans(lambda index, span: (not self._holds(index, span, reach), 0))

    def _with_shares(self, drafts: list[Draft]) -> list[Draft]:
        """Of the furthest place that all of them reach; as they are if there is none."""
        spans = [draft.span for draft in drafts]
        reach = self._list().furthest(lambda reach: all(self._holds(i, span, reach) for i, span in enumerate(spans)))
        if reach is None:
            return drafts
        return [
            # in RAM, which others need too, pages are shared out later
            draft if draft.device.host else replace(draft, share=reach.share_of(draft.span))
            for draft in drafts
        ]

    def _list(self) -> CommonList:
        """Pages for more than one sequence at the context limit are worth less than speed, unless all fit; a pool
        beyond its target is worth less than the time of a CPU, which would get the layers for it."""
        shelf = self._shelf(expert_layers(self.sizes, self.spec.whole), len(self.spec.attention_layers()))
        if any(device.is_cpu or device.host for device in self.machine.devices):
            shelf = replace(shelf, most=shelf.target, full=shelf.target)
        else:
            shelf = replace(shelf, most=min(shelf.most, max(shelf.target, pages_for(self.wishes.context))))
        return CommonList(shelf, self.spec.layers)

    def _holds(self, index: int, span: Span, reach: Reach) -> bool:
        """Whether a device has room for its layers' part of everything up to there."""
        space = self._space(index, span)
        experts = 0 if self.machine.devices[index].is_cpu else reach.cost(span)
        needed = experts + reach.pages * space.page_bytes + (0 if reach.whole else space.staging)
        return space.room >= max(needed, space.least)

    def _missing(self, index: int, span: Span) -> int:
        """Bytes missing to run at all."""
        space = self._space(index, span)
        return max(0, space.least - space.room)

    def _space(self, index: int, span: Span) -> Space:
        """As a draft would say, without its shelf; asked for every span of every device, so it is kept."""
        found = self._spaces.get((index, span.start, span.stop))
        if found is None:
            device, weights = self.machine.devices[index], self._weighers[index].weigh(span)
            page = weights.attention_layers * self._kv_page
            staging = 0 if device.is_cpu else staging_bytes(expert_layers(self.sizes.on(device), span))
            taken = weights.mixers + weights.dense + weights.shared + (weights.experts if device.is_cpu else 0)
            beside = self._beside(index, weights.attention_layers, weights.delta_layers)
            room = device.budget - margin(device.budget) - taken - beside
            found = Space(room, page, staging, self.least * page + staging)
            self._spaces[index, span.start, span.stop] = found
        return found

    def _beside(self, index: int, attention_layers: int, delta_layers: int) -> int:
        """Bytes of the fixed items beside the weights of the layers."""
        key = (index, attention_layers, delta_layers)
        if key not in self._besides:
            weights = SpanWeights(0, 0, 0, 0, attention_layers, delta_layers)
            self._besides[key] = sum(item.bytes for item in self._fixed(index, weights))
        return self._besides[key]

    def _best_spans(self, cost: Callable[[int, Span], tuple[int, int]]) -> tuple[Span, ...]:
        return best_spans(self.spec.layers, [device.speed for device in self.machine.devices], cost)

    def _ram_cost(self, index: int, span: Span) -> tuple[int, int]:
        """Bytes missing to run at all, and RAM that the stage takes with the smallest pool."""
        missing = self._missing(index, span)
        if missing:
            return missing, 0
        return 0, self._ram_needed([self._stage(self._draft(index, span), self.least)], self.least)

    # The host

    def _stages(self, drafts: list[Draft]) -> list[StagePlan] | None:
        """With the pools that RAM has room for; None where even the smallest do not fit.

        One sequence at the context limit comes first, then snapshots, then pages for more sequences.
        """
        full = self.wishes.full_pages
        if any(draft.device.budget < draft.least_budget for draft in drafts):
            return None
        bought = [None if draft.device.host else self._stage(draft, full) for draft in drafts]

        def stages(ceiling: int) -> list[StagePlan]:
            return [stage or self._stage(draft, ceiling) for stage, draft in zip(bought, drafts, strict=True)]

        def left(ceiling: int) -> int:
            return self.machine.ram - self._ram_needed(stages(ceiling), ceiling)

        if left(self.least) < 0:
            return None
        if all(bought):
            return stages(full)
        apart = max(0, min(self.apart(self.machine.ram), left(max(self.least, pages_for(self.wishes.context)))))
        return stages(largest(self.least, full, lambda ceiling: left(ceiling) >= apart))

    def apart(self, ram: int) -> int:
        """RAM that is wanted for captures and snapshots before further pages."""
        gpus = sum(pins_ram(device) for device in self.machine.devices)
        return self.wishes.cache_ram + stock_bytes(ram, gpus, ram)

    def _ram_needed(self, stages: list[StagePlan], pages: int) -> int:
        """With so many pages for all sequences together, or those of one sequence where that is more."""
        items = sum(item.bytes for item in self._host_items(stages))
        return items + _evicted_bytes(stages, max(pages, pages_for(self.wishes.context)))

    def _with_ram(self, ram: int) -> Placer:
        """The same with another amount of RAM, for the devices that are all of it too."""
        devices = tuple(
            replace(device, budget=ram) if self.is_ram(device) else device for device in self.machine.devices
        )
        return self.on(Machine(devices, ram))

    def on(self, machine: Machine) -> Placer:
        """The same wishes on another machine."""
        return Placer(machine, self.spec, self.sizes, self.wishes)

    def is_ram(self, device: Device) -> bool:
        """Whether it has no budget of its own: it may have all of the RAM."""
        return device.host and device.budget == self.machine.ram

    def least_ram(self, spans: tuple[Span, ...], pages: int) -> int:
        """The least RAM for such stages with so many pages in it."""
        needed, margins = self._ram_beside_margins(spans, pages)
        return smallest_budget(needed, margins)

    def ample_ram(self, spans: tuple[Span, ...], pages: int) -> int:
        """The least RAM with which the plan gives them so many pages: beside the captures and snapshots it wants."""
        needed, margins = self._ram_beside_margins(spans, pages)
        ram = needed
        while (enough := smallest_budget(needed + self.apart(ram), margins)) > ram:
            ram = enough
        return ram

    def _ram_beside_margins(self, spans: tuple[Span, ...], pages: int) -> tuple[int, int]:
        """Bytes, and the number of margins that come on top of them."""
        roomy = self._with_ram(ENDLESS)
        stages = [roomy._stage(draft, pages) for draft in roomy.drafts(spans)]
        margins = sum(self.is_ram(device) for device in self.machine.devices)
        return roomy._ram_needed(stages, pages) - margins * margin(ENDLESS), margins

    def _with_host(self, stages: list[StagePlan]) -> Plan:
        items = self._host_items(stages)
        left = self.machine.ram - sum(item.bytes for item in items)
        longest, full = pages_for(self.wishes.context), self.wishes.full_pages
        if chooses_by_keys(self.wishes):
            full = min(full, max(KEYED_PAGES, *(stage.pool_pages for stage in stages)))
        least = _evicted_bytes(stages, longest)
        assert left >= least, f"RAM was checked, and now {left} bytes are less than {least}"
        gpus = sum(pins_ram(stage.device) for stage in stages)
        stock = stock_bytes(self.machine.ram, gpus, left - least)
        items.append(Item("pinned stock", stock))
        left -= stock
        snapshots = min(self.wishes.cache_ram, left - least)
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

    # What cannot be

    def _refuse(self, spans: tuple[Span, ...]) -> NoReturn:
        drafts = self.drafts(spans)
        short = [
            draft for draft in drafts if draft.device.budget < draft.least_budget and not self.is_ram(draft.device)
        ]
        said = [_describe_missing(draft) for draft in short] or [self._describe_ram(spans)]
        said += [told for draft in short or drafts for told in self.expansion(draft.device, draft.span)]
        raise DoesNotFit("; ".join(said))

    def _describe_ram(self, spans: tuple[Span, ...]) -> str:
        ram, needed = self.machine.ram, self.least_ram(spans, self.least)
        enough = self._with_ram(needed)
        stages = [enough._stage(draft, self.least) for draft in enough.drafts(spans)]
        evicted = Item("evicted KV of one sequence", _evicted_bytes(stages, pages_for(self.wishes.context)))
        items = [*self._host_items(stages), evicted]
        parts = ", ".join(f"{item.name} {gib(item.bytes)}" for item in items if item.bytes)
        told = f"RAM of {gib(ram)} is too small, at least {at_least(needed)} ({needed:,} bytes) are needed: {parts}"
        left = ram - (needed - evicted.bytes)  # the margin of less RAM is smaller, so at least as much
        if left >= 0:
            pool = min(stage.pool_pages for stage in stages)
            longest = _most_pages(stages, left, pool, max(pool, pages_for(LONGEST_CONTEXT))) * PAGE
            told += f"; this RAM is enough for a context of {longest:,}"
        return told

    def expansion(self, device: Device, span: Span) -> Iterator[str]:
        """A CPU keeps no quantised weights."""
        first, last = span.start == 0, span.stop == self.spec.layers
        here, kept = (
            weight_bytes(sizes, Weigher(self.spec, sizes).weigh(span), first, last)
            for sizes in (self.sizes.on(device), self.sizes)
        )
        if here != kept:
            dtype = {2: "bfloat16", 4: "float32"}[self.wishes.compute_bytes]
            yield f"{device.name}: weights become {dtype} on a CPU, {gib(here)} instead of {gib(kept)} on a GPU"


def moved_bytes(plan: Plan, sizes: Sizes, index: int, device: Device) -> int:
    """What a stage of the plan needs on another device, with the same pool; on a GPU its cold experts stay cold."""
    stage, there = plan.stages[index], sizes.on(device)
    weights = Weigher(plan.spec, there).weigh(stage.span)
    first, last = index == 0, index == len(plan.stages) - 1
    fixed = sum(item.bytes for item in fixed_items(plan.spec, there, plan.wishes, device, weights, first, last))
    planned = sum(map(stage.bytes_of, ("hot experts", "expert staging", "spare ring")))
    experts = planned if stage.cold and not device.is_cpu else weights.experts
    return smallest_budget(fixed + experts + stage.pool_pages * stage.page_bytes)


def _within_ram(machine: Machine) -> Machine:
    """No device that lives in RAM has more than there is."""
    devices = (
        replace(device, budget=min(device.budget, machine.ram)) if device.host else device for device in machine.devices
    )
    return replace(machine, devices=tuple(devices))


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


def _describe_missing(draft: Draft) -> str:
    device, least = draft.device, draft.least_budget
    pool = Item(f"KV pool of {draft.shelf.least * PAGE:,} tokens", draft.shelf.least * draft.shelf.page_bytes)
    largest = sorted((*draft.fixed, pool), key=lambda item: -item.bytes)[:4]
    parts = ", ".join(f"{item.name} {gib(item.bytes)}" for item in largest if item.bytes)
    return (
        f"{device.name} has a budget of {gib(device.budget)}, layers {draft.span} need at least {at_least(least)} "
        f"({least:,} bytes), {gib(least - device.budget)} more; the largest parts: {parts}"
    )


def _evicted_bytes(stages: list[StagePlan], pages: int) -> int:
    """What RAM holds when the sequences hold so many pages."""
    return sum(max(0, pages - stage.pool_pages) * stage.page_bytes for stage in stages)


def _most_pages(stages: list[StagePlan], left: int, low: int, high: int) -> int:
    """The most pages in [low, high] whose evicted part fits; low is known to."""
    return largest(low, high, lambda pages: _evicted_bytes(stages, pages) <= left)

"""Machine + model + wishes -> spans, experts, pages and every byte of them."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from rekindle.errors import DoesNotFit
from rekindle.placement.allocate import check_counts
from rekindle.placement.levels import largest
from rekindle.placement.ram import Ram, evicted_bytes
from rekindle.placement.reserve import Weigher, fixed_items, margin, smallest_budget, weight_bytes
from rekindle.placement.search import SplitSearch
from rekindle.placement.stage import StageCandidate, StagePlanner
from rekindle.placement.types import LONGEST_CONTEXT, Device, Item, Machine, Plan, Sizes, Wishes, pages_for
from rekindle.placement.units import at_least, gib
from rekindle.spec import PAGE, ModelSpec, Span

ENDLESS = 1 << 60  # bytes of RAM that nothing fills
AS_STORED = 1.2  # weights on a CPU that take at most this many times what they take on a GPU are not expanded


class Placer:
    """Shared by the plan, its reasons and its alternatives, so that all of them count alike."""

    def __init__(self, machine: Machine, spec: ModelSpec, sizes: Sizes, wishes: Wishes) -> None:
        check_counts(spec, wishes)
        self.machine, self.spec, self.sizes, self.wishes = _within_ram(machine), spec, sizes, wishes
        self.planner = StagePlanner(self.machine, spec, sizes, wishes)
        self._search, self._ram = SplitSearch(self.planner), Ram(self.planner)
        self.least, self.target = self.planner.least, self.planner.target

    def place(self, frugal: tuple[Span, ...] | None = None) -> Plan:
        """On the best split; where that one wants more RAM than there is every device allocates for itself, which
        leaves fewer experts cold; beside stages in RAM on the split that needs least of it.

        To look for that one takes seconds on three devices: `frugal` is one to try instead.
        """
        spans, chosen = self.spans(), len(self.machine.devices) > 1 and self.wishes.split is None
        candidates = self.stage_candidates(spans)
        stages = self._ram.fit(self._search.with_shares(candidates) if chosen else candidates)
        if stages is None and chosen:
            if self.has_host_stage:
                spans = frugal or self._with_ram(ENDLESS).frugal_spans()
            stages = self._ram.fit(self.stage_candidates(spans))
        if stages is None:
            self._refuse(spans)
        return self._ram.plan(stages)

    def stage_candidates(self, spans: tuple[Span, ...] | None = None) -> list[StageCandidate]:
        """On the best split if none is named."""
        return [self.planner.stage_candidate(i, span) for i, span in enumerate(spans or self.spans())]

    def spans(self) -> tuple[Span, ...]:
        return self._search.spans()

    def frugal_spans(self) -> tuple[Span, ...]:
        """The split that needs least RAM, of those that miss least memory elsewhere."""
        return self._search.cheapest(self._ram_cost)

    def _ram_cost(self, index: int, span: Span) -> tuple[int, int]:
        """Bytes missing to run at all, and RAM that the stage takes with the smallest pool."""
        missing = self.planner.missing(index, span)
        if missing:
            return missing, 0
        stage = self.planner.plan(self.planner.stage_candidate(index, span), self.least)
        return 0, self._ram.needed([stage], self.least)

    @property
    def has_host_stage(self) -> bool:
        return any(device.host for device in self.machine.devices)

    def is_ram(self, device: Device) -> bool:
        """Whether it has no budget of its own: it may have all of the RAM."""
        return self._ram.is_all_of(device)

    # Other machines

    def on(self, machine: Machine) -> Placer:
        """The same wishes on another machine."""
        return Placer(machine, self.spec, self.sizes, self.wishes)

    def _with_ram(self, ram: int) -> Placer:
        """The same with another amount of RAM, for the devices that are all of it too."""
        devices = tuple(
            replace(device, budget=ram) if self.is_ram(device) else device for device in self.machine.devices
        )
        return self.on(Machine(devices, ram))

    def least_ram(self, spans: tuple[Span, ...], pages: int) -> int:
        """The least RAM for stages of these spans with `pages` pages in it."""
        needed, margins = self._ram_beside_margins(spans, pages)
        return smallest_budget(needed, margins)

    def ample_ram(self, spans: tuple[Span, ...], pages: int) -> int:
        """The least RAM with which the plan gives them `pages` pages: beside the captures and snapshots it wants."""
        needed, margins = self._ram_beside_margins(spans, pages)
        ram = needed
        while (enough := smallest_budget(needed + self._ram.apart(ram), margins)) > ram:
            ram = enough
        return ram

    def _ram_beside_margins(self, spans: tuple[Span, ...], pages: int) -> tuple[int, int]:
        """Bytes, and the number of margins that come on top of them."""
        roomy = self._with_ram(ENDLESS)
        stages = [roomy.planner.plan(stage, pages) for stage in roomy.stage_candidates(spans)]
        margins = sum(self.is_ram(device) for device in self.machine.devices)
        return roomy._ram.needed(stages, pages) - margins * margin(ENDLESS), margins

    # What cannot be

    def _refuse(self, spans: tuple[Span, ...]) -> NoReturn:
        candidates = self.stage_candidates(spans)
        short = [
            stage for stage in candidates if stage.device.budget < stage.least_budget and not self.is_ram(stage.device)
        ]
        causes = [_describe_missing(stage) for stage in short] or [self._describe_ram(spans)]
        for stage in short or candidates:
            if expansion := describe_expansion(self.spec, self.sizes, self.wishes, stage.device, stage.span):
                causes.append(expansion)
        raise DoesNotFit("; ".join(causes))

    def _describe_ram(self, spans: tuple[Span, ...]) -> str:
        ram, needed = self.machine.ram, self.least_ram(spans, self.least)
        enough = self._with_ram(needed)
        stages = [enough.planner.plan(stage, self.least) for stage in enough.stage_candidates(spans)]
        pages = pages_for(self.wishes.context)
        evicted, live = evicted_bytes(stages, pages), self._ram.live_bytes(stages, pages)
        one = [Item("evicted KV of one sequence", evicted), Item("draft index of one sequence", live - evicted)]
        items = [*self._ram.items(stages), *one]
        parts = ", ".join(f"{item.name} {gib(item.bytes)}" for item in items if item.bytes)
        cause = f"RAM of {gib(ram)} is too small, at least {at_least(needed)} ({needed:,} bytes) are needed: {parts}"
        left = ram - (needed - live)  # the margin of less RAM is smaller, so at least as much
        if left < 0:
            return cause
        pool = min(stage.pool_pages for stage in stages)
        if self._ram.live_bytes(stages, pool) > left:
            return cause
        most = max(pool, pages_for(LONGEST_CONTEXT))
        longest = largest(pool, most, lambda count: self._ram.live_bytes(stages, count) <= left) * PAGE
        return f"{cause}; this RAM is enough for a context of {longest:,}"


def describe_expansion(spec: ModelSpec, sizes: Sizes, wishes: Wishes, device: Device, span: Span) -> str | None:
    """Whether the CPU kernels read the weights as they are stored, or need them expanded; None on a GPU, and where the
    weights take the same on both."""
    if not device.is_cpu or sizes.on_cpu is None:
        return None
    first, last = span.start == 0, span.stop == spec.layers
    here, kept = (weight_bytes(at, Weigher(spec, at).weigh(span), first, last) for at in (sizes.on(device), sizes))
    if here <= AS_STORED * kept:
        return f"{device.name}: weights stay quantised, {gib(here)}"
    dtype = {2: "bfloat16", 4: "float32"}[wishes.compute_bytes]
    return f"{device.name}: weights become {dtype} on a CPU, {gib(here)} instead of {gib(kept)} on a GPU"


def moved_bytes(plan: Plan, sizes: Sizes, index: int, device: Device) -> int:
    """What a stage of the plan needs on another device, with the same pool; on a GPU its cold experts stay cold."""
    stage, there = plan.stages[index], sizes.on(device)
    weights = Weigher(plan.spec, there).weigh(stage.span)
    first, last = index == 0, index == len(plan.stages) - 1
    tapped = plan.wishes.tapped(stage.span)
    items = fixed_items(plan.spec, there, plan.wishes, device, weights, first, last, tapped)
    fixed = sum(item.bytes for item in items)
    planned = sum(map(stage.bytes_of, ("hot experts", "expert staging", "expert cache")))
    experts = planned if stage.cold and not device.is_cpu else weights.experts
    return smallest_budget(fixed + experts + stage.pool_pages * stage.page_bytes)


def _within_ram(machine: Machine) -> Machine:
    """No device that lives in RAM has more than there is."""
    devices = (
        replace(device, budget=min(device.budget, machine.ram)) if device.host else device for device in machine.devices
    )
    return replace(machine, devices=tuple(devices))


def _describe_missing(stage: StageCandidate) -> str:
    device, least, candidates = stage.device, stage.least_budget, stage.candidates
    pool = Item(f"KV pool of {candidates.least * PAGE:,} tokens", candidates.least * candidates.page_bytes)
    largest = sorted((*stage.fixed, pool), key=lambda item: -item.bytes)[:4]
    parts = ", ".join(f"{item.name} {gib(item.bytes)}" for item in largest if item.bytes)
    return (
        f"{device.name} has a budget of {gib(device.budget)}, layers {stage.span} need at least {at_least(least)} "
        f"({least:,} bytes), {gib(least - device.budget)} more; the largest parts: {parts}"
    )

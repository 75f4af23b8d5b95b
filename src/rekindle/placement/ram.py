"""The machine's RAM: what all stages need of it, and what the rest is for."""

from __future__ import annotations

from dataclasses import replace

from rekindle.buffers import SLAB_BYTES
from rekindle.placement.levels import largest
from rekindle.placement.reserve import KEYED_PAGES, LOOKUP_BYTES, STAGING_SLABS, chooses_by_keys, pins_ram, stock_bytes
from rekindle.placement.stage import StageCandidate, StagePlanner
from rekindle.placement.types import CAPTURES, KEPT, SNAPSHOTS, Device, Item, Plan, StagePlan, pages_for
from rekindle.spec import PAGE

CONVERSATIONS = 2  # at the context limit, whose snapshots come before pages for further sequences
KEPT_PART = 4  # copies that only kept slots hold may take this part of what snapshots get, beside it
SNAPSHOT_PART = 2  # snapshots get this part of the RAM that nothing else wants; the rest is the machine's


class Ram:
    """Divides the RAM between cold experts, stages that live in it, evicted pages, captures and snapshots."""

    def __init__(self, planner: StagePlanner) -> None:
        self._planner = planner
        self._machine, self._wishes, self._sizes = planner.machine, planner.wishes, planner.sizes
        self.size = planner.machine.ram

    def fit(self, candidates: list[StageCandidate]) -> list[StagePlan] | None:
        """Stages with the pools that RAM has room for; None where even the smallest do not fit.

        One sequence at the context limit comes first, then snapshots (as many bytes as asked for, or those of
        CONVERSATIONS) and copies of kept slots, then pages for more sequences; what is then left is shared with
        snapshots.
        """
        least, full = self._planner.least, self._wishes.full_pages
        if any(stage.device.budget < stage.least_budget for stage in candidates):
            return None
        outside = [None if stage.device.host else self._planner.plan(stage, full, lends=True) for stage in candidates]

        def stages(ceiling: int) -> list[StagePlan]:
            pairs = zip(outside, candidates, strict=True)
            return [done or self._planner.plan(stage, ceiling) for done, stage in pairs]

        def left(ceiling: int) -> int:
            return self.size - self.needed(stages(ceiling), ceiling)

        one_sequence = max(least, pages_for(self._wishes.context))
        if left(one_sequence) < self.apart(self.size):  # snapshots come before room for experts that are hot
            outside = [done and replace(done, lendable=()) for done in outside]
        if left(least) < 0:
            return None
        if all(outside):
            return stages(full)
        apart = max(0, min(self.apart(self.size), left(one_sequence)))
        return stages(largest(least, full, lambda ceiling: left(ceiling) >= apart))

    def is_all_of(self, device: Device) -> bool:
        """Whether a device has no budget of its own: it may have all of the RAM."""
        return device.host and device.budget == self.size

    def apart(self, ram: int) -> int:
        """RAM that is wanted for captures, snapshots and copies of kept slots before further pages."""
        gpus = sum(pins_ram(device) for device in self._machine.devices)
        return self._wanted() + self._wanted() // KEPT_PART + stock_bytes(ram, gpus, ram)

    def _wanted(self) -> int:
        """RAM for snapshots that comes before further pages."""
        if self._wishes.cache_ram is not None:
            return self._wishes.cache_ram
        sizes = self._wishes.snapshot_bytes(self._planner.spec)
        return CONVERSATIONS * sizes.conversation(self._wishes.context)

    def needed(self, stages: list[StagePlan], pages: int) -> int:
        """With `pages` pages for all sequences together, or those of one sequence where that is more."""
        items = sum(item.bytes for item in self.items(stages))
        return items + self.live_bytes(stages, max(pages, pages_for(self._wishes.context)))

    def live_bytes(self, stages: list[StagePlan], pages: int) -> int:
        """What RAM holds of sequences with `pages` pages: those beyond the pools, and what prompt lookup looks in."""
        return evicted_bytes(stages, pages) + self._index_bytes(pages)

    def _index_bytes(self, pages: int) -> int:
        return pages * PAGE * LOOKUP_BYTES if self._wishes.rewind_rows else 0

    def items(self, stages: list[StagePlan]) -> list[Item]:
        """What the stages need at least."""
        in_flight = sum(stage.bytes_of(CAPTURES) for stage in stages if not stage.device.is_cpu)
        gpus = sum(pins_ram(stage.device) for stage in stages)
        return [
            Item("embedding rows (as stored)", self._embedding_bytes(stages)),
            *(Item(f"all of {stage.device.name}", stage.total) for stage in stages if stage.device.host),
            Item("drafter", self._wishes.drafter_ram),
            Item("cold experts", sum(map(self._cold_bytes, stages))),
            Item("experts whose slots KV may get", sum(map(self._lendable_bytes, stages))),
            Item(CAPTURES, in_flight),  # the pinned ends of the copies
            Item("pinned staging", gpus * STAGING_SLABS * SLAB_BYTES),
        ]

    def _embedding_bytes(self, stages: list[StagePlan]) -> int:
        """A GPU has the embedding itself."""
        first = stages[0].device
        return self._sizes.on(first).embedding_of(first=True, last=len(stages) == 1) if first.is_cpu else 0

    def _cold_bytes(self, stage: StagePlan) -> int:
        layers = self._sizes.on(stage.device).layers
        pairs = zip(stage.span.layers, stage.hot, strict=True)
        return sum((layers[index].experts - len(hot)) * layers[index].expert for index, hot in pairs)

    def _lendable_bytes(self, stage: StagePlan) -> int:
        layers = self._sizes.on(stage.device).layers
        pairs = zip(stage.span.layers, stage.lendable, strict=False)
        return sum(slots * layers[index].expert for index, slots in pairs)

    def plan(self, stages: list[StagePlan]) -> Plan:
        """The stages with what the rest of the RAM holds for them."""
        items = self.items(stages)
        left = self.size - sum(item.bytes for item in items)
        longest = pages_for(self._wishes.context)
        least = self.live_bytes(stages, longest)
        assert left >= least, f"RAM was checked, and now {left} bytes are less than {least}"
        gpus = sum(pins_ram(stage.device) for stage in stages)
        stock = stock_bytes(self.size, gpus, left - least)
        snapshots = min(self._wanted(), left - stock - least)
        kept = min(snapshots // KEPT_PART, left - stock - least - snapshots)
        room, most = left - stock - snapshots - kept, self._most_live(stages)
        live = largest(longest, most, lambda pages: self.live_bytes(stages, pages) <= room)
        if self._wishes.cache_ram is None:
            rest = left - stock - self.live_bytes(stages, live)
            snapshots = max(snapshots, rest // SNAPSHOT_PART)
            kept = min(snapshots // KEPT_PART, rest - snapshots)
        items += [
            Item("pinned stock", stock),
            Item("evicted KV pages", evicted_bytes(stages, live)),
            Item("draft index", self._index_bytes(live)),
            Item(SNAPSHOTS, snapshots),
            Item(KEPT, kept),
        ]
        slabs = stock // SLAB_BYTES // max(1, gpus)
        placed = tuple(_with_host(stage, live, slabs) for stage in stages)
        named = tuple(item for item in items if item.bytes)
        return Plan(self._planner.spec, self._machine, self._wishes, placed, named, live_pages=live)

    def _most_live(self, stages: list[StagePlan]) -> int:
        """Pages that all sequences together may hold, where RAM sets no limit."""
        full = self._wishes.full_pages
        if not chooses_by_keys(self._wishes):
            return full
        return min(full, max(KEYED_PAGES, *(stage.pool_pages for stage in stages)))


def _with_host(stage: StagePlan, live: int, slabs: int) -> StagePlan:
    own = slabs if pins_ram(stage.device) else stage.slabs
    return replace(stage, host_pages=max(0, live - stage.pool_pages), slabs=own)


def evicted_bytes(stages: list[StagePlan], pages: int) -> int:
    """What RAM holds when the sequences hold `pages` pages."""
    return sum(max(0, pages - stage.pool_pages) * stage.page_bytes for stage in stages)

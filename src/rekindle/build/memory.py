"""The memory that the models of one server share: what there is, and what the plans of loaded ones leave of it."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rekindle.build.machine import device_names, make_machine, vram_by_name
from rekindle.config import Config
from rekindle.placement import Plan, pages_for


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes."""

    ram: int
    vram: dict[str, int]  # by GPU of this process

    def without(self, plans: Sequence[Plan]) -> Budgets:
        """What these plans leave. Plans count, not what is free: pools and caches fill only later."""
        vram = dict(self.vram)
        for stage in (stage for plan in plans for stage in plan.stages):
            if stage.device.name in vram:
                vram[stage.device.name] -= stage.total
        return Budgets(self.ram - sum(plan.host_total for plan in plans), vram)

    def offer(self, config: Config, whole: Budgets) -> Config:
        """The config, with no more than these budgets. whole: what the machine has when nothing is loaded."""
        names = device_names(config.devices)
        own = vram_by_name(config.vram, names)
        gpus = [name for name in names if name in self.vram]
        vram = tuple(max(1, min(own.get(name, whole.vram[name]), self.vram[name])) for name in gpus)
        return replace(config, ram=max(1, min(config.ram or whole.ram, self.ram)), vram=vram or None)


def free_memory() -> Budgets:
    """Of this machine now, as `serve` may use it."""
    machine = make_machine(device_names(("auto",)), None, None)
    return Budgets(machine.ram, {device.name: device.budget for device in machine.devices if not device.is_cpu})


def as_good(beside: Plan, alone: Plan) -> bool:
    """Whether a plan beside other models is worth having: as many hot experts and as much RAM for snapshots as alone,
    and a pool that holds one sequence at the context limit, or what it would hold alone."""
    pages = min(alone.pool_pages, pages_for(alone.wishes.context))
    return beside.cold <= alone.cold and beside.pool_pages >= pages and beside.snapshot_ram >= alone.snapshot_ram


def tidy() -> None:
    """After a load or an unload: collect cycles, return what allocators keep for later to the system, and exempt what
    stays from the garbage collector, which would walk through it while tokens wait."""
    gc.unfreeze()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    ctypes.CDLL(None).malloc_trim(0)
    gc.freeze()

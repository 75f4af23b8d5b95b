"""The tiers of one machine: RAM, then disk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rekindle.prefix.disk import DiskTier
from rekindle.prefix.ram import RamTier
from rekindle.prefix.tier import Off, Tier
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.slabs import Slabs


def local_tiers(
    ram_budget: int,
    disk: DiskStore | None = None,
    *,
    slabs: Sequence[Slabs] = (),
    queue: int = 4,
    busy: Callable[[], bool] = lambda: True,
) -> tuple[Tier, ...]:
    """slabs: memory that captures lie in; it shares with the disk store's what snapshots leave of the RAM budget. busy:
    whether somebody is being answered."""
    if disk is None:
        return RamTier(ram_budget, slabs), Off(DiskTier.name)
    return RamTier(ram_budget, [*slabs, disk.slabs]), DiskTier(disk, queue, busy)

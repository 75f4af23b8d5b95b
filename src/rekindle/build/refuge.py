"""Where a span goes whose shard stays away: onto a device of this process that has room for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace

import torch

from rekindle.build.machine import RAM_SHARE, VRAM_SHARE, available_ram, device_of, shard_of, torch_device
from rekindle.build.shards import StageOrder, load_stage
from rekindle.config import show_bytes
from rekindle.errors import RekindleError, StageLost
from rekindle.experts import RoutingCounts
from rekindle.placement import Device, Plan, Sizes, StagePlan, moved_bytes
from rekindle.spec import Span
from rekindle.stages import Stage
from rekindle.weights import WeightFile

log = logging.getLogger("rekindle.build")


class Room:
    """What the plans of all replicas leave of this machine's devices, and of its RAM; kept as spans move."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._lock = threading.Lock()  # replicas lose their stages each on a thread of its own
        gpus = [stage for plan in plans for stage in plan.stages if is_local(stage) and not stage.device.is_cpu]
        self._left = {stage.device.name: stage.left for stage in gpus}
        self._left["cpu"] = sum(plan.host_left for plan in plans)

    def of(self, device: str) -> int:
        """What is free now, and nobody has been promised."""
        if device == "cpu":
            free = int(available_ram() * RAM_SHARE)
        else:
            free = int(torch.cuda.mem_get_info(torch_device(device))[0] * VRAM_SHARE)
        return max(0, min(free, self._left[device]))

    def take(self, device: str, size: int) -> bool:
        """Whether there is as much; then it is taken."""
        with self._lock:
            fits = size <= self.of(device)
            self._left[device] -= size if fits else 0
        return fits

    def give(self, device: str, size: int) -> None:
        with self._lock:
            if device in self._left:
                self._left[device] += size


def is_local(stage: StagePlan) -> bool:
    """Planned for this process."""
    return not shard_of(stage.device.name)


class Refuge:
    """Takes in the spans of lost stages. They stay where they are until the server is started anew."""

    def __init__(
        self,
        room: Room,
        file: WeightFile,
        plan: Plan,
        orders: Sequence[StageOrder],
        sizes: Sizes,
        counts: RoutingCounts | None,
    ) -> None:
        self._room, self._file, self._plan, self._sizes, self._counts = room, file, plan, sizes, counts
        self._orders = list(orders)
        # By stage: the device of this process that it is on, and what it has of this machine's memory.
        self._homes = [stage.device if is_local(stage) else None for stage in plan.stages]
        self._holds = [
            None if stage.device.remote else (device_of(stage.device.name), stage.total) for stage in plan.stages
        ]

    def take_in(self, span: Span, why: RekindleError) -> Stage:
        """The span's stage, loaded here with every slot empty; raises StageLost where no device can take it."""
        index = [order.span for order in self._orders].index(span)
        self._leave(index)
        refusals: list[str] = []
        for device in self._candidates(index):
            needed = moved_bytes(self._plan, self._sizes, index, device)
            if not self._room.take(device.name, needed):
                free = show_bytes(self._room.of(device.name))
                refusals.append(f"{device.name} has {free} and {show_bytes(needed)} are needed")
                continue
            log.warning("%s; layers %s move to %s, until the next start", why, span, device.name)
            try:
                stage = self._load(index, device)
            except Exception as error:
                # Said, not chained: its traceback would keep alive what was loaded so far.
                log.warning("loading layers %s on %s failed", span, device.name, exc_info=error)
                refusals.append(f"loading on {device.name} failed: {error}")
                self._room.give(device.name, needed)
                continue
            self._homes[index], self._holds[index] = device, (device.name, needed)
            return stage
        raise StageLost(f"{why}; no other device can take layers {span}: {', '.join(refusals)}")

    def _leave(self, index: int) -> None:
        """The lost stage has no memory any more."""
        if (held := self._holds[index]) is not None:
            self._room.give(*held)
        self._homes[index] = self._holds[index] = None

    def _candidates(self, index: int) -> list[Device]:
        """Devices of this process, those of neighbouring stages first; then its CPU, which every machine has."""
        near = sorted(range(len(self._homes)), key=lambda place: abs(place - index))
        homes = [home for place in near if (home := self._homes[place]) is not None]
        local = [stage.device for stage in self._plan.stages if is_local(stage)]
        cpu = Device("cpu", "cpu", self._plan.machine.ram, host=True)
        return list({device.name: device for device in [*homes, *local, cpu]}.values())

    def _load(self, index: int, device: Device) -> Stage:
        order = replace(self._orders[index], device=device.name)
        if device.is_cpu:
            order = replace(order, hot=None, ring=())
        return load_stage(self._file, order, counts=self._counts)

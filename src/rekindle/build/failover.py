"""When a shard stays away, its span moves to a device of this process that has memory for it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace

import torch

from rekindle.build.machine import RAM_SHARE, VRAM_SHARE, available_ram, device_of, shard_of, torch_device
from rekindle.build.stage import StageConfig, load_stage
from rekindle.config import show_bytes
from rekindle.errors import RekindleError, StageLost
from rekindle.experts import RoutingCounts
from rekindle.placement import Device, Plan, Sizes, StagePlan, moved_bytes
from rekindle.spec import Span
from rekindle.stages import Stage
from rekindle.weights import WeightFile

log = logging.getLogger("rekindle.build")


class FreeMemory:
    """What the plans of all replicas leave of this machine's GPUs and of its RAM; updated as spans move."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self._lock = threading.Lock()  # each replica recovers its stages on its own thread
        gpus = [stage for plan in plans for stage in plan.stages if is_local(stage) and not stage.device.is_cpu]
        self._left = {stage.device.name: stage.left for stage in gpus}
        self._left["cpu"] = sum(plan.host_left for plan in plans)

    def of(self, device: str) -> int:
        """Bytes that are free now and reserved by no plan."""
        if device == "cpu":
            free = int(available_ram() * RAM_SHARE)
        else:
            free = int(torch.cuda.mem_get_info(torch_device(device))[0] * VRAM_SHARE)
        return max(0, min(free, self._left[device]))

    def take(self, device: str, size: int) -> bool:
        """Reserve `size` bytes; False where there are fewer."""
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


class Failover:
    """Loads the spans of lost stages on devices of this process, where they stay until the server is restarted."""

    def __init__(
        self,
        memory: FreeMemory,
        file: WeightFile,
        plan: Plan,
        configs: Sequence[StageConfig],
        sizes: Sizes,
        counts: RoutingCounts | None,
    ) -> None:
        self._memory, self._file, self._plan, self._sizes, self._counts = memory, file, plan, sizes, counts
        self._configs = list(configs)
        # By stage: the device of this process that it is on, and the bytes that it holds of this machine's memory.
        self._devices = [stage.device if is_local(stage) else None for stage in plan.stages]
        self._holds = [
            None if stage.device.remote else (device_of(stage.device.name), stage.total) for stage in plan.stages
        ]

    def replace_stage(self, span: Span, why: RekindleError) -> Stage:
        """The span's stage, loaded here with every slot empty; raises StageLost where no device has the memory."""
        index = [config.span for config in self._configs].index(span)
        self._release(index)
        refusals: list[str] = []
        for device in self._candidates(index):
            needed = moved_bytes(self._plan, self._sizes, index, device)
            if not self._memory.take(device.name, needed):
                free = show_bytes(self._memory.of(device.name))
                refusals.append(f"{device.name} has {free} and {show_bytes(needed)} are needed")
                continue
            log.warning("%s; layers %s move to %s, until the next start", why, span, device.name)
            try:
                stage = self._load(index, device)
            except Exception as error:
                # Logged, not chained: its traceback would keep alive what was loaded so far.
                log.warning("loading layers %s on %s failed", span, device.name, exc_info=error)
                refusals.append(f"loading on {device.name} failed: {error}")
                self._memory.give(device.name, needed)
                continue
            self._devices[index], self._holds[index] = device, (device.name, needed)
            return stage
        raise StageLost(f"{why}; no other device can take layers {span}: {', '.join(refusals)}")

    def _release(self, index: int) -> None:
        """Give back the memory of the lost stage."""
        if (held := self._holds[index]) is not None:
            self._memory.give(*held)
        self._devices[index] = self._holds[index] = None

    def _candidates(self, index: int) -> list[Device]:
        """Devices of this process, those of neighbouring stages first; then its CPU, which every machine has."""
        near = sorted(range(len(self._devices)), key=lambda place: abs(place - index))
        devices = [device for place in near if (device := self._devices[place]) is not None]
        local = [stage.device for stage in self._plan.stages if is_local(stage)]
        cpu = Device("cpu", "cpu", self._plan.machine.ram, host=True)
        return list({device.name: device for device in [*devices, *local, cpu]}.values())

    def _load(self, index: int, device: Device) -> Stage:
        config = replace(self._configs[index], device=device.name)
        if device.is_cpu:
            config = replace(config, hot=None, cache_slots=(), lendable=(), slot_pages=0)
        return load_stage(self._file, config, counts=self._counts)

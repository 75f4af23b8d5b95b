"""What this machine has: devices, and how much of each Rekindle may use."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from rekindle.errors import BadConfig
from rekindle.placement import Device, Machine

RAM_SHARE = 0.75  # of what is available at start; the rest is the user's
VRAM_SHARE = 0.92


def available_ram() -> int:
    """Bytes that can be taken without pushing others out."""
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def device_names(wanted: Sequence[str]) -> list[str]:
    """'auto' is every GPU of this process, or the CPU where there is none."""
    if list(wanted) != ["auto"]:
        repeated = sorted({name for name in wanted if wanted.count(name) > 1})
        if repeated:
            raise BadConfig(f"--devices names {', '.join(repeated)} more than once")
        return list(wanted)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [f"cuda:{i}" for i in range(count)] or ["cpu"]


def make_machine(names: Sequence[str], vram: int | None, ram: int | None) -> Machine:
    """The devices in the order given, with budgets from the device or from the user."""
    ram = ram or int(available_ram() * RAM_SHARE)
    return Machine(tuple(_device(name, vram, ram) for name in names), ram)


def _device(name: str, vram: int | None, ram: int) -> Device:
    if name == "cpu":
        return Device("cpu", "cpu", ram, host=True)
    kind, _, index = name.partition(":")
    if kind not in ("cuda", "hip") or not index.isdigit():
        raise BadConfig(f"--devices: '{name}' is no device; write cpu, cuda:0 or hip:0")
    is_hip = torch.version.hip is not None
    if kind == "hip" and not is_hip:
        raise BadConfig(f"--devices: {name} needs a torch with HIP, this one is {torch.__version__}; run it in a shard")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index) >= count:
        raise BadConfig(f"--devices names {name}, this machine has {count} such devices")
    free, _ = torch.cuda.mem_get_info(int(index))
    return Device(name, kind, vram or int(free * VRAM_SHARE))


def torch_device(name: str) -> torch.device:
    """HIP devices answer to torch's name for them, which is cuda."""
    return torch.device(name.replace("hip", "cuda"))

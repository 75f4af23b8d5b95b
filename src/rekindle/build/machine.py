"""What this machine has: devices, and how much of each Rekindle may use."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rekindle.config import ShardSetting, show_bytes
from rekindle.errors import BadConfig
from rekindle.placement import Device, Machine

RAM_SHARE = 0.75  # of what is available at start; the rest is the user's
VRAM_SHARE = 0.92


def available_ram() -> int:
    """Bytes that can be allocated without swapping, and within the limits of the container."""
    return min([_free_ram(), *cgroup_rooms(Path("/sys/fs/cgroup"), Path("/proc/self/cgroup"))])


def _free_ram() -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def cgroup_rooms(root: Path, membership: Path) -> list[int]:
    """Bytes below every memory limit that this process is under: of its control group and of those around it. Cached
    files that are not in use count as free. Nothing where the system has no such limits (or those of version 1)."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    own = next((line.removeprefix("0::").strip("/") for line in lines if line.startswith("0::")), "")
    folders = [root / own, *(root / own).parents]
    rooms = [_room_of(folder) for folder in folders if folder.is_relative_to(root)]
    return [room for room in rooms if room is not None]


def _room_of(group: Path) -> int | None:
    try:
        limit, used = (group / "memory.max").read_text(), int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None  # the outermost group, or a controller that is off
    return None if limit.strip() == "max" else max(1, int(limit) - used + int(stat.get("inactive_file", 0)))


def device_names(wanted: Sequence[str]) -> list[str]:
    """'auto' is every GPU of this process, or the CPU where there is none."""
    if list(wanted) != ["auto"]:
        repeated = sorted({name for name in wanted if wanted.count(name) > 1})
        if repeated:
            raise BadConfig(f"--devices names {', '.join(repeated)} more than once")
        return list(wanted)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [f"cuda:{i}" for i in range(count)] or ["cpu"]


def make_machine(
    names: Sequence[str],
    vram: Sequence[int] | None,
    ram: int | None,
    shards: Sequence[ShardSetting] = (),
    speeds: Mapping[str, float] | None = None,
) -> Machine:
    """The devices in the order given, with budgets from the device or from the user.

    'cuda:0@lab' is a device of the shard 'lab'. CPU stages of this machine share its RAM: a shard takes what
    --shard-memory gives it, and what is left is divided evenly.
    """
    ram = ram or int(available_ram() * RAM_SHARE)
    by_name = {shard.name: shard for shard in shards}
    _check_shards(names, by_name)
    given_vram = vram_by_name(vram, names)
    homes = [(device_of(name), by_name.get(shard_of(name))) for name in names]
    here = [shard for device, shard in homes if device == "cpu" and (shard is None or not is_elsewhere(shard))]
    given = [shard.memory for shard in here if shard is not None and shard.memory is not None]
    share = max(1, (ram - sum(given)) // max(1, len(here) - len(given)))
    devices = [
        _device(name, device, shard, given_vram.get(name), share, (speeds or {}).get(name, 1.0))
        for name, (device, shard) in zip(names, homes, strict=True)
    ]
    if unused := sorted(by_name.keys() - set(map(shard_of, names))):
        raise BadConfig(f"--shard gives {', '.join(unused)}, --devices puts nothing there; write say cpu@{unused[0]}")
    return Machine(tuple(devices), ram)


def device_of(name: str) -> str:
    """'cuda:0' of 'cuda:0@lab'."""
    return name.partition("@")[0]


def shard_of(name: str) -> str:
    """'lab' of 'cuda:0@lab', '' of a device of this process."""
    return name.partition("@")[2]


def is_elsewhere(shard: ShardSetting) -> bool:
    """On another machine: reached by tcp, and not over loopback."""
    host = shard.endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return shard.endpoint.startswith("tcp://") and host not in ("localhost", "::1") and not host.startswith("127.")


def _check_shards(names: Sequence[str], shards: Mapping[str, ShardSetting]) -> None:
    for name in names:
        if "@" in name and shard_of(name) not in shards:
            known = ", ".join(shards) or "no shard"
            raise BadConfig(f"--devices: '{name}' lies in the shard '{shard_of(name)}', --shard gives {known}")


def vram_by_name(vram: Sequence[int] | None, names: Sequence[str]) -> dict[str, int]:
    """Bytes by GPU: one size is for all of them, several are for one each, in order."""
    if vram is None:
        return {}
    gpus = [name for name in names if device_of(name) != "cpu"]
    if not gpus:
        sizes = ", ".join(map(show_bytes, vram))
        raise BadConfig(f"--vram is {sizes}, but there is no GPU among the devices: {', '.join(names)}")
    if len(vram) not in (1, len(gpus)):
        raise BadConfig(
            f"--vram gives {len(vram)} sizes, the number of GPUs is {len(gpus)}: {', '.join(gpus)}; "
            "give one for each, or one for all"
        )
    return dict(zip(gpus, vram if len(vram) > 1 else [*vram] * len(gpus), strict=True))


def _device(name: str, device: str, shard: ShardSetting | None, vram: int | None, ram: int, speed: float) -> Device:
    kind, _, index = device.partition(":")
    if device != "cpu" and (kind not in ("cuda", "hip") or not index.isdigit()):
        raise BadConfig(f"--devices: '{name}' is no device; write cpu, cuda:0, hip:0, or cuda:0@NAME for a shard's")
    elsewhere = shard is not None and is_elsewhere(shard)
    if shard is not None and shard.memory is not None:
        return Device(name, kind, shard.memory, speed, host=device == "cpu" and not elsewhere, remote=elsewhere)
    if elsewhere:
        raise BadConfig(f"--devices: how much of {name} may be used? Give --shard-memory {shard_of(name)}=16GiB")
    if device == "cpu":
        return Device(name, "cpu", ram, speed, host=True)
    if vram is not None and shard is not None:
        return Device(name, kind, vram, speed)  # perhaps one that only the shard's torch knows
    free = _free_vram(name, kind, int(index))
    return Device(name, kind, free if vram is None else vram, speed)


def _free_vram(name: str, kind: str, index: int) -> int:
    is_hip = torch.version.hip is not None
    if is_hip != (kind == "hip"):
        wants = "HIP" if kind == "hip" else "CUDA"
        help = f"give --shard-memory {shard_of(name)}=16GiB" if "@" in name else "run it in a shard"
        raise BadConfig(f"--devices: {name} needs a torch with {wants}, this one is {torch.__version__}; {help}")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise BadConfig(f"--devices names {name}, this machine has {count} such devices")
    free, _ = torch.cuda.mem_get_info(index)
    return int(free * VRAM_SHARE)


def torch_device(name: str) -> torch.device:
    """HIP devices answer to torch's name for them, which is cuda."""
    return torch.device(device_of(name).replace("hip", "cuda"))

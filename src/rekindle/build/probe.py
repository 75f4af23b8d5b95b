"""How fast the devices of this machine are: a short measurement, kept in the user's cache folder."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from rekindle.build.machine import device_of, is_elsewhere, shard_of, torch_device
from rekindle.config import ShardSetting, user_folder
from rekindle.placement import Rates

SECONDS = 0.15  # of each measurement
ROWS, WIDTH = 256, 2048  # a prefill chunk against a square matrix
COPY_BYTES = 128 << 20  # more than any cache holds
COPY_SHARE, LINK_COPY_SHARE = 0.89, 0.87  # of an H200's nominal speeds that these copies reach


@dataclass(frozen=True, slots=True)
class Probe:
    copy: float  # bytes per second, read and written: what decode waits for
    matrix: float  # floating-point operations per second: what prefill waits for
    link: float = 0.0  # bytes per second from pinned host memory; 0 of a CPU

    @property
    def speed(self) -> float:
        """One number for the split: decode and prefill weigh the same."""
        return (self.copy * self.matrix) ** 0.5


def probe_device(name: str, fresh: bool = False) -> Probe:
    """Of a device of this process: from the cache folder, or measured now."""
    path = _cache_file()
    known = _load(path)
    key = _identity(name)
    if fresh or key not in known or (device_of(name) != "cpu" and not known[key].link):
        known[key] = measure(torch_device(name))
        _save(path, known)
    return known[key]


def measure(device: torch.device) -> Probe:
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    matrix = torch.ones(WIDTH, WIDTH, dtype=dtype, device=device)
    rows = torch.ones(ROWS, WIDTH, dtype=dtype, device=device)
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copies = _rate(lambda: target.copy_(source), device)
    products = _rate(lambda: rows @ matrix, device)
    link = 0.0
    if device.type == "cuda":
        host = torch.ones(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        link = COPY_BYTES * _rate(lambda: target.copy_(host, non_blocking=True), device)
    return Probe(2 * COPY_BYTES * copies, 2 * ROWS * WIDTH * WIDTH * products, link)


def speeds(names: Sequence[str], shards: Sequence[ShardSetting]) -> dict[str, float]:
    """Relative to the fastest, for `--split auto`.

    Devices of another machine, and those that only a shard's torch knows, count as the fastest: give --split for them.
    Where all devices are of one name there is nothing to compare, so nothing is measured.
    """
    away = {shard.name for shard in shards if is_elsewhere(shard)}
    ours = {name: device_of(name) for name in names if shard_of(name) not in away and _is_here(device_of(name))}
    if len(set(ours.values())) < 2:
        return {}
    measured = {device: probe_device(device).speed for device in set(ours.values())}
    fastest = max(measured.values())
    return {name: measured[device] / fastest for name, device in ours.items()}


def rates(names: Sequence[str]) -> dict[str, Rates]:
    """Of the GPUs of this process, as a maker would give them: a copy reaches a part of that."""
    gpus = [name for name in names if device_of(name) != "cpu" and not shard_of(name) and _is_here(device_of(name))]
    found = {name: probe_device(name) for name in gpus}
    return {name: Rates(probe.copy / COPY_SHARE, probe.link / LINK_COPY_SHARE) for name, probe in found.items()}


def _is_here(device: str) -> bool:
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return True
    ours = "hip" if torch.version.hip is not None else "cuda"
    return kind == ours and index.isdigit() and torch.cuda.is_available() and int(index) < torch.cuda.device_count()


def _rate(work: Callable[[], object], device: torch.device) -> float:
    """Runs per second, at best: others may use the machine too."""
    work()  # warms up
    times: list[float] = []
    while len(times) < 3 or sum(times) < SECONDS:
        _wait(device)
        begin = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - begin)
    return 1 / min(times)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _identity(name: str) -> str:
    if name == "cpu":
        return f"cpu of {platform.node()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return f"{name} {torch.cuda.get_device_name(torch_device(name))} of {platform.node()}, torch {torch.__version__}"


def user_link_key() -> Path:
    """The key pair for links between this user's processes over loopback."""
    return user_folder() / "link.key"


def _cache_file() -> Path:
    return user_folder() / "devices.json"


def _load(path: Path) -> dict[str, Probe]:
    """What is there; a file that does not read is measured anew and replaced."""
    try:
        return {name: Probe(**values) for name, values in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _save(path: Path, known: dict[str, Probe]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({name: asdict(each) for name, each in known.items()}, indent=1))
    part.replace(path)

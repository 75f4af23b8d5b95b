"""Settings: read once from the command line, checked, frozen. Inside, a constructor takes the few numbers it needs."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rekindle.errors import BadConfig

_UNITS = {"": 1, "B": 1} | {
    f"{prefix}{suffix}": base**power
    for power, prefix in enumerate("KMGT", start=1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}


def parse_bytes(text: str, setting: str) -> int:
    """'24GiB', '512MB', '1.5G', '4096B' → bytes. G and GiB are 2^30, GB is 10^9. Only 0 needs no unit."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?(?:iB|B)?)", text.strip())
    if match is None or match[2] not in _UNITS:
        raise BadConfig(f"{setting}: '{text}' is not a size; write for instance 24GiB, 512MiB or 4096B")
    count = float(match[1])
    if count and not match[2]:
        raise BadConfig(f"{setting}: '{text}' has no unit; write {text}GiB, {text}MiB or {text}B")
    return int(count * _UNITS[match[2]])


def show_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def user_folder() -> Path:
    """What is made, measured or kept once per user of this machine."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rekindle"


def snapshot_folder() -> Path | None:
    """Where a server keeps snapshots if it is told no folder; None for a user without a home."""
    try:
        return user_folder() / "snapshots"
    except RuntimeError:
        return None


@dataclass(frozen=True, slots=True)
class ShardSetting:
    """A process that hosts stages: started by a command, or running already at an address."""

    name: str
    command: tuple[str, ...] = ()
    endpoint: str = ""
    memory: int | None = None  # bytes that the stages may use of each of its devices
    key: Path | None = None  # the shard's public key


def parse_shards(shards: Sequence[str], memory: Sequence[str], keys: Sequence[str]) -> tuple[ShardSetting, ...]:
    """'NAME=COMMAND', 'NAME=ipc:///path' or 'NAME=tcp://host:port'; with 'NAME=16GiB' and 'NAME=shard.pub'."""
    named = _by_name("--shard", shards)
    sizes = {name: parse_bytes(text, "--shard-memory") for name, text in _by_name("--shard-memory", memory).items()}
    public = {name: Path(text) for name, text in _by_name("--shard-key", keys).items()}
    for option, given in (("--shard-memory", sizes), ("--shard-key", public)):
        if unknown := sorted(given.keys() - named.keys()):
            raise BadConfig(f"{option} names {', '.join(unknown)}; --shard gives {', '.join(named) or 'no shard'}")
    return tuple(
        ShardSetting(name, (), text, sizes.get(name), public.get(name))
        if text.startswith(("ipc://", "tcp://"))
        else ShardSetting(name, tuple(shlex.split(text)), "", sizes.get(name), public.get(name))
        for name, text in named.items()
    )


def printable(text: str, keep: str = "") -> str:
    """Text from a file or a client, made harmless on a terminal: characters that do not print (escape sequences, line
    ends, marks that turn the direction of writing) are spelt out, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text)


def _by_name(option: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    for text, (name, _, value) in zip(texts, pairs, strict=True):
        if not re.fullmatch(r"[\w.-]+", name) or not value.strip():
            raise BadConfig(f"{option}: '{text}' is not NAME=VALUE")
    if len({name for name, _, _ in pairs}) < len(pairs):
        raise BadConfig(f"{option} gives a name twice: {', '.join(name for name, _, _ in pairs)}")
    return {name: value.strip() for name, _, value in pairs}


@dataclass(frozen=True, slots=True)
class Config:
    """The options of a model that runs. None: the plan decides, and says why."""

    model: Path | None = None  # None is the embedded default
    devices: tuple[str, ...] = ("auto",)
    split: str = "auto"
    context: int | None = None
    sequences: int | None = None  # that run at once; None: by the memory
    grid: int | None = None  # prefill chunk; 512 on a CPU, 2048 or 4096 on a GPU
    max_gap: int | None = None  # milliseconds between tokens while others' prompts run; None: what costs little
    queue: int = 256
    dtype: str | None = None  # of activations: float32 or bfloat16
    kv_type: str | None = None
    kv_mode: str = "exact"  # sparse: attention leaves pages out once a sequence outgrows the pool
    kv_policy: str = "qk"  # which pages sparse mode attends: the likeliest to matter, or the latest (lru)
    pool: int | None = None  # tokens of KV on every device, at most
    # KV that outgrows the pool gets the memory of the coldest experts, until it ends; None: where that can be
    live_memory: bool | None = None
    vram: tuple[int, ...] | None = None  # bytes that may be used of each GPU, or of every one
    ram: int | None = None  # bytes of host memory that may be used
    cache_ram: int | None = None  # bytes of RAM for snapshots
    cache_dir: Path | None = None  # snapshots across restarts; None keeps none, whatever else is left out
    cache_disk: int | None = None  # bytes of that folder; None: by what is free on its disk
    threads: int | None = None
    shards: tuple[ShardSetting, ...] = ()  # --devices names them after an @
    link_key: Path | None = None  # this head's key pair, for links that leave the host
    ray: str | None = None  # address of a Ray cluster, whose nodes host all stages
    replicas: int = 1  # whole models among which the devices are divided
    audit: int = 0  # every n-th restore is checked against a cold run; 0 checks none
    draft: str = "auto"  # what proposes tokens for the model to verify: lookup, dflash, mtp, off, or what there is
    drafter: Path | None = None  # a DFlash drafter's file or folder, or a companion file with the model's MTP block

    def __post_init__(self) -> None:
        for name, value, least in (
            ("--sequences", self.sequences, 1),
            ("--grid", self.grid, 16),
            ("--max-gap", self.max_gap, 1),
            ("--queue", self.queue, 1),
            ("--context", self.context, 2),
            ("--threads", self.threads, 1),
            ("--audit", self.audit, 0),
            ("--replicas", self.replicas, 1),
        ):
            if value is not None and value < least:
                raise BadConfig(f"{name} is {value}; it must be at least {least}")
        if self.draft not in ("auto", "lookup", "dflash", "mtp", "off"):
            raise BadConfig(f"--draft is {self.draft}; it must be auto, lookup, dflash, mtp or off")
        if self.drafter is not None and self.draft in ("lookup", "off"):
            raise BadConfig(f"--drafter is {self.drafter}, and --draft {self.draft} leaves it unused; leave one out")
        if self.drafter is None and self.draft == "dflash":
            raise BadConfig("--draft dflash needs a drafter: --drafter FILE")

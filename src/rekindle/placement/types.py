"""What placement reads and what it answers. Bytes are ints, tokens are tokens, pages are PAGE tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rekindle.errors import BadConfig
from rekindle.spec import PAGE, ModelSpec, SnapshotBytes, Span, snapshot_bytes
from rekindle.spec.attention import KV_TYPES

KINDS = ("cuda", "hip", "cpu")
KV_MODES = ("exact", "sparse")
KV_POLICIES = ("qk", "lru")

# Page tables have room for this many tokens per slot whatever the limit, so that a higher limit costs nothing.
LONGEST_CONTEXT = 1 << 20

SNAPSHOTS = "snapshots in RAM"  # an item that the runtime reads back …
KEPT = "copies of kept slots"  # … and so is this
CAPTURES = "captures in flight"


@dataclass(frozen=True, slots=True)
class Rates:
    """How fast bytes come, in bytes per second."""

    memory: float  # from the device's own memory, nominally
    link: float  # from host memory, nominally


@dataclass(frozen=True, slots=True)
class Device:
    """Something that can hold a stage. `budget` is what Rekindle may use of it in all."""

    name: str
    kind: str  # cuda, hip or cpu
    budget: int  # bytes
    speed: float = 1.0  # relative to the other devices
    host: bool = False  # its memory is the machine's RAM: every CPU, and GPUs with unified memory
    remote: bool = False  # it belongs to another machine, and so does the RAM beside it
    rates: Rates | None = None  # None: not known, and then no speed is foretold

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise BadConfig(f"device {self.name} is of kind {self.kind!r}, known kinds are {', '.join(KINDS)}")
        if self.budget <= 0:
            raise BadConfig(f"device {self.name} has a budget of {self.budget} bytes, it needs more than 0")
        if not (math.isfinite(self.speed) and self.speed > 0):
            raise BadConfig(f"device {self.name} has speed {self.speed}, it must be a finite number above 0")
        if self.kind == "cpu" and not self.host and not self.remote:
            raise BadConfig(f"device {self.name} is a CPU, so its memory is host memory, but host is False")

    @property
    def is_cpu(self) -> bool:
        return self.kind == "cpu"


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices in pipeline order, and the RAM that Rekindle may use (host devices draw from it too)."""

    devices: tuple[Device, ...]
    ram: int

    def __post_init__(self) -> None:
        if not self.devices:
            raise BadConfig("the machine has 0 devices, a plan needs at least 1")
        names = [device.name for device in self.devices]
        if len(set(names)) != len(names):
            raise BadConfig(f"two devices share a name: {', '.join(names)}")
        if self.ram <= 0:
            raise BadConfig(f"the machine has {self.ram} bytes of RAM, it needs more than 0")


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """Bytes of one layer as the file stores them."""

    mixer: int  # attention or DeltaNet, with the layer's norms
    dense: int = 0  # dense feed-forward
    shared: int = 0  # router and shared expert
    expert: int = 0  # ONE routed expert
    experts: int = 0  # how many of them

    @property
    def total(self) -> int:
        return self.mixer + self.dense + self.shared + self.expert * self.experts


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the model weighs: on a GPU, and on a CPU where that is something else."""

    embedding: int
    head: int  # the output matrix as loaded; a tied model loads the embedding a second time unless …
    norms: int  # final norm, and all else outside the layers
    layers: tuple[LayerSizes, ...]
    widest: int  # values of the most that is expanded at once; 0 where nothing is quantised
    on_cpu: Sizes | None = None  # in lanes there, or as values; None: the same
    head_embeds: bool = False  # … a stage that has it as head looks tokens up in that

    def on(self, device: Device) -> Sizes:
        return self.on_cpu if device.is_cpu and self.on_cpu is not None else self

    def embedding_of(self, first: bool, last: bool) -> int:
        """What a stage holds to look tokens up, beside its head."""
        return self.embedding if first and not (last and self.head_embeds) else 0

    @property
    def experts(self) -> int:
        return sum(layer.experts for layer in self.layers)

    @property
    def expert_bytes(self) -> int:
        return sum(layer.expert * layer.experts for layer in self.layers)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asks for. None is 'auto'."""

    context: int  # tokens one sequence may reach
    sequences: int = 1  # slots
    kv_type: str = "bf16"
    pool: int | None = None  # tokens of KV on every device
    lends: bool = False  # KV that outgrows the pool gets the slots of the coldest experts …
    lends_slots: bool = False  # … and the memory of slots in which no sequence lives
    drafter_bytes: int = 0  # the drafter's weights and its own state, where it lives beside the head …
    drafter_ram: int = 0  # … and where it lives in the RAM of this process, since the head is in another
    taps: tuple[int, ...] = ()  # layers whose outputs it reads, wherever they lie
    drafter_context: int = 0  # bytes of its state of one sequence at most, a part of every snapshot
    split: tuple[float, ...] | None = None  # ints are layer counts, floats are weights
    expert_cache_share: float = 1 / 16  # of a layer's experts, as spare slots that follow the routing
    counts: Sequence[Sequence[float]] | None = None  # routing counts [layer][expert]
    kv_mode: str = "exact"
    kv_policy: str = "qk"  # which pages sparse mode attends
    rewind_rows: int = 0  # rows of a block that rewind may go back into
    compute_bytes: int = 2  # of one activation value
    chunk: int = 512  # tokens of one prefill forward
    cache_ram: int | None = 0  # bytes of RAM for snapshots

    def __post_init__(self) -> None:
        _check_range("context", self.context, 1, LONGEST_CONTEXT)
        _check_range("sequences", self.sequences, 1, 1024)
        _check_range("rewind_rows", self.rewind_rows, 0, 64)
        _check_range("chunk", self.chunk, 1, 65536)
        _check_range("drafter_bytes", self.drafter_bytes, 0, 1 << 50)
        _check_range("drafter_ram", self.drafter_ram, 0, 1 << 50)
        _check_range("drafter_context", self.drafter_context, 0, 1 << 50)
        _check_range("cache_ram", self.cache_ram or 0, 0, 1 << 50)
        if self.pool is not None:
            _check_range("pool", self.pool, PAGE, LONGEST_CONTEXT * 1024)
        if self.kv_type not in KV_TYPES:
            raise BadConfig(f"--kv-type is {self.kv_type!r}, known types are {', '.join(KV_TYPES)}")
        if self.kv_mode not in KV_MODES:
            raise BadConfig(f"--kv-mode is {self.kv_mode!r}, known modes are {', '.join(KV_MODES)}")
        if self.kv_policy not in KV_POLICIES:
            raise BadConfig(f"--kv-policy is {self.kv_policy!r}, known policies are {', '.join(KV_POLICIES)}")
        if self.compute_bytes not in (2, 4):
            raise BadConfig(f"compute_bytes is {self.compute_bytes}, activations are 2 or 4 bytes wide")
        if not 0 <= self.expert_cache_share <= 1:  # refuses NaN too
            raise BadConfig(f"expert_cache_share is {self.expert_cache_share}, it must lie between 0 and 1")

    def snapshot_bytes(self, spec: ModelSpec) -> SnapshotBytes:
        return snapshot_bytes(spec, self.kv_type, self.drafter_context)

    def tapped(self, span: Span) -> int:
        """Layers of the span that a drafter reads."""
        return sum(layer in span for layer in self.taps)

    @property
    def full_pages(self) -> int:
        """Pages that hold every sequence at the context limit."""
        return self.sequences * pages_for(self.context)

    @property
    def power_of_two_pool(self) -> bool:
        """What a sparse run leaves out depends on its pool, and so do its snapshots: the next start needs the same."""
        return self.kv_mode == "sparse" and self.pool is None


@dataclass(frozen=True, slots=True)
class Item:
    """A named number of bytes."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What one device holds. The runtime reads these numbers and computes none of them again."""

    device: Device
    span: Span
    items: tuple[Item, ...]
    hot: tuple[tuple[int, ...], ...]  # expert ids per layer of the span, most used first; empty for dense layers
    expert_cache_slots: tuple[int, ...]  # spare expert slots per layer of the span
    cold: int  # experts of the span that live in RAM
    slots: int
    pool_pages: int
    full_pages: int  # what every sequence at the context limit would take
    host_pages: int  # pages that RAM may hold for this stage
    page_bytes: int  # one page in all attention layers of the span
    slabs: int  # of pinned RAM that wait for captures; a CPU has no use for them
    lendable: tuple[int, ...] = ()  # per layer of the span: of the hot experts the last ones, whose slots KV may get
    slot_pages: int = 0  # that the state of a slot has room for while no sequence lives there; 0: it is not lent

    @property
    def total(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def left(self) -> int:
        return self.device.budget - self.total

    @property
    def pool_tokens(self) -> int:
        return self.pool_pages * PAGE

    def pages_beside(self, sequences: int) -> int:
        """Of the pool while so many sequences run: the slots of the others hold some."""
        return self.pool_pages + max(0, self.slots - sequences) * self.slot_pages

    @property
    def pool_may_fill(self) -> bool:
        """Whether a sequence may find the pool full before it reaches the context limit."""
        return self.pool_pages < self.full_pages

    @property
    def hot_count(self) -> int:
        """With an empty context: KV may get the slots of some."""
        return sum(map(len, self.hot))

    def bytes_of(self, name: str) -> int:
        return sum(item.bytes for item in self.items if item.name == name)


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another wish or another machine close to the one asked for."""

    name: str
    changes: str  # one sentence


@dataclass(frozen=True, slots=True)
class ExpectedSpeed:
    """Decode with `sequences` sequences of `context` tokens each."""

    context: int
    sequences: int
    tokens_per_second: float  # of all sequences together
    kv_tokens_on_device: int
    link_bytes: int  # per step: KV beyond the pool, and cold experts
    hot: int  # experts that are on the device for good: fewer where KV has got the slots of some


@dataclass(frozen=True, slots=True)
class Plan:
    """The outcome of placement."""

    spec: ModelSpec
    machine: Machine
    wishes: Wishes
    stages: tuple[StagePlan, ...]
    host_items: tuple[Item, ...]
    live_pages: int  # pages all sequences together may hold, on the devices and in RAM
    reasons: tuple[str, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    # By context: of one sequence, and of several, None where those would not fit.
    expected: tuple[tuple[ExpectedSpeed, ExpectedSpeed | None], ...] = ()

    def stage(self, index: int) -> StagePlan:
        return self.stages[index]

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple(stage.span for stage in self.stages)

    @property
    def hot(self) -> int:
        return sum(stage.hot_count for stage in self.stages)

    @property
    def cold(self) -> int:
        return sum(stage.cold for stage in self.stages)

    @property
    def pool_pages(self) -> int:
        """Pages that every stage has: the pool of the pipeline as a whole."""
        return min(stage.pool_pages for stage in self.stages)

    def pages_beside(self, sequences: int) -> int:
        """The same while so many sequences run."""
        return min(stage.pages_beside(sequences) for stage in self.stages)

    @property
    def pool_may_fill(self) -> bool:
        return any(stage.pool_may_fill for stage in self.stages)

    @property
    def lends_everywhere(self) -> bool:
        """Whether KV can grow on every GPU that has cold experts: a small pool which cannot would be read over PCIe."""
        lends = [bool(stage.lendable) for stage in self.stages if stage.cold and not stage.device.host]
        return bool(lends) and all(lends)

    @property
    def host_total(self) -> int:
        return sum(item.bytes for item in self.host_items)

    @property
    def snapshot_bytes(self) -> SnapshotBytes:
        """What snapshots take in a tier, whatever the split."""
        return self.wishes.snapshot_bytes(self.spec)

    @property
    def snapshot_ram(self) -> int:
        """RAM that the snapshots may take: what was asked for, or what there is."""
        return self._host_bytes(SNAPSHOTS)

    @property
    def kept_ram(self) -> int:
        """RAM for pages that kept slots hold on the devices, and whose snapshots may have left the RAM tier."""
        return self._host_bytes(KEPT)

    def _host_bytes(self, name: str) -> int:
        return sum(item.bytes for item in self.host_items if item.name == name)

    @property
    def host_left(self) -> int:
        """RAM for the rest of the machine."""
        return self.machine.ram - self.host_total

    def left_of(self, stage: StagePlan) -> int:
        """What its device has left; of one that lives in RAM others have taken a part."""
        return min(stage.left, self.host_left) if stage.device.host else stage.left


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


def _check_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise BadConfig(f"{name} is {value:,}, it must lie between {least:,} and {most:,}")

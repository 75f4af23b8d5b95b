"""A kind of mixer and a family that the tree does not know, written here alone: every law that holds for the others
holds for them.

It adds up the hidden rows: h -> W · (the sum so far), so its state is one row per slot.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from rekindle.batch import Batch, Segment, Wanted
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.types import Failed, Finished, Request, Sampling, Token
from rekindle.errors import SnapshotMismatch
from rekindle.kernels.matmul import Matrix, multiply
from rekindle.kernels.ragged import Ragged
from rekindle.layers import MixerBlock, PagedKv, SlotMemory, SlotState, load_span, register_mixer
from rekindle.layers.base import Tensors
from rekindle.models.base import Family
from rekindle.models.keys import KeysSeen, MetadataKeys
from rekindle.models.readers import read_attention, read_dense_ffn, read_model
from rekindle.models.registry import register
from rekindle.placement import Device, LayerSizes, Machine, Sizes, Wishes, make_plan
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.prompt import Prompt
from rekindle.shards import Deadlines, RemoteStage, ShardServer, Terms
from rekindle.snapshots.disk import DiskStore
from rekindle.snapshots.types import Part
from rekindle.spec import Bytes, MixerSpec, ModelSpec, Shapes, Span
from rekindle.stages import LocalStage, Pipeline
from rekindle.weights import TensorInfo

# The kind: a spec without torch, a state and a block


@dataclass(frozen=True, slots=True)
class SumSpec(MixerSpec):
    kind: ClassVar[str] = "running sum"

    width: int

    def tensors(self, hidden: int) -> Shapes:
        return {"sum_out.weight": (hidden, self.width)}

    @property
    def row_values(self) -> int:
        return 2 * self.width

    def slot_bytes(self) -> Bytes:
        return {"running sums": 4 * self.width}

    def rewind_bytes(self, rows: int, value_bytes: int = 4) -> int:
        return 4 * rows * self.width


class SumState(SlotState):
    logs_rows: ClassVar[bool] = True

    def __init__(self, spec: SumSpec, slots: SlotMemory) -> None:
        self.sums = slots.zeros(spec.width)
        self.rows = torch.zeros(slots.slots + 1, 0, spec.width, device=slots.device)
        super().__init__({"sum": self.sums})

    def make_room(self, rows: int, dtype: torch.dtype) -> None:
        self.rows = pad(self.rows, (0, 0, 0, rows - self.rows.shape[1]))

    def rewind(self, where: Tensor) -> None:
        slot, count = where[:1], where[1]
        total = self.sums.index_select(0, slot)
        for i, row in enumerate(self.rows.index_select(0, slot).unbind(1)):
            total = torch.where(i < count, total + row, total)
        self.sums.index_copy_(0, slot.long(), total)


@register_mixer(SumSpec.kind)
@dataclass(frozen=True, slots=True)
class SumBlock(MixerBlock[SumSpec, SumState]):
    out: Matrix

    @classmethod
    def load(cls, tensors: Tensors, spec: SumSpec, eps: float) -> SumBlock:
        return cls(tensors.matrix("sum_out.weight"))

    @classmethod
    def new_state(cls, spec: SumSpec, layer: int, slots: SlotMemory, paged: PagedKv) -> SumState:
        return SumState(spec, slots)

    def forward(self, h: Tensor, rows: Ragged, state: SumState) -> Tensor:
        sums = torch.empty_like(h)
        for _, slot, segment in rows.walk():
            total = state.sums[slot]
            if rows.rewindable:  # pending: the sum stays as it is until it is known how many rows do
                total = total.clone()
                state.rows[slot, : segment.stop - segment.start] = h[segment]
            for i in range(segment.start, segment.stop):  # row after row: the same bits whatever the chunks are
                total += h[i]
                sums[i] = total
        return multiply(sums, self.out)


# A family with that kind, and a model of it


def read_sums(keys: MetadataKeys, seen: KeysSeen) -> ModelSpec:
    return read_model(keys, seen, sum_mixers, read_dense_ffn)


def sum_mixers(keys: MetadataKeys, seen: KeysSeen, layers: int) -> tuple[MixerSpec, ...]:
    """Attention is a layer of the first half alone: the other stage of a split has no pages."""
    sums = SumSpec(keys.count("embedding_length"))
    return tuple(read_attention(keys, seen, qk_norm=False) if layer == 1 else sums for layer in range(layers))


FAMILY = Family(architectures=("sums",), read=read_sums, ffn_norm="sum_norm.weight")
register(FAMILY)

METADATA = {
    "sums.block_count": 4,
    "sums.embedding_length": 32,
    "sums.feed_forward_length": 48,
    "sums.context_length": 1024,
    "sums.attention.head_count": 2,
    "sums.attention.head_count_kv": 1,
    "sums.attention.layer_norm_rms_epsilon": 1e-6,
}


def sum_model() -> ModelSpec:
    seen = KeysSeen(tensors=99, vocab=40, tokens=40, tied=False, rope_factors=None)
    return FAMILY.read(MetadataKeys(Path("sums"), METADATA, "sums"), seen)


class PaperFile:
    """Random weights that no file holds."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        norm = (spec.hidden,)
        shapes: Shapes = {"token_embd.weight": (spec.vocab, spec.hidden), "output.weight": (spec.vocab, spec.hidden)}
        for i, mixer in enumerate(spec.mixers):
            layer: Shapes = {"attn_norm.weight": norm, FAMILY.ffn_norm: norm}
            layer |= mixer.tensors(spec.hidden) | spec.ffn.tensors(spec.hidden)
            shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
        shapes["output_norm.weight"] = norm
        random = np.random.default_rng(5)
        self._values = {
            name: random.normal(1.0 if len(shape) == 1 else 0.0, 0.2, shape).astype(np.float32)
            for name, shape in shapes.items()
        }
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(name, value.shape, "F32", value.nbytes) for name, value in self._values.items()
        }

    def values(self, name: str) -> np.ndarray:
        return self._values[name]

    def raw(self, name: str) -> np.ndarray:
        return self._values[name].view(np.uint8)

    unread = raw


def stage(span: Span | None = None, slots: int = 3, pages: int = 32, **options: Any) -> LocalStage:
    file: Any = PaperFile(sum_model())
    model = load_span(file, span or file.spec.whole, torch.device("cpu"), torch.float32)
    return LocalStage(model, slots, pages, "f32", **options)


# The laws

TOKENS = np.random.default_rng(6).integers(0, 40, 300).tolist()


def feed(pipeline: Pipeline, slot: int, start: int, stop: int, rewindable: bool = False) -> Tensor:
    batch = Batch((Segment(slot, start, tuple(TOKENS[start:stop]), Wanted.ALL),), rewindable)
    logits = pipeline.forward(batch).result().logits
    assert logits is not None
    return logits


def tensors(parts: tuple[Part, ...]) -> list[Tensor]:
    return [tensor for part in parts for tensor in (*(page.data for page in part.pages), *part.tensors.values())]


def same(a: tuple[Part, ...], b: tuple[Part, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(tensors(a), tensors(b), strict=True))


@pytest.fixture(params=["one stage", "split", "remote"])
def pipeline(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pipeline]:
    front, back = Span(0, 2), Span(2, 4)
    if request.param == "one stage":
        yield Pipeline([stage()])
        return
    if request.param == "split":
        split = Pipeline([stage(front), stage(back)])
        yield split
        split.stop()
        return
    terms = Terms("sums", back, "float32", "float32", slots=3)
    shard = ShardServer(
        {"back": stage(back)}, f"ipc://{tmp_path}/shard", fingerprint="sums", hidden_dtype="float32", kv_dtype="float32"
    )
    shard.start()
    deadlines = Deadlines(connect=20, call=20, ping=0.1, silence=10)
    remote = Pipeline([stage(front), RemoteStage(shard.endpoint, "back", terms, deadlines=deadlines)])
    yield remote
    remote.stop()
    shard.stop()


def test_a_restored_slot_equals_the_run_that_never_stopped(pipeline: Pipeline) -> None:
    pipeline.open(0)
    whole = Pipeline([stage()])
    whole.open(0)
    assert torch.equal(feed(pipeline, 0, 0, 100), feed(whole, 0, 0, 100))
    parts = pipeline.capture(0).result()
    assert [list(part.tensors) for part in parts] == [["sum"], ["tail"], ["sum"], ["sum"]]
    pipeline.open(2)
    pipeline.restore(2, 100, parts)
    assert same(pipeline.capture(2).result(), parts)
    never_stopped = feed(whole, 0, 100, 160)
    assert torch.equal(feed(pipeline, 0, 100, 160), never_stopped)
    assert torch.equal(feed(pipeline, 2, 100, 160), never_stopped)
    assert same(pipeline.capture(2).result(), whole.capture(0).result())


def test_a_closed_slot_keeps_nothing(pipeline: Pipeline) -> None:
    pipeline.open(0)
    first = feed(pipeline, 0, 0, 70)
    pipeline.close(0)
    pipeline.open(0)
    assert torch.equal(feed(pipeline, 0, 0, 70), first)


@pytest.mark.parametrize("keep", [0, 1, 5, 8])
def test_a_rewound_slot_equals_one_that_never_ran_the_rejected_rows(pipeline: Pipeline, keep: int) -> None:
    for slot in (0, 1):
        pipeline.open(slot)
        feed(pipeline, slot, 0, 60)
    feed(pipeline, 0, 60, 68, rewindable=True)
    pipeline.rewind(0, 60 + keep)
    if keep:
        feed(pipeline, 1, 60, 60 + keep, rewindable=True)
    assert same(pipeline.capture(0).result(), pipeline.capture(1).result())
    assert torch.equal(feed(pipeline, 0, 60 + keep, 90), feed(pipeline, 1, 60 + keep, 90))


def test_a_rewind_is_recorded_like_any_step() -> None:
    recorded = list[Any]()

    def record(step: Any, warm: Any = None) -> Any:
        recorded.append(step)
        return step

    ours, plain = Pipeline([stage(record=record)]), Pipeline([stage()])
    for each in (ours, plain):
        each.open(0)
        feed(each, 0, 0, 60)
        feed(each, 0, 60, 64, rewindable=True)
        each.rewind(0, 62)
    assert len(recorded) == 2, "the block and the rewind"
    assert same(ours.capture(0).result(), plain.capture(0).result())


def test_a_part_of_another_shape_or_name_is_refused_with_both_sides() -> None:
    holder = stage(Span(2, 4))
    parts = holder.capture(0)
    for wrong in ({"sum": torch.zeros(31)}, {"total": torch.zeros(32)}, {"sum": torch.zeros(32).half()}, {}):
        with pytest.raises(
            SnapshotMismatch, match=r"layer 3: the snapshot has .*, the stage sum \(32,\) torch.float32"
        ):
            holder.restore(1, 0, [parts[0], Part(3, wrong)])


def ask(engine: Engine, tokens: tuple[int, ...]) -> tuple[list[int], Finished]:
    events, done = list[Any](), threading.Event()

    def take(event: Any) -> None:
        events.append(event)
        if isinstance(event, Finished | Failed):
            done.set()

    engine.submit(
        Request("r", Prompt(tokens), Sampling(temperature=0), max_tokens=6, stop_tokens=frozenset(), sink=take)
    )
    assert done.wait(60)
    assert isinstance(events[-1], Finished), events[-1]
    return [event.token for event in events if isinstance(event, Token)], events[-1]


def test_a_restart_from_disk_answers_the_same_and_its_audit_finds_no_fault(tmp_path: Path) -> None:
    def engine() -> Engine:
        disk = DiskStore(tmp_path, "5" * 64, 1 << 28)
        settings = EngineSettings(context=512, grid=64, audit=1)
        return Engine(
            Pipeline([stage(Span(0, 2)), stage(Span(2, 4))]), PrefixCache(local_tiers(1 << 28, disk)), settings
        ).start()

    first = engine()
    cold, finished = ask(first, tuple(TOKENS[:150]))
    assert finished.cache.restored == 0
    first.stop()
    second = engine()
    hit, finished = ask(second, tuple(TOKENS[:150]))
    assert (hit, finished.cache.restored) == (cold, 150)
    end = threading.Event()
    for _ in range(600):
        if second.status().audits:
            break
        end.wait(0.05)
    assert (second.status().audits, second.status().audit_mismatches) == (1, 0)
    second.stop()


def test_the_plan_counts_its_bytes() -> None:
    layer = LayerSizes(mixer=4096, dense=8192)
    machine = Machine((Device("gpu", "cuda", 1 << 30, 1.0),), 1 << 34)
    wishes = Wishes(context=512, sequences=2, rewind_rows=8)
    plan = make_plan(machine, sum_model(), Sizes(4096, 4096, 128, (layer,) * 4, widest=1000), wishes)
    counted = {item.name: item.bytes for stage in plan.stages for item in stage.items}
    sums, slots, row = 3, 2, 4 * 32
    assert counted["running sums"] == sums * slots * row
    assert counted["rewind rows"] == sums * (slots + 1) * 8 * row

"""A drafter with what it keeps of every slot: K and V of the positions before the next block.

Features of a position become K and V once, when they are needed. Until then they wait: those of a block that is being
verified may be gone back over, and single rows are cheaper together. Every layer keeps the positions that its window
reaches, in a ring; a layer that sees all of the context keeps as many as FULL. A block never reads further back.

The state is a part of every snapshot, under a number of its own instead of a layer's. It says whose it is: another
drafter's is left alone, and this one begins to read at the snapshot's position.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rekindle.batch import Ask, Batch, Segment
from rekindle.errors import SnapshotMismatch
from rekindle.kernels.draft import ring_rows
from rekindle.snapshots.types import DRAFTER_LAYER, Part, Ready, wait_for
from rekindle.speculative.dflash import Dflash, DraftBlocks, Keys
from rekindle.speculative.recorded import RecordedPass, Recorder, UnseenBlock

IDENTITY = "identity"  # tensor of the part: whose context it is, uint8
FULL = 4096  # positions that a layer without a window keeps
WAITING = 64  # rows of features that wait at most before they become K and V
SETTLED = (WAITING + 16, 129, 2048)  # rows of chunks: on both sides of where some kernel takes another form
KV_TYPE = torch.bfloat16


Shaped = dict[str, tuple[tuple[int, ...], torch.dtype]]  # by the name of a tensor


class PendingFeatures(Protocol):
    """Tokens of a batch that are on the device only: row rows[i] has tokens[sources[i]]."""

    @property
    def tokens(self) -> Tensor: ...
    @property
    def rows(self) -> tuple[int, ...]: ...
    @property
    def sources(self) -> tuple[int, ...]: ...


class CopiedTensors(Protocol):
    """Copies on the device, that begin their way to the host when they are asked for."""

    @property
    def ready(self) -> Ready | None: ...
    def to_host(self) -> list[Tensor]: ...


class CopiesToHost(Protocol):
    """A stage's copies to host memory, which nobody waits for."""

    def copy_live(self, tensors: Sequence[Tensor]) -> CopiedTensors: ...


class ContextSpec(Protocol):
    """What the context of a drafter hangs on."""

    @property
    def taps(self) -> tuple[int, ...]: ...
    @property
    def windows(self) -> tuple[int | None, ...]: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def block(self) -> int: ...


def layers_read(spec: ContextSpec) -> tuple[int, ...]:
    """The target's, ascending; a drafter may read one twice, and in another order."""
    return tuple(sorted(set(spec.taps)))


def reach_of(spec: ContextSpec, layer: int, context: int) -> int:
    """Positions that a layer keeps; context: of the longest sequence."""
    window = spec.windows[layer]
    return min(context, FULL if window is None else window - 1)


def context_bytes(spec: ContextSpec, context: int) -> int:
    """K and V of one sequence of so many tokens."""
    kept = sum(reach_of(spec, layer, context) for layer in range(len(spec.windows)))
    return kept * 2 * spec.kv_heads * spec.head_dim * KV_TYPE.itemsize


@dataclass(slots=True)
class Known:
    """What is known of one slot: positions [start, settled) as K and V, those behind as features that wait."""

    position: int = 0  # where the target stands
    start: int = 0
    settled: int = 0
    waiting: list[tuple[Tensor, ...]] = field(default_factory=list)  # of every tap [rows, hidden]
    waiting_rows: int = 0  # of all of them

    @property
    def stop(self) -> int:
        return self.settled + self.waiting_rows

    def begin(self, position: int) -> None:
        """Nothing is known of what stands before `position`."""
        self.settle()
        self.start = self.settled = position

    def wait(self, rows: tuple[Tensor, ...]) -> None:
        self.waiting.append(rows)
        self.waiting_rows += len(rows[0])

    def settle(self) -> None:
        """What waited has become K and V."""
        self.settled += self.waiting_rows
        self.waiting.clear()
        self.waiting_rows = 0

    def cut(self, position: int) -> None:
        """Features from `position` on are forgotten."""
        assert self.settled <= position <= self.stop, (
            f"features of [{self.settled}, {self.stop}) wait, {position} is not there"
        )
        more = self.stop - position
        while more > 0:
            rows = self.waiting.pop()
            count = len(rows[0])
            if count > more:
                self.waiting.append(tuple(tap[: count - more] for tap in rows))
            self.waiting_rows -= min(count, more)
            more -= count


class RingContext(ABC):
    """Of all slots; the drafter as the pipeline knows it. What a position's rows are, and how blocks are drafted, is
    the drafter's own."""

    chained = False  # a drafted token costs a pass of its own
    drafts_ahead = False  # drafted tokens may stay on the device

    def __init__(
        self,
        spec: ContextSpec,
        device: torch.device,
        identity: str,
        slots: int,
        context: int,
        kv_type: torch.dtype,
        copies: CopiesToHost | None = None,
        spare_slots: int = 0,
    ) -> None:
        """identity: the fingerprint of the drafter's file. context: positions of the longest sequence. copies: of the
        stage on the same GPU; without them a capture waits for its own. spare_slots: whose rings no sequence has."""
        self.taps = layers_read(spec)
        self.longest = spec.block - 1
        self._device = device
        self._copies = copies
        self._identity = torch.from_numpy(np.frombuffer(f"{identity} {kv_type}".encode(), dtype=np.uint8).copy())
        self._caps = [reach_of(spec, layer, context) for layer in range(len(spec.windows))]
        shapes = [(slots + spare_slots, 2, cap, spec.kv_heads, spec.head_dim) for cap in self._caps]
        self._rings = [torch.zeros(shape, dtype=kv_type, device=device) for shape in shapes]
        self._known = [Known() for _ in range(slots)]
        # A slot's capture stands in line, and the engine may ask for its next block meanwhile: both settle features.
        self._settling = threading.RLock()
        self._prepared: dict[int, tuple[int, Part | None]] = {}  # by slot: position, and the part to be restored

    @property
    def reach(self) -> int:
        return max(self._caps)

    def context(self, slot: int) -> range:
        known = self._known[slot]
        return range(known.start, known.stop)

    # The drafter's own

    @abstractmethod
    def _read_rows(
        self, batch: Batch, features: Sequence[Tensor], pending: PendingFeatures | None
    ) -> Iterator[tuple[Segment, int, tuple[Tensor, ...]]]:
        """What is kept of the batch's positions: of each segment with features the first position, and its rows."""

    @abstractmethod
    def _keys_of(self, rows: Sequence[Tensor], positions: Tensor) -> list[Keys]:
        """K and V of every layer."""

    @abstractmethod
    def _draft(self, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        """Blocks of slots whose context is settled."""

    def _beside(self, slot: int) -> dict[str, Tensor]:
        """What a part holds beside K and V …"""
        return {}

    def _shapes_beside(self) -> Shaped:
        """… and how it looks."""
        return {}

    # Reading

    def read(self, batch: Batch, features: Sequence[Tensor], pending: PendingFeatures | None = None) -> None:
        for segment in batch.segments:
            self._known[segment.slot].position = segment.end
        with self._settling:
            for segment, position, rows in self._read_rows(batch, features, pending):
                self._take(segment.slot, position, rows)
                if not batch.rewindable and segment.features >= WAITING:
                    self._settle([segment.slot])

    def _take(self, slot: int, position: int, rows: tuple[Tensor, ...]) -> None:
        """Features of consecutive positions; with a gap before them the context begins anew."""
        known = self._known[slot]
        if known.stop != position:
            known.begin(position)
        elif known.waiting_rows >= WAITING:
            self._settle([slot])
        known.wait(rows)

    def _settle(self, slots: Sequence[int]) -> None:
        """Features that wait become K and V, those of all slots together. Whoever settles holds the lock."""
        slots = [slot for slot in slots if self._known[slot].waiting]
        if not slots:
            return
        rows = [rows for slot in slots for rows in self._known[slot].waiting]
        taps = [torch.cat(tap) for tap in zip(*rows, strict=True)]
        spans = [(self._known[slot].settled, self._known[slot].stop) for slot in slots]
        positions = torch.cat([torch.arange(start, stop, device=self._device) for start, stop in spans])
        with self._on_device():
            keys = self._keys_of(taps, positions)
        first = 0
        for slot, (start, stop) in zip(slots, spans, strict=True):
            mine = [(k[first : first + stop - start], v[first : first + stop - start]) for k, v in keys]
            first += stop - start
            self._store(slot, stop, mine)
            self._known[slot].settle()

    def _store(self, slot: int, stop: int, keys: Sequence[Keys]) -> None:
        """K and V of the positions before `stop`; of each layer the last that its ring holds."""
        for ring, cap, (k, v) in zip(self._rings, self._caps, keys, strict=True):
            count = min(cap, len(k))
            if count:
                places = torch.arange(stop - count, stop, device=ring.device) % cap
                ring[slot, 0, places] = k[-count:].to(ring.device, ring.dtype)
                ring[slot, 1, places] = v[-count:].to(ring.device, ring.dtype)

    def _rows(self, slot: int, layer: int) -> Tensor:
        """[2, positions, kv_heads, head_dim], ascending; a copy."""
        return ring_rows(self._rings[layer], slot, self._known[slot].start, self._known[slot].settled)

    # Drafting

    def propose(self, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        self._begin_blocks(asks)
        with self._settling if self.drafts_ahead else nullcontext(), self._on_device():
            return self._draft(asks)

    def propose_ahead(self, asks: Sequence[Ask]) -> Tensor:
        raise NotImplementedError("this drafter's tokens are known to the host first")

    def propose_behind(self, block: UnseenBlock) -> Tensor | None:
        return None

    def note_behind(self, slot: int, position: int | None) -> None:
        """What waited has become K and V, up to `position`. Where the pass went another way the rings hold what is not
        the sequence's, and have lost what was: the context begins anew."""
        with self._settling:
            known = self._known[slot]
            if known.position == known.stop == position:
                known.settle()
            else:
                known.begin(known.position)

    def _begin_blocks(self, asks: Sequence[Ask]) -> None:
        with self._settling:
            for ask in asks:
                self._begin_block(ask)
            self._settle(self._to_settle(asks))

    def _to_settle(self, asks: Sequence[Ask]) -> list[int]:
        """Slots whose features become K and V before blocks are drafted; those of others do as they are."""
        return [ask.slot for ask in asks]

    def _begin_block(self, ask: Ask) -> None:
        known = self._known[ask.slot]
        assert known.position == ask.position, f"slot {ask.slot} stands at {known.position}, not at {ask.position}"
        if known.stop != ask.position:  # nothing is known of what stands right before the block
            known.begin(ask.position)

    def _on_device(self) -> AbstractContextManager[object]:
        """Kernels are launched on the current device, and every thread begins on the first one."""
        device = self._device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

    def _contexts(self, slot: int) -> list[Keys]:
        kept = (self._rows(slot, layer) for layer in range(len(self._rings)))
        return [(rows[0], rows[1]) for rows in kept]

    # State

    def open(self, slot: int) -> None:
        self.close(slot)

    def close(self, slot: int) -> None:
        self._known[slot] = Known()
        self._prepared.pop(slot, None)

    def rewind(self, slot: int, position: int) -> None:
        known = self._known[slot]
        if known.stop == known.position:
            known.cut(position)
        known.position = position

    def capture(self, slot: int) -> Sequence[Part]:
        return self.begin_capture(slot)()

    def begin_capture(self, slot: int) -> Callable[[], Sequence[Part]]:
        """Nothing, where it knows nothing of what stands right before the position."""
        with self._settling:
            known = self._known[slot]
            if known.stop != known.position or known.stop == known.start:
                return tuple
            self._settle([slot])
            live = {f"kv{layer}": self._rows(slot, layer) for layer in range(len(self._rings))} | self._beside(slot)
        if (copies := self._copies) is None:
            taken = {IDENTITY: self._identity, **{name: x.cpu() for name, x in live.items()}}
            return lambda: (Part(DRAFTER_LAYER, taken),)
        with self._on_device():
            copied = copies.copy_live(list(live.values()))
        names = tuple(live)
        del live  # the copies of it are enough

        def finish() -> Sequence[Part]:
            with self._on_device():
                tensors = dict(zip(names, copied.to_host(), strict=True))
            return (Part(DRAFTER_LAYER, {IDENTITY: self._identity, **tensors}, ready=copied.ready),)

        return finish

    def restore(self, slot: int, position: int, parts: Sequence[Part]) -> None:
        self.prepare_restore(slot, position, parts)
        self.commit_restore(slot)

    def prepare_restore(self, slot: int, position: int, parts: Sequence[Part]) -> None:
        part = next((part for part in parts if part.layer == DRAFTER_LAYER), None)
        if part is not None and not self._is_mine(part):
            part = None
        if part is not None:
            wait_for([part])
            self._check(part, position)
        self._prepared[slot] = position, part

    def _is_mine(self, part: Part) -> bool:
        identity = part.tensors.get(IDENTITY)
        return identity is not None and torch.equal(identity, self._identity)

    def _check(self, part: Part, position: int) -> None:
        """Every layer brings as many positions as its ring holds of those that the widest brings."""
        rows = {name: tensor for name, tensor in part.tensors.items() if name != IDENTITY}
        brought = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in rows.items()}
        widest = max(
            (shape[1] for name, (shape, _) in brought.items() if name[:2] == "kv" and len(shape) > 1), default=0
        )
        count = min(widest, position, self.reach)
        wanted = self._shapes_beside() | {
            f"kv{layer}": ((2, min(cap, count), *ring.shape[3:]), ring.dtype)
            for layer, (cap, ring) in enumerate(zip(self._caps, self._rings, strict=True))
        }
        if brought != wanted:
            raise SnapshotMismatch(f"the drafter's context in the snapshot is {brought}, the drafter keeps {wanted}")

    def abort_restore(self, slot: int) -> None:
        self._prepared.pop(slot, None)

    def commit_restore(self, slot: int) -> None:
        position, part = self._prepared.pop(slot)
        if part is None:
            self._known[slot] = Known(position, position, position)
            return
        keys = [(rows[0], rows[1]) for rows in (part.tensors[f"kv{layer}"] for layer in range(len(self._rings)))]
        self._known[slot] = Known(position, position - max(len(k) for k, _ in keys), position)
        self._store(slot, position, keys)


class DrafterContext(RingContext):
    """Of a DFlash drafter."""

    def __init__(
        self,
        model: Dflash,
        identity: str,
        slots: int,
        context: int,
        kv_type: torch.dtype = KV_TYPE,
        copies: CopiesToHost | None = None,
        record: Recorder | None = None,
    ) -> None:
        """record: how a GPU's passes are recorded; without it they run as they are."""
        spare = 0 if record is None else 1
        super().__init__(model.spec, model.device, identity, slots, context, kv_type, copies, spare)
        self.model = model
        self._order = [self.taps.index(tap) for tap in model.spec.taps]
        self._recorded = None if record is None else RecordedPass(model, self._rings, slots, record)
        self.drafts_ahead = record is not None  # features become K and V in the pass that drafts, under the lock

    def make_ready(self) -> None:
        """Record what blocks will need, and run once what a chunk's features go through."""
        if self._recorded is None:
            return
        with self._on_device():
            self._recorded.make_ready()
            for rows in SETTLED:
                like = torch.zeros(rows, self.model.spec.hidden, dtype=self.model.dtype, device=self._device)
                self.model.context([like] * len(self._order), torch.zeros(rows, dtype=torch.int64, device=self._device))

    def _read_rows(
        self, batch: Batch, features: Sequence[Tensor], pending: PendingFeatures | None
    ) -> Iterator[tuple[Segment, int, tuple[Tensor, ...]]]:
        read = [segment for segment in batch.segments if segment.features]
        if len(read) == 1:
            yield read[0], read[0].end - read[0].features, tuple(features)
            return
        pieces = zip(*(tap.split([segment.features for segment in read]) for tap in features), strict=True)
        for segment, rows in zip(read, pieces, strict=False):  # of no tap nothing comes
            yield segment, segment.end - segment.features, rows

    def _keys_of(self, rows: Sequence[Tensor], positions: Tensor) -> list[Keys]:
        return self.model.context([rows[i] for i in self._order], positions)

    def _to_settle(self, asks: Sequence[Ask]) -> list[int]:
        if self._recorded is None:
            return super()._to_settle(asks)
        return [ask.slot for ask in asks if self._known[ask.slot].waiting_rows > self._recorded.rows]

    def _settle(self, slots: Sequence[int]) -> None:
        """As many features as wait while a drafter rests go through the recorded pass; a chunk's are worth launches of
        their own."""
        if self._recorded is not None:
            for slot in slots:
                if 0 < self._known[slot].waiting_rows <= WAITING + self.longest:
                    self._settle_recorded(self._recorded, slot)
        super()._settle(slots)

    def _settle_recorded(self, recorded: RecordedPass, slot: int) -> None:
        known = self._known[slot]
        taps = [torch.cat(tap) for tap in zip(*known.waiting, strict=True)]
        with self._on_device():
            recorded.settle(slot, known.settled, tuple(taps[i] for i in self._order))
        known.settle()

    def _draft(self, asks: Sequence[Ask]) -> list[tuple[int, ...]]:
        most = [min(ask.most, self.longest) for ask in asks]
        found = self._draft_eagerly(asks, max(most)) if self._recorded is None else self._draft_recorded(asks).tolist()
        return [tuple(tokens[:count]) for tokens, count in zip(found, most, strict=True)]

    def _draft_eagerly(self, asks: Sequence[Ask], most: int) -> list[list[int]]:
        numbers = ((ask.token, ask.position, ask.slot, self._known[ask.slot].start) for ask in asks)
        blocks = DraftBlocks(*(torch.tensor(column, device=self._device) for column in zip(*numbers, strict=True)))
        return self.model.propose(blocks, self._rings, most).tolist()

    def propose_ahead(self, asks: Sequence[Ask]) -> Tensor:
        self._begin_blocks(asks)
        with self._settling, self._on_device():
            return self._draft_recorded(asks)

    def propose_behind(self, block: UnseenBlock) -> Tensor | None:
        """None where what waits is more than a pass takes in, or not all of it was seen."""
        if self._recorded is None:
            return None
        with self._settling, self._on_device():
            known = self._known[block.slot]
            before = known.waiting_rows - 1 - block.drafted
            if known.stop != known.position or before < 0 or known.waiting_rows > self._recorded.rows:
                return None
            waiting = [tuple(rows[i] for i in self._order) for rows in known.waiting]
            return self._recorded.run_behind(block, known.start, before, waiting)

    def _draft_recorded(self, asks: Sequence[Ask]) -> Tensor:
        """[asks, tokens of a block], where the next pass writes too. Features that wait become K and V in the same
        pass."""
        assert self._recorded is not None, "asked where passes are recorded"
        found = list[Tensor]()
        for at in range(0, len(asks), self._recorded.blocks):
            group = asks[at : at + self._recorded.blocks]
            known = [self._known[ask.slot] for ask in group]
            waiting = [[tuple(rows[i] for i in self._order) for rows in its.waiting] for its in known]
            drafted = self._recorded.run(group, [its.start for its in known], waiting)
            found.append(drafted if len(group) == len(asks) else drafted.clone())
            for its in known:
                its.settle()
        return found[0] if len(found) == 1 else torch.cat(found)

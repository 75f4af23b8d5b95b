"""Experts quantised in planes, on a GPU: slots on the device, cold ones in pinned host memory in the same planes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rekindle.experts.helper import Helper, LayerHelper
from rekindle.experts.host import HostExecutor, rows_of
from rekindle.experts.memory import HostMemory, whole_lines
from rekindle.experts.residency import Residency
from rekindle.experts.stored import StoredExperts, StoredPart, Three
from rekindle.kernels.matmul.naive import packed_values
from rekindle.kernels.matmul.packing import pack
from rekindle.kernels.matmul.types import Packed
from rekindle.kernels.matmul.upload import upload
from rekindle.kernels.moe import ExpertStack, SharedExpert
from rekindle.kernels.moe.cold import OUTPUTS, Missing, Parts
from rekindle.kernels.moe.crew import describe

STAGED = 16  # experts in each of the two halves of the staging area, or all of a layer with fewer
TURNS, RING_ROWS = 8, 16  # in which, and so many rows of a batch may go through the ring
AT_A_TIME = 32  # experts packed at a time while loading
ELSEWHERE = -(1 << 30)  # a place that no group of the staging area has
Allocate = Callable[[Sequence[int], torch.dtype], Tensor]
Stacks = tuple[ExpertStack, ExpertStack, ExpertStack]


class PackedWeights:
    recordable = True

    def __init__(
        self, stored: StoredExperts, residency: Residency, device: torch.device, staging: Staging | None = None,
        keep: int = 0,
    ) -> None:  # fmt: skip
        self._residency = residency
        self._cold = [expert for expert in range(stored.count) if expert not in set(residency.hot)]  # by place
        self._memory = HostMemory(sum(_host_bytes(part, len(self._cold)) for part in stored.parts), device)
        gate, up, down = (_load_part(part, residency, self._cold, device, self._memory) for part in stored.parts)
        self.stacks: Stacks = (gate[0], up[0], down[0])
        self.host_stacks: Stacks = (gate[1], up[1], down[1])
        self.expert_bytes = sum(stack.nbytes for stack in self.host_stacks) // len(self._cold)
        places = torch.full((stored.count,), -1, dtype=torch.int32)
        places[torch.tensor(self._cold)] = torch.arange(len(self._cold), dtype=torch.int32)
        self.places = places.to(device)  # expert -> where it lies in host memory
        self.at_place = torch.tensor(self._cold, dtype=torch.int32, device=device)
        self._staging = staging or Staging(self.stacks, min(STAGED, stored.count), device)
        self._to_ring = make_pieces(self.host_stacks, self.stacks, len(residency.hot), device)
        self._parts = make_parts(self.host_stacks, self.stacks, device)
        self._to_staging = [make_pieces(self.host_stacks, half, 0, device) for half in self._staging.halves]
        self.host_executor = HostExecutor(self._values, keep)
        self._described = describe(self.host_stacks)
        self.helper: LayerHelper | None = None

    def most_rows(self, at_once: int) -> int:
        """Beyond, the staging area moves fewer bytes."""
        return max(at_once, min(TURNS * at_once, RING_ROWS))

    @property
    def staging(self) -> Staging:
        return self._staging

    @property
    def cold(self) -> int:
        return len(self._cold)

    def take_in(self, load: Tensor) -> None:
        _gpu().fetch(self._to_ring, load, self.places)

    def run_row(self, h: Tensor, router: Tensor, used: int, tally: Tensor, shared: SharedExpert) -> Tensor | None:
        """[1, hidden], from choosing on, in as many launches as if all experts were hot."""
        if not h.is_cuda or self._parts is None:
            return None
        from rekindle.experts.triton import route_row
        from rekindle.kernels.moe.triton import moe_missing, takes_missing

        if not takes_missing(h, *self.stacks, shared):
            return None
        mailbox, answer = (None, None) if self.helper is None else (self.helper.mailbox, self.helper.answer)
        slots, sources, weights = route_row(h, router, used, self._residency, tally, self.places, mailbox)
        missing = Missing(sources, self._parts, answer)
        return moe_missing(h, slots, weights, *self.stacks, shared, missing)

    @property
    def can_be_helped(self) -> bool:
        """CPU threads can read its types."""
        return self._described is not None

    def let_help(self, helper: Helper) -> None:
        """From now on the CPU takes its share of every step through the ring."""
        assert self._described is not None, "only who can read a layer's types can help with it"
        self.helper = LayerHelper(helper, self._described, self.places)

    def fill_staging(self) -> int:
        """Cold experts, whoever lies first, into one half of the staging area; gives their bytes."""
        some = self.at_place[: self._staging.slots]
        self.take_in_staging(some)
        return len(some) * self.expert_bytes

    def take_in_staging(self, load: Tensor) -> None:
        """Put expert load[i], unless it is -1, into slot i of one half of the staging area."""
        _gpu().fetch(self._to_staging[0], load, self.places)

    def swap(self, slot: int, goes: int, comes: int) -> None:
        """The expert that goes takes the host place of the one that comes. All in the order of the stream."""
        place = self._cold.index(comes)
        _gpu().exchange(self._to_ring, place, slot - len(self._residency.hot))
        self._cold[place] = goes
        self.places[goes] = place
        self.places[comes] = -1
        self.at_place[place] = goes

    def stream(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """float32 [rows, hidden]. Cold experts arrive in one half of the staging area while the other works.

        Many pairs need nearly all of them: then whole groups are copied, which keeps no processor of the device busy;
        not so where the ring holds a good part of them already.
        """
        slots = self._residency.slots_of(ids)
        places = self.places.index_select(0, ids.flatten()).view(ids.shape).masked_fill(slots >= 0, ELSEWHERE)
        load = self._missing(ids)
        nearly_all = ids.numel() >= 2 * self._residency.experts and 8 * self._residency.ring <= len(self._cold)
        shares = torch.empty(ids.numel(), h.shape[1], dtype=torch.float32, device=h.device)
        lanes, staged = self._staging.lanes, self._staging.slots
        lanes.begin(load)
        self._run(h, slots, weights, self.stacks, shares)
        for first in range(0, len(self._cold), staged):
            half = lanes.turn()
            with lanes.copying(half):
                if nearly_all:
                    self._copy_group(half, first)
                else:
                    _gpu().fetch(self._to_staging[half], load[first : first + staged], self.places)
            with lanes.computing(half):
                self._run(h, places - first, weights, self._staging.halves[half], shares)
        return shares.view(*ids.shape, -1).sum(1)

    def _copy_group(self, half: int, first: int) -> None:
        for far, near in zip(self.host_stacks, self._staging.halves[half], strict=True):
            for source, target in zip(_by_expert(far), _by_expert(near), strict=True):
                some = source[first : first + self._staging.slots]
                target[: len(some)].copy_(some, non_blocking=True)

    def host(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """float32 [rows, hidden]. What is on the device runs there while the CPU does the rest."""
        slots = self._residency.slots_of(ids)
        shares = torch.zeros(ids.numel(), h.shape[1], dtype=torch.float32, device=h.device)
        x, chosen, missing = h.float().cpu(), ids.cpu(), self._missing(ids).cpu()
        self._run(h, slots, weights, self.stacks, shares)
        for expert in missing[missing >= 0].tolist():
            row, place = rows_of(chosen, expert)
            share = self.host_executor.share(x.index_select(0, row), expert).to(h.device, non_blocking=True)
            pair = (row * ids.shape[1] + place).to(h.device, non_blocking=True)
            shares.index_copy_(0, pair, share * weights.flatten().index_select(0, pair)[:, None])
        return shares.view(*ids.shape, -1).sum(1)

    def _missing(self, ids: Tensor) -> Tensor:
        """Per host place: the expert that lies there if it is needed and not on the device, else -1."""
        needed = torch.zeros(self._residency.experts, dtype=torch.bool, device=ids.device)
        needed.index_fill_(0, ids.flatten().long(), True)
        missing = needed & (self._residency.table < 0)
        return self.at_place.masked_fill(~missing.index_select(0, self.at_place), -1)

    def _run(self, h: Tensor, slots: Tensor, weights: Tensor, stacks: Stacks, shares: Tensor) -> None:
        """Weighted shares of the pairs whose slot is one of the stacks'; others are left alone."""
        from rekindle.kernels.moe import triton as kernels

        gate, up, down = stacks
        if not gate.experts:  # no hot expert, no ring
            return
        h, used, expanding = h.contiguous(), slots.shape[1], h.shape[0] >= kernels.MANY_ROWS
        density = -(-2 * slots.numel() // self._residency.experts)
        order, starts = kernels.group(slots, gate.experts)
        inner = torch.empty(slots.numel(), gate.rows, dtype=h.dtype, device=h.device)
        tile = kernels.up_config(density, expanding)
        kernels.run_grouped(h, order, starts, weights, inner, [gate, up], used, tile, expanding)
        tile = kernels.down_config(density, expanding)
        kernels.run_grouped(inner, order, starts, weights, shares, [down], used, tile, expanding)

    def _values(self, expert: int) -> Three:
        place = self._cold.index(expert)
        gate, up, down = (packed_values(_one(stack, place)) for stack in self.host_stacks)
        return gate, up, down


class Staging:
    """Two halves of a few slots each, shared by all layers of a stage whose experts look alike."""

    def __init__(self, like: Stacks, slots: int, device: torch.device) -> None:
        self.slots = slots  # of one half
        self.halves: list[Stacks] = []
        for _ in range(2):
            gate, up, down = (_empty_stack(stack, slots, _on(device)) for stack in like)
            self.halves.append((gate, up, down))
        self.lanes = _Lanes(device) if device.type == "cuda" else _OneLane()


class _OneLane:
    """Without streams everything happens where it stands."""

    def __init__(self) -> None:
        self._turn = 0

    def begin(self, load: Tensor) -> None:
        """The list of what to copy is known from here on."""

    def turn(self) -> int:
        self._turn ^= 1
        return self._turn

    @contextlib.contextmanager
    def copying(self, half: int) -> Iterator[None]:
        yield

    @contextlib.contextmanager
    def computing(self, half: int) -> Iterator[None]:
        yield


class _Lanes(_OneLane):
    """Copies on a stream of their own: a half is filled while the other is read."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._side = torch.cuda.Stream(device)
        self._known = torch.cuda.Event()
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._free = [torch.cuda.Event() for _ in range(2)]

    def begin(self, load: Tensor) -> None:
        self._known.record()
        self._side.wait_event(self._known)
        load.record_stream(self._side)

    @contextlib.contextmanager
    def copying(self, half: int) -> Iterator[None]:
        self._side.wait_event(self._free[half])
        with torch.cuda.stream(self._side):
            yield
        self._copied[half].record(self._side)

    @contextlib.contextmanager
    def computing(self, half: int) -> Iterator[None]:
        torch.cuda.current_stream().wait_event(self._copied[half])
        yield
        self._free[half].record()


# ---- planes ------------------------------------------------------------------------------------------------------


def _host_bytes(part: StoredPart, experts: int) -> int:
    """What one part of so many experts takes in planes; asked of a single row."""
    row = pack(torch.from_numpy(part.raw[:1].copy()), part.type, part.shape[2])
    return sum(whole_lines(plane.nbytes * part.shape[1] * experts) for plane in row.planes)


def _load_part(
    part: StoredPart, residency: Residency, cold: Sequence[int], device: torch.device, memory: HostMemory
) -> tuple[ExpertStack, ExpertStack]:
    """One part of all experts, some at a time: hot ones to their slots, cold ones to their places in host memory."""
    experts, rows, columns = part.shape
    slot_of = {expert: slot for slot, expert in enumerate(residency.hot)}
    place_of = {expert: place for place, expert in enumerate(cold)}
    here: ExpertStack | None = None
    there: ExpertStack | None = None
    for start in range(0, experts, AT_A_TIME):
        stop = min(experts, start + AT_A_TIME)
        packed = pack(upload(part.rows(start, stop), device), part.type, columns)
        some = ExpertStack((stop - start, rows, columns), packed=packed)
        if here is None or there is None:
            here = _empty_stack(some, residency.slots, _on(device))
            there = _empty_stack(some, len(cold), memory.take)
        _move(some, here, [(expert - start, slot_of[expert]) for expert in range(start, stop) if expert in slot_of])
        _move_run(
            some, there, [(expert - start, place_of[expert]) for expert in range(start, stop) if expert in place_of]
        )
    assert here is not None, f"a stack of {experts} experts"
    assert there is not None, f"a stack of {experts} experts"
    return here, there


def _move(source: ExpertStack, target: ExpertStack, pairs: Sequence[tuple[int, int]]) -> None:
    if not pairs:
        return
    which, where = (torch.tensor(column) for column in zip(*pairs, strict=True))
    for mine, other in zip(_by_expert(source), _by_expert(target), strict=True):
        other.index_copy_(0, where.to(other.device), mine.index_select(0, which.to(mine.device)).to(other.device))


def _move_run(source: ExpertStack, target: ExpertStack, pairs: Sequence[tuple[int, int]]) -> None:
    """The same to places that follow one another in pinned memory: straight from the device."""
    if not pairs:
        return
    which, first = torch.tensor([expert for expert, _ in pairs]), pairs[0][1]
    for mine, other in zip(_by_expert(source), _by_expert(target), strict=True):
        other[first : first + len(pairs)].copy_(mine.index_select(0, which.to(mine.device)))


def _on(device: torch.device) -> Allocate:
    """Zeros: a slot that holds no expert yet may be read, with no weight."""
    return lambda shape, dtype: torch.zeros(*shape, dtype=dtype, device=device)


def _empty_stack(like: ExpertStack, experts: int, allocate: Allocate) -> ExpertStack:
    """The same planes for another number of experts, not yet filled."""

    def plane(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return allocate((experts * like.rows, *tensor.shape[1:]), tensor.dtype)

    old = like.planes
    codes, scales = plane(old.codes), plane(old.scales)
    assert codes is not None, "codes are there for every type"
    assert scales is not None, "scales are there for every type"
    packed = Packed(old.type, experts * like.rows, like.columns, codes, plane(old.high), scales, plane(old.supers))
    return ExpertStack((experts, like.rows, like.columns), packed=packed)


def _by_expert(stack: ExpertStack) -> list[Tensor]:
    """The planes as views [experts, …]."""
    return [plane.view(stack.experts, stack.rows, *plane.shape[1:]) for plane in stack.planes.planes]


def _one(stack: ExpertStack, expert: int) -> Packed:
    """The planes of one expert, shared."""
    part, packed = slice(expert * stack.rows, (expert + 1) * stack.rows), stack.planes
    return replace(
        packed,
        rows=stack.rows,
        codes=packed.codes[part],
        high=None if packed.high is None else packed.high[part],
        scales=packed.scales[part],
        supers=None if packed.supers is None else packed.supers[part],
    )


def make_pieces(there: Stacks, here: Stacks, first: int, device: torch.device) -> Tensor:
    """What the programs of a fetch copy: all planes of an expert, cut up; slots are counted from `first`."""
    from rekindle.experts.triton import PIECE

    rows = []
    for far, near in zip(there, here, strict=True):
        for source, target in zip(_by_expert(far), _by_expert(near), strict=True):
            size = source[0].nbytes if far.experts else 0
            assert size % 16 == 0, (
                f"{far.planes.type}: a plane of one expert has {size} bytes, not whole 16-byte pieces"
            )
            base = target.data_ptr() + first * size
            for at in range(0, size // 4, PIECE):
                rows.append((source.data_ptr(), base, size // 4, at, min(PIECE, size // 4 - at)))
    return torch.tensor(rows, dtype=torch.int64, device=device)


def make_parts(there: Stacks, here: Stacks, device: torch.device) -> Parts | None:
    """What each program of gate and up brings of an expert: a plane's rows are dealt to them in their order. None for
    an expert that does not come apart in whole rows and 16 bytes."""
    parts, rest = divmod(here[0].rows, OUTPUTS)
    planes = [
        (source.data_ptr(), target.data_ptr(), target[0].nbytes)
        for far, near in zip(there, here, strict=True)
        for source, target in zip(_by_expert(far), _by_expert(near), strict=True)
        if near.experts
    ]
    if rest or not planes or any(size % (16 * parts) for *_, size in planes):
        return None
    piece = math.gcd(512, *(size // parts for *_, size in planes))  # bytes: at most what a warp copies at once
    rows = [
        (far + at, near + at, size)
        for part in range(parts)
        for far, near, size in planes
        for at in range(part * size // parts, (part + 1) * size // parts, piece)
    ]
    table = torch.tensor(rows, dtype=torch.int64, device=device).view(parts, -1, 3)
    return Parts(table, piece // 4)


def _gpu():  # type: ignore[no-untyped-def]
    from rekindle.experts import triton

    return triton

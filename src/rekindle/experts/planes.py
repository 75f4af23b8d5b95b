"""Experts in planes: loaded into slots on the device and places in host memory, and cut up for the kernels that copy.

The planes of a layer's cold experts in host memory are those of its slots, so an expert travels as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rekindle.experts.memory import HostMemory, whole_lines
from rekindle.experts.residency import Residency
from rekindle.experts.stored import StoredPart
from rekindle.kernels.device_memory import DeviceMemory
from rekindle.kernels.matmul.packing import pack
from rekindle.kernels.matmul.types import Packed
from rekindle.kernels.moe import ExpertStack
from rekindle.kernels.moe.cold import OUTPUTS, CopyPlan
from rekindle.kernels.upload import upload

AT_A_TIME = 32  # experts packed at a time while loading
Allocate = Callable[[Sequence[int], torch.dtype], Tensor]
Stacks = tuple[ExpertStack, ExpertStack, ExpertStack]  # gate, up, down


def host_bytes(part: StoredPart, experts: int) -> int:
    """Host memory of gate, up or down of `experts` experts in planes, from the planes of a single row."""
    row = pack(torch.from_numpy(part.raw[:1].copy()), part.type, part.shape[2])
    return sum(whole_lines(plane.nbytes * part.shape[1] * experts) for plane in row.planes)


def load_part(
    part: StoredPart, residency: Residency, cold: Sequence[int], device: torch.device, memory: HostMemory,
    shared: DeviceMemory | None,
) -> tuple[ExpertStack, ExpertStack]:  # fmt: skip
    """Gate, up or down of all experts, AT_A_TIME at once: hot ones to their slots, cold ones to host memory, pinned
    ones to both. Gives the slots' stack and the host's. shared: what the slots are cut from, if some can be lent."""
    experts, rows, columns = part.shape
    slot_of = residency.slot_of_staying()
    place_of = {expert: place for place, expert in enumerate(cold)}
    here: ExpertStack | None = None
    there: ExpertStack | None = None
    for start in range(0, experts, AT_A_TIME):
        stop = min(experts, start + AT_A_TIME)
        packed = pack(upload(part.rows(start, stop), device), part.type, columns)
        some = ExpertStack((stop - start, rows, columns), packed=packed)
        if here is None or there is None:
            here = empty_stack(some, residency.slots, _slots_on(device, residency, shared))
            there = empty_stack(some, len(cold), memory.take)
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
    for mine, other in zip(by_expert(source), by_expert(target), strict=True):
        other.index_copy_(0, where.to(other.device), mine.index_select(0, which.to(mine.device)).to(other.device))


def _move_run(source: ExpertStack, target: ExpertStack, pairs: Sequence[tuple[int, int]]) -> None:
    """The same to consecutive places in pinned memory: straight from the device."""
    if not pairs:
        return
    which, first = torch.tensor([expert for expert, _ in pairs]), pairs[0][1]
    for mine, other in zip(by_expert(source), by_expert(target), strict=True):
        other[first : first + len(pairs)].copy_(mine.index_select(0, which.to(mine.device)))


def zeros_on(device: torch.device) -> Allocate:
    """Zeros: a slot that holds no expert yet may be read, with no weight."""
    return lambda shape, dtype: torch.zeros(*shape, dtype=dtype, device=device)


def _slots_on(device: torch.device, residency: Residency, shared: DeviceMemory | None) -> Allocate:
    """The planes of a layer's slots, from memory that can change hands if there is any."""
    lendable = len(residency.pinned)
    if shared is None or not lendable:
        return zeros_on(device)

    def allocate(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        rows = shape[0] // residency.slots
        return shared.take_slots(residency.slots, lendable, (rows, *shape[1:]), dtype).view(*shape)

    return allocate


def empty_stack(like: ExpertStack, experts: int, allocate: Allocate) -> ExpertStack:
    """The same planes for another number of experts, not yet filled."""

    def plane(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        return allocate((experts * like.rows, *tensor.shape[1:]), tensor.dtype)

    old = like.planes
    codes, scales = plane(old.codes), plane(old.scales)
    assert codes is not None, "codes are there for every type"
    assert scales is not None, "scales are there for every type"
    packed = Packed(
        old.type, experts * like.rows, like.columns, codes, plane(old.high_bits), scales, plane(old.super_scales)
    )
    return ExpertStack((experts, like.rows, like.columns), packed=packed)


def by_expert(stack: ExpertStack) -> list[Tensor]:
    """The planes as views [experts, …]."""
    return [plane.view(stack.experts, stack.rows, *plane.shape[1:]) for plane in stack.planes.planes]


def one_expert(stack: ExpertStack, expert: int) -> Packed:
    """The planes of one expert, shared."""
    part, packed = slice(expert * stack.rows, (expert + 1) * stack.rows), stack.planes
    return replace(
        packed,
        rows=stack.rows,
        codes=packed.codes[part],
        high_bits=None if packed.high_bits is None else packed.high_bits[part],
        scales=packed.scales[part],
        super_scales=None if packed.super_scales is None else packed.super_scales[part],
    )


def make_pieces(there: Stacks, here: Stacks, first: int, device: torch.device) -> Tensor:
    """What the programs of `triton.fetch` copy: all planes of an expert, cut up; slots are counted from `first`.

    int64 [n, 5], as `triton._copy_piece` says."""
    from rekindle.experts.triton import PIECE

    rows = []
    for far, near in zip(there, here, strict=True):
        for source, target in zip(by_expert(far), by_expert(near), strict=True):
            size = source[0].nbytes if far.experts else 0
            assert size % 16 == 0, (
                f"{far.planes.type}: a plane of one expert has {size} bytes, not whole 16-byte pieces"
            )
            base = target.data_ptr() + first * size
            for at in range(0, size // 4, PIECE):
                rows.append((source.data_ptr(), base, size // 4, at, min(PIECE, size // 4 - at)))
    return torch.tensor(rows, dtype=torch.int64, device=device)


def make_parts(there: Stacks, here: Stacks, device: torch.device) -> CopyPlan | None:
    """What each program of gate and up copies of a missing expert: a plane's rows are dealt to them in order. None for
    an expert that cannot be divided into whole rows and 16 bytes."""
    parts, rest = divmod(here[0].rows, OUTPUTS)
    planes = [
        (source.data_ptr(), target.data_ptr(), target[0].nbytes)
        for far, near in zip(there, here, strict=True)
        for source, target in zip(by_expert(far), by_expert(near), strict=True)
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
    return CopyPlan(table, piece // 4)

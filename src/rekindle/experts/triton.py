"""Finding and fetching experts on a GPU, without the host.

Cold weights lie in pinned host memory that the device can address, so a kernel which finds that an expert is missing
reads it over the link by itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from rekindle.experts.residency import Residency

PIECE = 4096  # 32-bit words one program copies


@triton.jit
def _admit_kernel(  # type: ignore[no-untyped-def]
    ids, table, owner, used_at, step, tally, slots, load, pairs, experts, ring, hot,
    E: tl.constexpr, R: tl.constexpr, P: tl.constexpr, RB: tl.constexpr,
):  # fmt: skip
    """One program: what `Residency._admit` does."""
    now = tl.load(step) + 1
    e = tl.arange(0, E)
    p = tl.arange(0, P)
    id = tl.load(ids + p, p < pairs, other=-1)
    chosen = tl.sum((id[None, :] == e[:, None]).to(tl.int32), 1)
    tl.store(tally + e, tl.load(tally + e, e < experts, other=0) + chosen, e < experts)
    missing = (chosen > 0) & (tl.load(table + e, e < experts, other=0) < 0)
    turn = tl.cumsum(missing.to(tl.int32), 0) - 1
    s = tl.arange(0, R)
    s_owner = tl.load(owner + s, s < ring, other=-1)
    s_hit = (tl.sum((id[None, :] == s_owner[:, None]).to(tl.int32), 1) > 0) & (s_owner >= 0)
    s_age = tl.where(s_hit, now, tl.load(used_at + s, s < ring, other=2147483647))
    for start in range(0, R, RB):
        r = start + tl.arange(0, RB)
        r_owner = tl.load(owner + r, r < ring, other=-1)
        hit = (tl.sum((id[None, :] == r_owner[:, None]).to(tl.int32), 1) > 0) & (r_owner >= 0)
        age = tl.where(hit, now, tl.load(used_at + r, r < ring, other=2147483647))
        older = (s_age[None, :] < age[:, None]) | ((s_age[None, :] == age[:, None]) & (s[None, :] < r[:, None]))
        rank = tl.sum(older.to(tl.int32), 1)
        comes = tl.max(tl.where(missing[None, :] & (turn[None, :] == rank[:, None]), e[None, :], -1), 1)
        tl.store(load + r, tl.where(hit, -1, comes), r < ring)
    tl.debug_barrier()  # `load` is whole before the tables change
    comes = tl.load(load + s, s < ring, other=-1)
    tl.store(table + s_owner, tl.full([R], -1, tl.int32), (comes >= 0) & (s_owner >= 0))
    tl.store(table + comes, hot + s, comes >= 0)
    tl.store(owner + s, comes, comes >= 0)
    tl.store(used_at + s, tl.zeros([R], tl.int32) + now, (s < ring) & (s_hit | (comes >= 0)))
    tl.store(step, now)
    tl.debug_barrier()  # the table is whole before it is read
    tl.store(slots + p, tl.load(table + id, p < pairs, other=-1), p < pairs)


def admit(residency: Residency, ids: Tensor, tally: Tensor) -> tuple[Tensor, Tensor]:
    slots, load = torch.empty_like(ids), torch.empty_like(residency.owner)
    ring = triton.next_power_of_2(residency.ring)
    _admit_kernel[(1,)](
        ids, residency.table, residency.owner, residency.used_at, residency.step, tally, slots, load,
        ids.numel(), residency.experts, residency.ring, len(residency.hot),
        E=triton.next_power_of_2(residency.experts), R=ring, P=triton.next_power_of_2(ids.numel()), RB=min(16, ring),
        num_warps=4,
    )  # fmt: skip
    return slots, load


@triton.jit
def _fetch_kernel(pieces, load, places, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """One piece of the expert that slot number program_id(1) is to take in.

    pieces int64 [n, 5]: address there, address here, words of one expert, the piece's first word, its words; all of
    them stand for whole 16 bytes.
    """
    expert = tl.load(load + tl.program_id(1))
    if expert >= 0:
        piece = pieces + tl.program_id(0) * 5
        there = tl.load(piece).to(tl.pointer_type(tl.int32))
        here = tl.load(piece + 1).to(tl.pointer_type(tl.int32))
        size, first = tl.load(piece + 2), tl.load(piece + 3)
        count = tl.multiple_of(tl.load(piece + 4), 4)
        place = tl.load(places + expert).to(tl.int64)
        o = tl.arange(0, B)
        source = tl.max_contiguous(tl.multiple_of(there + place * size + first + o, 16), B)
        target = tl.max_contiguous(tl.multiple_of(here + tl.program_id(1) * size + first + o, 16), B)
        tl.store(target, tl.load(source, o < count, cache_modifier=".cg"), o < count)


def fetch(pieces: Tensor, load: Tensor, places: Tensor) -> None:
    """Bring the experts in `load` (-1: none) to the slots they stand at, from their `places` in host memory."""
    _fetch_kernel[(pieces.shape[0], load.shape[0])](pieces, load, places, B=PIECE, num_warps=8)

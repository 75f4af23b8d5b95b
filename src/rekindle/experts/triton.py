"""Finding and fetching experts on a GPU, without asking Python.

Cold weights lie in pinned host memory that the device can address, so a kernel which finds that an expert is missing
reads it over PCIe by itself, or puts it on the list of the CPU threads. One row has all of it in the launches
that choose and multiply (`route_row`, and `kernels.moe.bring`); more rows take a launch for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from rekindle.kernels.device import pdl_arguments
from rekindle.kernels.matmul.tile_semaphores import is_last_program, semaphores
from rekindle.kernels.moe.bring import host_answered
from rekindle.kernels.moe.naive import LEAST_SUM
from rekindle.kernels.moe.router import chosen, route_config, store_logits

if TYPE_CHECKING:
    from rekindle.experts.residency import Residency
    from rekindle.kernels.moe.cold import ColdAnswer

Mail = tuple[Tensor | int, ...]  # `LayerCpuExperts.mailbox`
PIECE = 4096  # 32-bit words that a program copies at once
# Programs that copy beside others, of 16 KiB at once each: a link of 50 GB/s that answers after 2 µs has 100 KB under
# way, and a program that looks up its next piece, or waits for its turn on a multiprocessor, has none.
FETCHERS = 32
X_AT_ONCE = tl.constexpr(1024)  # values of x that go to the mailbox at once
NEVER = tl.constexpr(1 << 62)  # a step that does not come, as in `residency`


@triton.jit
def _admit(  # type: ignore[no-untyped-def]
    id, pairs, table, owner, used_at, step, tally, load, takes, cache_slots, hot,
    HELPED: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """What `Residency._admit` does, for the ids [P]: (slots or -1, whether the expert must be brought there first, how
    many experts are left to the CPU)."""
    p = tl.arange(0, P)
    s = tl.arange(0, R)
    live = p < pairs
    now = tl.load(step) + 1
    slot = tl.load(table + id, live, other=0)
    owned = tl.load(owner + s, s < cache_slots, other=-1)
    age = tl.load(used_at + s, s < cache_slots, other=NEVER)
    tl.atomic_add(tally + id, 1, live, sem="relaxed")
    before = (id[None, :] == id[:, None]) & (p[None, :] < p[:, None])
    missing = live & (slot < 0) & (tl.sum(before.to(tl.int32), 1) == 0)
    turn = tl.cumsum(missing.to(tl.int32), 0) - 1
    count = tl.sum(missing.to(tl.int32), 0)
    left = tl.load(takes + count, count > 0, other=0) if HELPED else 0
    comes = missing & ((turn + now) % tl.maximum(count, 1) >= left)
    turn = tl.cumsum(comes.to(tl.int32), 0) - 1
    hit = tl.sum(((owned[:, None] == id[None, :]) & live[None, :]).to(tl.int32), 1) > 0
    age = tl.where(hit & (age < NEVER), now, age)  # what is pinned stays so, and what is lent is never the oldest
    arriving = tl.full([R], -1, tl.int32)
    brought = tl.zeros([P], tl.int1)
    for n in range(0, count - left):
        at = tl.min(tl.where(age == tl.min(age, 0), s, R), 0)  # the oldest, the first of several
        expert = tl.sum(tl.where(comes & (turn == n), id, 0), 0)
        leaves = tl.sum(tl.where(s == at, owned, 0), 0)
        if leaves >= 0:
            tl.store(table + leaves, -1)
        tl.store(table + expert, hot + at)
        arriving = tl.where(s == at, expert, arriving)
        age = tl.where(s == at, now, age)
        mine = live & (id == expert)
        slot = tl.where(mine, hot + at, slot)
        brought = brought | mine
    tl.store(owner + s, arriving, arriving >= 0)
    tl.store(used_at + s, age, (s < cache_slots) & (age == now))
    tl.store(load + s, arriving, s < cache_slots)
    tl.store(step, now)
    return slot, brought, left


@triton.jit
def _ask(  # type: ignore[no-untyped-def]
    h, away, some, place, weight, layer, asked, head, box_place, box_row, box_weight, x, number, gone,
    rows, hidden, USED: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """The pairs [P] that are away, which are some, go into the mailbox.

    asked, head, box_place, box_row, box_weight and x are addresses in host memory, which mean the same here.
    """
    p = tl.arange(0, P)
    turn = tl.cumsum(away.to(tl.int32), 0) - 1
    if tl.load(gone) == 0:  # or the mailbox is left alone: a thread may still read a request that was given up
        tl.store(box_place.to(tl.pointer_type(tl.int32)) + turn, place, away)
        tl.store(box_row.to(tl.pointer_type(tl.int32)) + turn, p // USED, away)
        tl.store(box_weight.to(tl.pointer_type(tl.float32)) + turn, weight, away)
        for start in range(0, rows * hidden, X_AT_ONCE):
            k = start + tl.arange(0, X_AT_ONCE)
            value = tl.load(h + k, k < rows * hidden, other=0.0).to(tl.float32)
            tl.store(x.to(tl.pointer_type(tl.float32)) + k, value, k < rows * hidden)
        heads = head.to(tl.pointer_type(tl.int64))
        tl.store(heads, layer)
        tl.store(heads + 1, some)
        tl.store(heads + 2, rows)
        tl.debug_barrier()  # all of it is written, and by the release everyone sees it, before the host is asked
        request = tl.atomic_add(number, 1, sem="acq_rel", scope="sys") + 1
        tl.debug_barrier()
        tl.store(asked.to(tl.pointer_type(tl.int32)), request)


# ---- one row: choosing, admitting and asking are one launch ------------------------------------------------------


@triton.jit(do_not_specialize=["cache_slots", "hot"])
def _route_row_kernel(  # type: ignore[no-untyped-def]
    h, router, logits, slots, sources, weights, semaphores, experts, hidden, least,
    table, owner, used_at, step, tally, load, places, takes, cache_slots, hot,
    layer, count, asked, head, box_place, box_row, box_weight, x, number, gone,
    USED: tl.constexpr, E: tl.constexpr, P: tl.constexpr, R: tl.constexpr, HELPED: tl.constexpr,
    BE: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BE logits; the last program does the rest. A pair that the host takes keeps slot 0 here, with no weight."""
    if PDL:
        gdc_launch_dependents()
    store_logits(h, router, logits, 1, experts, hidden, BE, 1, BK, PDL)
    if is_last_program(semaphores, tl.num_programs(0)):
        id, weight = chosen(logits, experts, least, USED, E, P)
        p = tl.arange(0, P)
        id = tl.where(p < USED, id, -1)
        place = tl.load(places + id, p < USED, other=-1)
        slot, brought, left = _admit(
            id, USED, table, owner, used_at, step, tally, load, takes, cache_slots, hot, HELPED, P, R
        )  # fmt: skip
        if HELPED:
            tl.store(count, left)  # a row's experts are distinct
            if left > 0:
                away = (slot < 0) & (p < USED)
                _ask(
                    h, away, left, place, weight, layer, asked, head, box_place, box_row, box_weight, x, number, gone,
                    1, hidden, USED, P,
                )  # fmt: skip
                weight = tl.where(away, 0.0, weight)
                slot = tl.maximum(slot, 0)
        tl.store(slots + p, slot, p < USED)
        tl.store(sources + p, tl.where(brought, place, -1), p < USED)
        tl.store(weights + p, weight, p < USED)


def route_row(
    h: Tensor, router: Tensor, used: int, residency: Residency, tally: Tensor, places: Tensor,
    mailbox: Mail | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """For h [1, hidden]: the slots of the chosen experts, the place in host memory that each must be brought from first
    (-1: it is not brought), their weights; all [1, used]. The mailbox's readers are asked for their share."""
    experts, hidden = router.shape
    device, config = h.device, route_config(1)
    slots, sources = (torch.empty(1, used, dtype=torch.int32, device=device) for _ in range(2))
    weights = torch.empty(1, used, dtype=torch.float32, device=device)
    logits = torch.empty(1, experts, dtype=torch.float32, device=device)
    load = torch.empty_like(residency.owner)
    takes, *asking = mailbox or (load, 0, load, *(0,) * 6, load, load)
    _route_row_kernel[(triton.cdiv(experts, config.experts),)](
        h.contiguous(), router, logits, slots, sources, weights, semaphores(device), experts, hidden, LEAST_SUM,
        residency.table, residency.owner, residency.used_at, residency.step, tally, load, places, takes,
        residency.cache_slots, len(residency.hot), *asking, USED=used, E=triton.next_power_of_2(experts),
        P=triton.next_power_of_2(used), R=triton.next_power_of_2(residency.cache_slots), HELPED=mailbox is not None,
        BE=config.experts, BK=min(config.columns, triton.next_power_of_2(hidden)),
        num_warps=config.warps, **pdl_arguments(device),
    )  # fmt: skip
    return slots, sources, weights


# ---- more rows: a launch for each --------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["pairs", "cache_slots", "hot"])
def _admit_kernel(  # type: ignore[no-untyped-def]
    ids, table, owner, used_at, step, tally, slots, load, takes, pairs, cache_slots, hot,
    HELPED: tl.constexpr, P: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    p = tl.arange(0, P)
    id = tl.load(ids + p, p < pairs, other=-1)
    slot, _brought, _left = _admit(
        id, pairs, table, owner, used_at, step, tally, load, takes, cache_slots, hot, HELPED, P, R
    )  # fmt: skip
    tl.store(slots + p, slot, p < pairs)


def admit(residency: Residency, ids: Tensor, tally: Tensor, takes: Tensor | None) -> tuple[Tensor, Tensor]:
    slots, load = torch.empty_like(ids), torch.empty_like(residency.owner)
    _admit_kernel[(1,)](
        ids, residency.table, residency.owner, residency.used_at, residency.step, tally, slots, load,
        load if takes is None else takes, ids.numel(), residency.cache_slots, len(residency.hot),
        HELPED=takes is not None, P=triton.next_power_of_2(ids.numel()),
        R=triton.next_power_of_2(residency.cache_slots), num_warps=4
    )  # fmt: skip
    return slots, load


@triton.jit
def _copy_piece(pieces, number, place, slot, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """One piece of an expert, from its place there to a slot here.

    pieces int64 [n, 5]: address there, address here, words of one expert, the piece's first word, its words; all of
    them stand for whole 16 bytes.
    """
    piece = pieces + number * 5
    there = tl.load(piece).to(tl.pointer_type(tl.int32))
    here = tl.load(piece + 1).to(tl.pointer_type(tl.int32))
    size, first = tl.load(piece + 2), tl.load(piece + 3)
    count = tl.multiple_of(tl.load(piece + 4), 4)
    o = tl.arange(0, B)
    source = tl.max_contiguous(tl.multiple_of(there + place.to(tl.int64) * size + first + o, 16), B)
    target = tl.max_contiguous(tl.multiple_of(here + slot * size + first + o, 16), B)
    tl.store(target, tl.load(source, o < count, cache_modifier=".cg"), o < count)


@triton.jit
def _fetch_kernel(pieces, load, places, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """One piece of the expert that slot number program_id(1) is to take in."""
    expert = tl.load(load + tl.program_id(1))
    if expert >= 0:
        _copy_piece(pieces, tl.program_id(0), tl.load(places + expert), tl.program_id(1), B)


def fetch(pieces: Tensor, load: Tensor, places: Tensor) -> None:
    """Bring the experts in `load` (-1: none) to the slots they stand at, from their `places` in host memory."""
    _fetch_kernel[(pieces.shape[0], load.shape[0])](pieces, load, places, B=PIECE, num_warps=8)


@triton.jit(do_not_specialize=["count", "slots"])
def _fetch_aside_kernel(  # type: ignore[no-untyped-def]
    pieces, load, places, count, slots, B: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """The pieces of all slots, `count` of each, dealt to the programs in turn; none behind the last that is filled."""
    s = tl.arange(0, S)
    filled = tl.max(tl.where(tl.load(load + s, s < slots, other=-1) >= 0, s + 1, 0), 0)
    for number in range(tl.program_id(0), count * filled, tl.num_programs(0)):
        slot = number // count
        expert = tl.load(load + slot)
        if expert >= 0:
            _copy_piece(pieces, number % count, tl.load(places + expert), slot, B)


def fetch_aside(pieces: Tensor, load: Tensor, places: Tensor) -> None:
    """The same by a few programs, which leave the multiprocessors to kernels that compute meanwhile."""
    count, slots = pieces.shape[0], load.shape[0]
    _fetch_aside_kernel[(min(FETCHERS, count * slots),)](
        pieces, load, places, count, slots, B=PIECE, S=triton.next_power_of_2(slots), num_warps=8
    )


@triton.jit(do_not_specialize=["experts", "slots", "length"])
def _list_missing_kernel(  # type: ignore[no-untyped-def]
    table, needed, load, where, experts, slots, length, ASKED: tl.constexpr, E: tl.constexpr
):  # fmt: skip
    e = tl.arange(0, E)
    slot = tl.load(table + e, e < experts, other=0)
    missing = slot < 0
    if ASKED:
        missing = missing & (tl.load(needed + e, e < experts, other=0) > 0)
    turn = tl.cumsum(missing.to(tl.int32), 0) - 1
    tl.store(where + e, tl.where(missing, slots + turn, slot), e < experts)
    tl.store(load + turn, e, missing)
    tl.store(load + e, -1, (e >= tl.sum(missing.to(tl.int32), 0)) & (e < length))


def list_missing(residency: Residency, needed: Tensor | None, load: Tensor, where: Tensor) -> None:
    """Writes into `load` the experts that are not on the device, of the needed ones [experts] if they are given: one
    behind the other, then -1; and into `where` the slot of each expert, behind all slots its place in `load`."""
    experts, length = residency.experts, load.shape[0]
    _list_missing_kernel[(1,)](
        residency.table, residency.table if needed is None else needed, load, where, experts, residency.slots, length,
        ASKED=needed is not None, E=triton.next_power_of_2(max(experts, length)), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["place", "slot"])
def _exchange_kernel(pieces, place, slot, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """One piece, as `_copy_piece` knows them, of an expert there and of another here change places."""
    piece = pieces + tl.program_id(0) * 5
    size, first = tl.load(piece + 2), tl.load(piece + 3)
    count = tl.multiple_of(tl.load(piece + 4), 4)
    o = tl.arange(0, B)
    there = tl.load(piece).to(tl.pointer_type(tl.int32)) + place * size + first + o
    here = tl.load(piece + 1).to(tl.pointer_type(tl.int32)) + slot * size + first + o
    there = tl.max_contiguous(tl.multiple_of(there, 16), B)
    here = tl.max_contiguous(tl.multiple_of(here, 16), B)
    comes = tl.load(there, o < count, cache_modifier=".cg")
    goes = tl.load(here, o < count)
    tl.store(here, comes, o < count)
    tl.store(there, goes, o < count)


def exchange(pieces: Tensor, place: int, slot: int) -> None:
    """The experts at a place in host memory and in a slot, counted as the pieces count them, change places."""
    _exchange_kernel[(pieces.shape[0],)](pieces, place, slot, B=PIECE, num_warps=8)


@triton.jit(do_not_specialize=["pairs", "rows"])
def _ask_kernel(  # type: ignore[no-untyped-def]
    h, ids, slots, weights, kept, places, layer, count, asked, head, box_place, box_row, box_weight, x, number, gone,
    pairs, rows, hidden, USED: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """One program: pairs that have no slot go to the host; here they keep slot 0 with no weight."""
    p = tl.arange(0, P)
    slot = tl.load(slots + p, p < pairs, other=0)
    weight = tl.load(weights + p, p < pairs, other=0.0)
    place = tl.load(places + tl.load(ids + p, p < pairs, other=0), p < pairs, other=0)
    away = (slot < 0) & (p < pairs)
    some = tl.sum(away.to(tl.int32), 0)
    tl.store(count, some)
    if some > 0:
        _ask(
            h, away, some, place, weight, layer, asked, head, box_place, box_row, box_weight, x, number, gone,
            rows, hidden, USED, P,
        )  # fmt: skip
    tl.store(slots + p, tl.maximum(slot, 0), p < pairs)
    tl.store(kept + p, tl.where(away, 0.0, weight), p < pairs)


def ask(mailbox: Mail, places: Tensor, h: Tensor, ids: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
    """The weights that are left for the device. `slots` are those of `admit`, and all name one afterwards."""
    kept = torch.empty_like(weights)
    rows, hidden = h.shape
    _ask_kernel[(1,)](
        h.contiguous(), ids, slots, weights, kept, places, *mailbox[1:], ids.numel(), rows, hidden,
        USED=ids.shape[1], P=triton.next_power_of_2(ids.numel()), num_warps=4
    )  # fmt: skip
    return kept


@triton.jit
def _collect_kernel(  # type: ignore[no-untyped-def]
    total, count, number, gone, done, lost, out, patience, size, B: tl.constexpr
):  # fmt: skip
    """Add what the host has computed, once it has; not a number if it did not answer, so that nothing plausible comes
    of it."""
    if tl.load(count) > 0:
        fine = host_answered(number, gone, done, lost, patience)
        k = tl.program_id(0) * B + tl.arange(0, B)
        share = tl.load(out.to(tl.pointer_type(tl.float32)) + k, k < size, other=0.0, volatile=True)
        share = tl.where(fine, share, float("nan"))
        tl.store(total + k, tl.load(total + k, k < size, other=0.0).to(tl.float32) + share, k < size)


def collect(answer: ColdAnswer, total: Tensor) -> None:
    """total [rows, hidden] gets the share of the pairs that `ask` sent away."""
    block = min(1024, triton.next_power_of_2(total.numel()))
    _collect_kernel[(triton.cdiv(total.numel(), block),)](
        total, answer.count, *answer.waiting, total.numel(), B=block, num_warps=4
    )  # fmt: skip

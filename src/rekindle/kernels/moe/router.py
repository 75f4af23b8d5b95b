"""The router on a GPU: logits of all experts, and the `used` largest of every row with their weights."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels.device import pdl_arguments
from rekindle.kernels.matmul.ptx import ask_for
from rekindle.kernels.matmul.tile_semaphores import is_last_program, semaphores
from rekindle.kernels.moe.naive import LEAST_SUM

ROUTED_ROWS = 64  # up to here the logits are computed by the kernel below, beyond by the vendor's library


@triton.jit
def chosen(logits, experts, least, USED: tl.constexpr, E: tl.constexpr, PLACES: tl.constexpr):
    """(ids, weights), both [PLACES], of the USED largest of one row's logits, largest first: each round takes the
    largest key that is left.

    A key orders by logit (its bits, made to rise with the number), then by the lowest id.
    """
    e = tl.arange(0, E)
    logit = tl.load(logits + e, e < experts, other=float("-inf"), cache_modifier=".cg") + 0.0  # no minus zero
    top = tl.max(logit, 0)
    every = tl.sum(tl.exp(logit - top), 0)
    bits = logit.to(tl.int32, bitcast=True)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    taken = tl.full([E], -0x8000000000000000, tl.int64)
    key = tl.where(e < experts, (rising.to(tl.int64) << 32) | (E - 1 - e).to(tl.int64), taken)
    place = tl.arange(0, PLACES)
    keys = tl.zeros([PLACES], tl.int64)
    for p in tl.static_range(USED):
        best = tl.max(key, 0)
        keys = tl.where(place == p, best, keys)
        key = tl.where(key == best, taken, key)
    rising = (keys >> 32).to(tl.int32)
    logit = (rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    chance = tl.where(place < USED, tl.exp(logit - top) / every, 0.0)
    total = tl.maximum(tl.sum(chance, 0), least)
    return E - 1 - (keys & 0xFFFFFFFF).to(tl.int32), chance / total


@triton.jit
def _choose(logits, ids, weights, experts, least, USED: tl.constexpr, E: tl.constexpr, PLACES: tl.constexpr):
    place = tl.arange(0, PLACES)
    id, weight = chosen(logits, experts, least, USED, E, PLACES)
    tl.store(ids + place, id, place < USED)
    tl.store(weights + place, weight, place < USED)


@triton.jit
def store_logits(
    h, router, logits, rows, experts, hidden,
    BE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BE logits of BM rows, in float32."""
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    m = tl.program_id(1) * BM + tl.arange(0, BM)
    p_w = router + tl.minimum(e, experts - 1)[:, None, None] * hidden
    p_x = h + tl.minimum(m, rows - 1)[None, :, None] * hidden
    acc = tl.zeros([BE, BM, BK], tl.float32)
    if PDL:
        first = tl.arange(0, BK // 32)[None, None, :] * 32  # 128 bytes apart
        ask_for(p_w + first, (first < hidden).to(tl.int32))
        gdc_wait()
    for start in tl.range(0, hidden, BK, num_stages=1 if BM == 1 else 3):
        k = start + tl.arange(0, BK)[None, None, :]
        w = tl.load(p_w + k, k < hidden, other=0.0).to(tl.float32)
        x = tl.load(p_x + k, k < hidden, other=0.0).to(tl.float32)
        acc += w * x
    to = logits + m[None, :] * experts + e[:, None]
    tl.store(to, tl.sum(acc, 2), (e < experts)[:, None] & (m < rows)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _route_kernel(
    h, router, logits, ids, weights, semaphores, rows, experts, hidden, least,
    USED: tl.constexpr, E: tl.constexpr, PLACES: tl.constexpr,
    BE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BE logits of BM rows; of a single row the last program chooses."""
    if PDL:
        gdc_launch_dependents()
    store_logits(h, router, logits, rows, experts, hidden, BE, BM, BK, PDL)
    if BM == 1:  # noqa: SIM102 (known when it is compiled, the other is not)
        if is_last_program(semaphores, tl.num_programs(0)):
            _choose(logits, ids, weights, experts, least, USED, E, PLACES)


@triton.jit
def _choose_kernel(
    logits, ids, weights, experts, least, USED: tl.constexpr, E: tl.constexpr, PLACES: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    _choose(logits + row * experts, ids + row * USED, weights + row * USED, experts, least, USED, E, PLACES)


class RouteConfig(NamedTuple):
    """Experts, rows and columns of a program's tile, and its warps. With one row the choosing is part of the launch."""

    experts: int
    rows: int
    columns: int
    warps: int


def route_config(rows: int) -> RouteConfig:
    if rows == 1:
        return RouteConfig(1, 1, 2048, 4)
    return RouteConfig(2, 16, 512, 8) if rows > 8 else RouteConfig(2, 4, 256, 2)


def route(h: Tensor, router: Tensor, used: int, config: RouteConfig | None = None) -> tuple[Tensor, Tensor]:
    """Ids int32 and weights float32 [rows, used] of the chosen experts."""
    rows, hidden = h.shape
    experts = router.shape[0]
    config = config or route_config(rows)
    ids = torch.empty(rows, used, dtype=torch.int32, device=h.device)
    weights = torch.empty(rows, used, dtype=torch.float32, device=h.device)
    choice = {"USED": used, "E": triton.next_power_of_2(experts), "PLACES": triton.next_power_of_2(used)}
    early = pdl_arguments(h.device)
    if rows > ROUTED_ROWS:
        logits = h.float() @ router.float().T
    else:
        logits = torch.empty(rows, experts, dtype=torch.float32, device=h.device)
        _route_kernel[(triton.cdiv(experts, config.experts), triton.cdiv(rows, config.rows))](
            h.contiguous(), router, logits, ids, weights, semaphores(h.device), rows, experts, hidden, LEAST_SUM,
            BE=config.experts, BM=config.rows, BK=min(config.columns, triton.next_power_of_2(hidden)),
            num_warps=config.warps, **choice, **early,
        )  # fmt: skip
    if rows > 1:
        _choose_kernel[(rows,)](logits, ids, weights, experts, LEAST_SUM, num_warps=1, **choice, **early)
    return ids, weights

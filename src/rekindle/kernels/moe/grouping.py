"""Pairs sorted by expert: the pairs of expert e are order[starts[e] : starts[e + 1]]."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels.device import pdl_arguments


@triton.jit
def place_pairs(ids, order, starts, pairs, e, experts, B: tl.constexpr):
    """Pairs of one expert, in their order, behind those of lower experts; starts[e] is where they begin."""
    start = tl.zeros([], tl.int32)
    for at in range(0, pairs, B):
        o = at + tl.arange(0, B)
        start += tl.sum((tl.load(ids + o, o < pairs, other=2147483647) < e).to(tl.int32), 0)
    tl.store(starts + e, start)
    if e < experts:
        for at in range(0, pairs, B):
            o = at + tl.arange(0, B)
            mine = (tl.load(ids + o, o < pairs, other=-1) == e).to(tl.int32)
            tl.store(order + start + tl.cumsum(mine, 0) - 1, o, mine == 1)
            start += tl.sum(mine, 0)


@triton.jit(do_not_specialize=["pairs"])
def _group_kernel(ids, order, starts, pairs, B: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    place_pairs(ids, order, starts, pairs, tl.program_id(0), tl.num_programs(0) - 1, B)


def group(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """ids int32 [rows, used] -> (pairs sorted by expert int32 [pairs], where each expert's begin [experts + 1])."""
    order = torch.empty(ids.numel(), dtype=torch.int32, device=ids.device)
    starts = torch.empty(experts + 1, dtype=torch.int32, device=ids.device)
    _group_kernel[(experts + 1,)](
        ids, order, starts, ids.numel(), B=looked_at(ids.numel()), num_warps=4, **pdl_arguments(ids.device)
    )
    return order, starts


def looked_at(pairs: int) -> int:
    """Pairs that a program looks at together."""
    return 256 if pairs <= 256 else 1024

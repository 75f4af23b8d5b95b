"""Routed experts in NVIDIA's tensor cores, for few rows; `matmul.mma` has the products.

Every chosen expert of every row reads its own weights. A program gives 16 outputs, and its warps lie side by side along
the columns.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels.device import pdl_arguments, shared_memory_carveout
from rekindle.kernels.matmul.gemv import gemv_products
from rekindle.kernels.matmul.mma_row import (
    group_products_single,
    load_super_scales,
    load_tile_single,
    single_address,
    single_gated_over_warps,
    single_over_warps,
    store_single,
)
from rekindle.kernels.matmul.ptx import threads
from rekindle.kernels.matmul.types import Packed
from rekindle.kernels.moe.bring import answered, bring_part, take_answer, when_stored
from rekindle.kernels.moe.cold import Missing

Planes = tuple[Tensor, Tensor, Tensor, Tensor]


class TensorCoreConfig(NamedTuple):
    """Warps of a program for gate and up (half for each) and for down. By pair only: registers
    that a thread may take (0: as many as it likes)."""

    up_warps: int
    down_warps: int
    registers: int = 0

    @property
    def limit(self) -> dict[str, int]:
        return {"maxnreg": self.registers} if self.registers else {}


def pairs_config(rows: int) -> TensorCoreConfig:
    return TensorCoreConfig(8, 16, registers=80) if rows == 1 else TensorCoreConfig(8, 8)


@triton.jit
def _gated_row(
    x, out, base, at, width, codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales, up_super_scales,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """silu(gate x) · (up x) for 16 outputs from `at` on, of the expert whose rows begin at `base`."""
    g, _, warp = threads(WARPS)
    row = base + (at + g).to(tl.int64)  # down's types have it that width is a multiple of 256
    is_up = warp % 2 == 1
    codes = tl.where(is_up, up_codes, codes)
    high_bits = tl.where(is_up, up_high_bits, high_bits)
    scales = tl.where(is_up, up_scales, scales)
    super_scales = tl.where(is_up, up_super_scales, super_scales)
    acc = gemv_products(
        single_address(x, WARPS), codes, high_bits, scales, super_scales, row, warp // 2, 0,
        COLUMNS, TYPE, WARPS // 2, 1, PDL,
    )  # fmt: skip
    store_single(out, single_gated_over_warps(acc, WARPS), at, width)


@shared_memory_carveout
@triton.jit(do_not_specialize=["count"])
def _up_pairs_kernel(
    h, ids, inner, share, scale, width,
    codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales, up_super_scales,
    s_codes, s_high_bits, s_scales, s_super_scales, s_up_codes, s_up_high_bits, s_up_scales, s_up_super_scales,
    sources, pieces, count, asked, answer, number, gone, done, lost, theirs, patience,
    USED: tl.constexpr, SHARED: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, S_TYPE: tl.constexpr,
    WORDS: tl.constexpr, HELPED: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """inner[row, place, :] for a chosen expert; place USED is the shared expert, which also leaves its share.

    WORDS, unless 0: an expert with a source is brought to its slot first, in pieces of so many words. HELPED: the host
    may compute some, whose pairs are multiplied here too but with no weight; a program of the last place takes its
    answer in.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(2)
    place = tl.program_id(1)
    at = tl.program_id(0) * 16
    x = h + row.to(tl.int64) * COLUMNS
    out = inner + (row * (USED + SHARED) + place).to(tl.int64) * width
    if place < USED:
        if PDL:
            gdc_wait()
        slot = tl.load(ids + row * USED + place).to(tl.int64)
        base = slot * width
        if WORDS > 0:
            source = tl.load(sources + row * USED + place).to(tl.int64)
            if source >= 0:
                bring_part(pieces, count, tl.program_id(0), source, slot, WORDS)
                base = when_stored(base, WARPS)
        _gated_row(
            x, out, base, at, width, codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales,
            up_super_scales,
            COLUMNS, TYPE, WARPS, False,
        )  # fmt: skip
    elif SHARED:
        _gated_row(
            x, out, 0, at, width, s_codes, s_high_bits, s_scales, s_super_scales, s_up_codes, s_up_high_bits,
            s_up_scales,
            s_up_super_scales, COLUMNS, S_TYPE, WARPS, PDL,
        )  # fmt: skip
        if at == 0:
            k = tl.arange(0, 256)
            dot = tl.zeros([256], tl.float32)
            for start in range(0, COLUMNS, 256):
                dot += tl.load(x + start + k).to(tl.float32) * tl.load(scale + start + k).to(tl.float32)
            tl.store(share + row, tl.sigmoid(tl.sum(dot, 0)))
    if HELPED and (place == USED + SHARED - 1) & (at == 0):
        take_answer(answer, asked, number, gone, done, lost, theirs, patience, COLUMNS)


@triton.jit
def _load_turn(
    ids, weights, planes, source, n, n2, x, turn, width,
    USED: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """A group of one of the row's experts, the expert's weight, and where the group's x is."""
    codes, high_bits, scales, super_scales = planes
    groups: tl.constexpr = COLUMNS // 128
    live = turn < USED * groups
    turn = tl.minimum(turn, USED * groups - 1)
    place = turn // groups
    group = turn % groups
    t = threads(turn.shape[1] // 32)[1]
    first = tl.load(ids + source * USED + place).to(tl.int64) * width
    both = load_super_scales(super_scales, first + n, first + n2, group, live, COLUMNS)
    tile = load_tile_single(codes, high_bits, scales, both, first + n, first + n2, group, live, t, COLUMNS, TYPE)
    return tile, tl.load(weights + source * USED + place), x + turn * 256


@shared_memory_carveout
@triton.jit
def _down_pairs_kernel(
    inner, ids, weights, share, out, width,
    codes, high_bits, scales, super_scales, s_codes, s_high_bits, s_scales, s_super_scales, asked, answer,
    USED: tl.constexpr, SHARED: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, S_TYPE: tl.constexpr,
    HELPED: tl.constexpr, WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """16 outputs of one row: the steps of all its experts are dealt to the warps, then the shared expert's. HELPED: the
    host may have computed some of them."""
    if PDL:
        gdc_launch_dependents()
    source = tl.program_id(1)
    at = tl.program_id(0) * 16
    groups: tl.constexpr = COLUMNS // 128
    g, t, warp = threads(WARPS)
    n = tl.minimum(at + g, width - 1).to(tl.int64)
    n2 = tl.minimum(at + g + 8, width - 1).to(tl.int64)
    x = single_address(inner + source.to(tl.int64) * (USED + SHARED) * COLUMNS, WARPS)
    nought = tl.zeros(warp.shape, tl.float32)
    acc = (nought, nought, nought, nought)
    if SHARED:  # asked for before the wait
        live = warp < groups
        both = load_super_scales(s_super_scales, n, n2, warp, live, COLUMNS)
        tile = load_tile_single(s_codes, s_high_bits, s_scales, both, n, n2, warp, live, t, COLUMNS, S_TYPE)
    if PDL:
        gdc_wait()
    if HELPED:
        was_asked, is_first = tl.load(asked) > 0, (warp == 0) & (t == 0)
        upper = answered(answer, was_asked, at + g, is_first, width)
        acc = (upper, nought, answered(answer, was_asked, at + g + 8, is_first, width), nought)
    if SHARED:
        part = tl.load(share + source)
        for start in range(0, groups, WARPS):
            group = start + warp
            address = x + USED * 2 * COLUMNS + tl.minimum(group, groups - 1) * 256
            acc = group_products_single(acc, tile, address, g, part, S_TYPE)
            group += WARPS
            live = group < groups
            both = load_super_scales(s_super_scales, n, n2, group, live, COLUMNS)
            tile = load_tile_single(s_codes, s_high_bits, s_scales, both, n, n2, group, live, t, COLUMNS, S_TYPE)
    planes = codes, high_bits, scales, super_scales
    turn = warp
    tile, weight, address = _load_turn(ids, weights, planes, source, n, n2, x, turn, width, USED, COLUMNS, TYPE)
    for _ in range(0, USED * groups, WARPS):
        now, factor, here = tile, weight, address
        turn += WARPS
        tile, weight, address = _load_turn(ids, weights, planes, source, n, n2, x, turn, width, USED, COLUMNS, TYPE)
        acc = group_products_single(acc, now, here, g, factor, TYPE)
    to = source.to(tl.int64) * width
    store_single(out + to, single_over_warps(acc, WARPS), at, width)


def by_pair(
    h: Tensor, ids: Tensor, weights: Tensor, gate: Packed, up: Packed, down: Packed, width: int,
    shared: tuple[Packed, Packed, Packed, Tensor] | None,
    config: TensorCoreConfig | None = None, missing: Missing | None = None,
) -> Tensor:  # fmt: skip
    """Two launches for everything; gate and up are of one type, and so are the shared expert's. `missing`: of one row,
    whose experts have distinct slots."""
    rows, hidden = h.shape
    assert missing is None or rows == 1, f"{rows} rows may bring an expert twice"
    config = config or pairs_config(rows)
    early = pdl_arguments(h.device)
    used = ids.shape[1]
    h = h.contiguous()
    s_gate, s_up, s_down, scale = shared or (gate, up, down, h)
    places = used + (shared is not None)
    inner = torch.empty(rows, places, width, dtype=h.dtype, device=h.device)
    share = torch.empty(rows, dtype=torch.float32, device=h.device)
    answer = None if missing is None else missing.answer
    _up_pairs_kernel[(triton.cdiv(width, 16), places, rows)](
        h, ids, inner, share, scale, width, *planes(gate), *planes(up), *planes(s_gate), *planes(s_up),
        *((ids, ids, 0) if missing is None else missing.arguments),
        *((ids, h, ids, ids, 0, 0, 0, 0) if answer is None else (answer.count, answer.here, *answer.waiting)),
        USED=used, SHARED=shared is not None, COLUMNS=hidden, TYPE=gate.type, S_TYPE=s_gate.type,
        WORDS=0 if missing is None else missing.parts.words, HELPED=answer is not None, WARPS=config.up_warps,
        num_warps=config.up_warps, num_stages=1,
        **config.limit, **early,
    )  # fmt: skip
    out = torch.empty(rows, hidden, dtype=h.dtype, device=h.device)
    _down_pairs_kernel[(triton.cdiv(hidden, 16), rows)](
        inner, ids, weights, share, out, hidden,
        *planes(down), *planes(s_down), *((ids, h) if answer is None else (answer.count, answer.here)),
        USED=used, SHARED=shared is not None, COLUMNS=width, TYPE=down.type, S_TYPE=s_down.type,
        HELPED=answer is not None, WARPS=config.down_warps,
        num_warps=config.down_warps, num_stages=1, **config.limit, **early,
    )  # fmt: skip
    return out


def planes(weight: Packed) -> Planes:
    assert weight.super_scales is not None, f"{weight.type} has super_scales"
    return (
        weight.codes,
        weight.codes if weight.high_bits is None else weight.high_bits,
        weight.scales,
        weight.super_scales,
    )

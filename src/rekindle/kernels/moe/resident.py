"""Routed experts of two to eight rows in NVIDIA's integer tensor cores, all programs of a launch on the card at once.

Products are those of `integers`: a launch before makes integers of x. A warp has so many columns that what it does
before and after them is little, and with at most 64 registers every program has its place from the beginning, so that
no multiprocessor waits for the last few. A warp of gate and up has 8 outputs, the rows g of both; one of down has 16
outputs, and the turns (256 columns of an expert) of a row are dealt to the warps of a program.

An expert's pairs are taken by twos in their order, by the program of the first of both; one that is left over goes
alone. Which experts are chosen is known when gate and up begin; so down asks for its first turn before it waits for
them.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels.device import pdl_arguments, shared_memory_carveout
from rekindle.kernels.matmul.gemv import load_codes
from rekindle.kernels.matmul.ptx import threads
from rekindle.kernels.matmul.tiles import bits_of
from rekindle.kernels.matmul.types import Packed
from rekindle.kernels.moe.integers import empty_whole, group_sums, over_quads, store_whole, whole_row
from rekindle.kernels.moe.tensor_core import planes


class ResidentConfig(NamedTuple):
    """Warps of gate and up: `along` the outputs times `across` the columns. Warps of down. `twos`: two pairs of an
    expert go together."""

    along: int
    across: int
    down_warps: int
    twos: bool


REGISTERS = 64  # of a thread: 32 warps have a place on a multiprocessor


def resident_config(rows: int) -> ResidentConfig:
    """As many warps as the card has places for: with fewer rows more of them along the columns. As timed by
    `scripts/gpu/bench_moe.py`."""
    if rows <= 3:
        return ResidentConfig(4, 4, 16, twos=False)
    return ResidentConfig(4, 2, 8 if rows <= 5 else 4, twos=True)


# ---- x -------------------------------------------------------------------------------------------------------------


@triton.jit
def _whole_kernel(x, values, entries, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    whole_row(x, values, entries, tl.program_id(0))


# ---- products ------------------------------------------------------------------------------------------------------


@triton.jit
def held(number):
    """The number, once every load before this is on its way (`gemv.hold`). The compiler cannot follow it: else it would
    keep an address for every plane, in two registers each."""
    return tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [number], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _load_row(planes, at, on: tl.constexpr, TYPE: tl.constexpr):
    """Of one row for both groups of a turn: 4 words, scales of block t, upper bits; and the super scale. at: the number
    of block t of the turn, int32; on: blocks further, a distance that the loads carry."""
    codes, high_bits, scales, super_scales = planes
    scales = scales.to(tl.pointer_type(tl.uint16))  # so that a load leaves no sign to be extended
    c, e, h = codes + at.to(tl.int64) * 4, scales + at, high_bits + at
    w0, w1, w2, w3 = load_codes(c + 4 * on, 1)
    v0, v1, v2, v3 = load_codes(c + 4 * on + 16, 1)
    scale, scale2 = tl.load(e + on).to(tl.int32), tl.load(e + (on + 4)).to(tl.int32)
    upper = tl.load(h + on) if bits_of(TYPE) > 4 else w0
    upper2 = tl.load(h + (on + 4)) if bits_of(TYPE) > 4 else v0
    super = tl.load(super_scales + (at >> 3) + on // 8)
    return (w0, w1, w2, w3, scale, upper), (v0, v1, v2, v3, scale2, upper2), super


@triton.jit
def _load_half(planes, at, on: tl.constexpr, TYPE: tl.constexpr):
    """As `_load_row`, for one group."""
    codes, high_bits, scales, super_scales = planes
    scales = scales.to(tl.pointer_type(tl.uint16))
    w0, w1, w2, w3 = load_codes(codes + at.to(tl.int64) * 4 + 4 * on, 1)
    upper = tl.load(high_bits + at + on) if bits_of(TYPE) > 4 else w0
    super = tl.load(super_scales + (at >> 3) + on // 8)
    return (w0, w1, w2, w3, tl.load(scales + at + on).to(tl.int32), upper), super


@triton.jit
def _turn_sums(acc, first, second, values, entries, TYPE: tl.constexpr):
    """acc += a turn of two rows of matrices, as `_load_row` gives them. values, entries: of the turn's first block, and
    of its block t; addresses [PAIRS, threads]."""
    a, b = first[0], second[0]
    a = (a[0], a[1], a[2], a[3], a[4], first[2], a[5])
    b = (b[0], b[1], b[2], b[3], b[4], second[2], b[5])
    acc = group_sums(acc, a, b, values, entries, TYPE)
    a, b = first[1], second[1]
    a = (a[0], a[1], a[2], a[3], a[4], first[2], a[5])
    b = (b[0], b[1], b[2], b[3], b[4], second[2], b[5])
    return group_sums(acc, a, b, values + 256, entries + 64, TYPE)


# ---- gate and up ---------------------------------------------------------------------------------------------------


@triton.jit
def _partner(ids, pair, pairs, id, WORDS: tl.constexpr):
    """(pairs before this one that have its expert, the next one that has it or else this one)."""
    before = 0
    after = pairs
    for word in tl.static_range(WORDS):
        o = 32 * word + tl.arange(0, 32)
        same = tl.load(ids + o, o < pairs, other=-1) == id
        before += tl.sum((same & (o < pair)).to(tl.int32), 0)
        after = tl.minimum(after, tl.min(tl.where(same & (o > pair), o, pairs), 0))
    return before, tl.where(after < pairs, after, pair)


@triton.jit
def _share_of(x, scale, share, row, COLUMNS: tl.constexpr):
    """What the shared expert's outputs of a row are multiplied by."""
    k = tl.arange(0, 256)
    dot = tl.zeros([256], tl.float32)
    for start in range(0, COLUMNS, 256):
        here = tl.load(x + row * COLUMNS + start + k).to(tl.float32)
        dot += here * tl.load(scale + start + k).to(tl.float32)
    tl.store(share + row, tl.sigmoid(tl.sum(dot, 0)))


@triton.jit
def _gated_sums(
    values, entries, source, first, second, base, at, turn, inner, inner_entries, to, width,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, ALONG: tl.constexpr, ACROSS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """silu(gate x) · (up x) as integers for the outputs from `at` on of the rows `source` [PAIRS] of x, to the rows
    `to` [PAIRS]; base: where the expert's rows begin."""
    g, t, warp = threads(ALONG * ACROSS)
    block = (base + at + 8 * (warp % ALONG) + g) * (COLUMNS // 32) + turn * 8 + t
    x = (source * (COLUMNS // 32))[:, None] + turn * 8 + t
    nought = tl.zeros(x.shape, tl.float32)
    acc = (nought, nought)
    for _ in tl.range(0, COLUMNS // (256 * ACROSS), loop_unroll_factor=1):
        loaded, loaded2 = _load_row(first, block, 0, TYPE), _load_row(second, block, 0, TYPE)
        block = held(block + 8 * ACROSS)
        value = (values + (x - t).to(tl.int64) * 64).to(tl.int64)
        entry = (entries + x.to(tl.int64) * 4).to(tl.int64)
        acc = _turn_sums(acc, loaded, loaded2, value, entry, TYPE)
        x += 8 * ACROSS
    gate, up = _over_columns(acc[0], ALONG, ACROSS), _over_columns(acc[1], ALONG, ACROSS)
    store_whole(gate * tl.sigmoid(gate) * up, inner, inner_entries, to.to(tl.int64) * (width // 32) + at // 32)


@triton.jit
def _over_columns(acc, ALONG: tl.constexpr, ACROSS: tl.constexpr):
    total = over_quads(acc)
    if ACROSS > 1:
        total = tl.sum(tl.reshape(total, (acc.shape[0], ACROSS, ALONG * 8)), 1)
    return total


@shared_memory_carveout
@triton.jit(do_not_specialize=["rows", "pairs"])
def _up_kernel(
    h, values, entries, ids, inner, inner_entries, share, scale, rows, pairs, width,
    codes, high_bits, scales, super_scales, up_codes, up_high_bits, up_scales, up_super_scales,
    s_codes, s_high_bits, s_scales, s_super_scales, s_up_codes, s_up_high_bits, s_up_scales, s_up_super_scales,
    USED: tl.constexpr, SHARED: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, S_TYPE: tl.constexpr,
    ALONG: tl.constexpr, ACROSS: tl.constexpr, TWO: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """inner [pairs, width] of the chosen experts and, behind them, the shared expert's of every row, as integers. The
    first programs have its share, then itself."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # not before: down reads `ids`, and weights, before it waits for this launch
    number = tl.program_id(1)
    at = tl.program_id(0) * (8 * ALONG)
    _, _, warp = threads(ALONG * ACROSS)
    turn = warp // ALONG
    ahead = tl.cdiv(rows, 1 + TWO) + 1 if SHARED else 0
    pair = number - ahead
    which = tl.arange(0, 1 + TWO)
    if pair >= 0:
        id = tl.load(ids + pair)
        before, other = 0, pair
        if TWO:
            before, other = _partner(ids, pair, pairs, id, WORDS)
        if before % 2 == 0:
            if other == pair:
                only = pair + tl.arange(0, 1)
                _gated_sums(
                    values, entries, only // USED, (codes, high_bits, scales, super_scales),
                    (up_codes, up_high_bits, up_scales, up_super_scales), id * width, at, turn,
                    inner, inner_entries, only, width, COLUMNS, TYPE, ALONG, ACROSS, 1,
                )  # fmt: skip
            elif TWO:
                both = tl.where(which == 0, pair, other)
                _gated_sums(
                    values, entries, both // USED, (codes, high_bits, scales, super_scales),
                    (up_codes, up_high_bits, up_scales, up_super_scales), id * width, at, turn,
                    inner, inner_entries, both, width, COLUMNS, TYPE, ALONG, ACROSS, 1 + TWO,
                )  # fmt: skip
    elif SHARED:
        if number == 0:
            for m in range(tl.program_id(0), rows, tl.num_programs(0)):
                _share_of(h, scale, share, m, COLUMNS)
        else:
            row = tl.minimum((number - 1) * (1 + TWO) + which, rows - 1)
            _gated_sums(
                values, entries, row, (s_codes, s_high_bits, s_scales, s_super_scales),
                (s_up_codes, s_up_high_bits, s_up_scales, s_up_super_scales), 0, at, turn,
                inner, inner_entries, pairs + row, width, COLUMNS, S_TYPE, ALONG, ACROSS, 1 + TWO,
            )  # fmt: skip


# ---- down ----------------------------------------------------------------------------------------------------------


@triton.jit
def _over_warps(acc, WARPS: tl.constexpr):
    return tl.sum(tl.sum(tl.reshape(acc, (WARPS, 8, 4)), 2), 0)


@shared_memory_carveout
@triton.jit(do_not_specialize=["pairs"])
def _down_kernel(
    inner, inner_entries, ids, weights, share, out, pairs, width,
    codes, high_bits, scales, super_scales, s_codes, s_high_bits, s_scales, s_super_scales,
    USED: tl.constexpr, SHARED: tl.constexpr, COLUMNS: tl.constexpr, TYPE: tl.constexpr, S_TYPE: tl.constexpr,
    WARPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """16 outputs of one row."""
    if PDL:
        gdc_launch_dependents()
    TURNS: tl.constexpr = COLUMNS // 256
    source = tl.program_id(1)
    at = tl.program_id(0) * 16
    g, t, warp = threads(WARPS)
    n = at + g
    nought = tl.zeros(n.shape, tl.float32)
    total, total2 = nought, nought
    chosen = ids + source * USED
    last: tl.constexpr = USED * TURNS - 1
    # May be read before the wait: gate and up, which let this launch begin, had waited for them.
    id = tl.load(chosen + tl.minimum(warp, last) // TURNS, cache_modifier=".cg")
    planes = codes, high_bits, scales, super_scales
    for start in tl.range(0, USED * TURNS, WARPS, loop_unroll_factor=1):
        turn = tl.minimum(start + warp, last)
        block = (id * width + n) * (COLUMNS // 32) + turn % TURNS * 8 + t
        first, second = _load_row(planes, block, 0, TYPE), _load_row(planes, block, COLUMNS // 4, TYPE)
        id = tl.load(chosen + tl.minimum(start + WARPS + warp, last) // TURNS, cache_modifier=".cg")
        weight = tl.load(weights + source * USED + turn // TURNS, cache_modifier=".cg")
        weight = tl.where(start + warp <= last, weight, 0.0)
        x = (source * USED * TURNS + turn) * 8
        if PDL:
            gdc_wait()
        else:
            x = held(x)
        value = (inner + x.to(tl.int64) * 64).to(tl.int64)
        entry = (inner_entries + (x + t).to(tl.int64) * 4).to(tl.int64)
        acc = _turn_sums((nought, nought), first, second, value, entry, TYPE)
        total += weight * acc[0]
        total2 += weight * acc[1]
    if SHARED:
        part = tl.load(share + source)
        planes = s_codes, s_high_bits, s_scales, s_super_scales
        for start in tl.range(0, 2 * TURNS, WARPS, loop_unroll_factor=1):
            half = tl.minimum(start + warp, 2 * TURNS - 1)
            block = n * (COLUMNS // 32) + half * 4 + t
            a, super = _load_half(planes, block, 0, S_TYPE)
            b, super2 = _load_half(planes, block, COLUMNS // 4, S_TYPE)
            x = held(((pairs + source) * TURNS * 2 + half) * 4)
            value = (inner + x.to(tl.int64) * 64).to(tl.int64)
            entry = (inner_entries + (x + t).to(tl.int64) * 4).to(tl.int64)
            a = (a[0], a[1], a[2], a[3], a[4], super, a[5])
            b = (b[0], b[1], b[2], b[3], b[4], super2, b[5])
            acc = group_sums((nought, nought), a, b, value, entry, S_TYPE)
            weight = tl.where(start + warp < 2 * TURNS, part, 0.0)
            total += weight * acc[0]
            total2 += weight * acc[1]
    k = at + tl.arange(0, 8)
    to = out + source.to(tl.int64) * width + k
    tl.store(to, _over_warps(total, WARPS))
    tl.store(to + 8, _over_warps(total2, WARPS))


def run(
    h: Tensor, ids: Tensor, weights: Tensor, gate: Packed, up: Packed, down: Packed, width: int,
    shared: tuple[Packed, Packed, Packed, Tensor] | None, config: ResidentConfig,
) -> Tensor:  # fmt: skip
    """As `tensor_core.by_pair`."""
    (rows, hidden), used, pairs = h.shape, ids.shape[1], ids.numel()
    early = pdl_arguments(h.device)
    h = h.contiguous()
    s_gate, s_up, _, scale = shared or (gate, up, down, h)
    extra = shared is not None
    x = empty_whole(rows, hidden, h.device)
    _whole_kernel[(h.numel() // 256,)](h, *x, num_warps=4, **early)
    inner = empty_whole(pairs + extra * rows, width, h.device)
    share = torch.empty(rows, dtype=torch.float32, device=h.device)
    programs = pairs + extra * (triton.cdiv(rows, 1 + config.twos) + 1)
    across = math.gcd(config.across, hidden // 256)  # of narrow rows fewer: none is without a turn
    warps = config.along * across
    _up_kernel[(width // (8 * config.along), programs)](
        h, *x, ids, *inner, share, scale, rows, pairs, width,
        *planes(gate), *planes(up), *planes(s_gate), *planes(s_up),
        USED=used, SHARED=extra, COLUMNS=hidden, TYPE=gate.type, S_TYPE=s_gate.type,
        ALONG=config.along, ACROSS=across, TWO=config.twos, WORDS=2 * triton.cdiv(pairs, 64),
        num_warps=warps, num_stages=1, maxnreg=REGISTERS, **early,
    )  # fmt: skip
    return _summed(h, *inner, ids, weights, share, down, shared, config)


def _summed(
    h: Tensor, inner: Tensor, entries: Tensor, ids: Tensor, weights: Tensor, share: Tensor, down: Packed,
    shared: tuple[Packed, Packed, Packed, Tensor] | None, config: ResidentConfig,
) -> Tensor:  # fmt: skip
    rows, hidden = h.shape
    out = torch.empty(rows, hidden, dtype=h.dtype, device=h.device)
    s_down = down if shared is None else shared[2]
    _down_kernel[(hidden // 16, rows)](
        inner, entries, ids, weights, share, out, ids.numel(), hidden, *planes(down), *planes(s_down),
        USED=ids.shape[1], SHARED=shared is not None, COLUMNS=inner.shape[1] * 32, TYPE=down.type, S_TYPE=s_down.type,
        WARPS=config.down_warps,
        num_warps=config.down_warps, num_stages=1, maxnreg=REGISTERS, **pdl_arguments(h.device),
    )  # fmt: skip
    return out

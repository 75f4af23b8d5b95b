"""Products of grouped planes in NVIDIA's tensor cores, written thread by thread.

Every tensor here is [1 or N_TILES, 32 · warps]: one element per thread and n-tile (eight rows of x), so that an element
is a register and a warp instruction can be issued from inline assembly. A warp multiplies 16 rows of the matrix by
8 · N_TILES rows of x; thread 4 · g + t of it holds matrix rows g and g + 8 and row g of each n-tile, and of the
products the columns 2 · t and 2 · t + 1 (the register order of mma.m16n8k16).

A code q enters as the bfloat16 number 128 + q, which is one or-instruction for two codes. What the 128 adds, and the
minima of the types that have them, are taken off by way of −128 · Σ x over the block, which the tensor core gives too.
One step is a group: 128 columns, 4 blocks, half an entry of `super_scales`.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from rekindle.kernels.matmul.packing import GROUPED
from rekindle.kernels.matmul.ptx import (
    ask_for,
    bring,
    byte_as_float,
    lifted_nibbles,
    load_four,
    load_scales,
    load_two,
    mma,
    threads,
    with_bits,
)
from rekindle.kernels.matmul.tiles import bits_of, half_at, has_minimum, zero_of
from rekindle.kernels.matmul.types import Packed

TILE = 16  # rows of a matrix that a matrix instruction takes


def available(x: Tensor) -> bool:
    """The card runs these instructions, and x is of the type they take."""
    return x.is_cuda and torch.version.hip is None and x.dtype == torch.bfloat16 and _has_tensor_cores(x.device)


def takes(weight: Packed) -> bool:
    return weight.type in GROUPED and weight.rows >= TILE


@functools.cache
def _has_tensor_cores(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


@triton.constexpr_function
def lift_of(type):
    """Two bfloat16 numbers −(128 + zero): −128 is 0xC300, −160 is 0xC320, as a signed 32-bit number."""
    half = 0xC300 + zero_of(type)
    return (half << 16 | half) - (1 << 32)


@triton.jit
def load_group(codes, high_bits, scales, super_scales, row, group, live, t, COLUMNS: tl.constexpr, TYPE: tl.constexpr):
    """What this thread needs of one row (int64 [1, threads]) for one group: 4 words, 2 of scales, the super scale,
    high bits.     A group that is not live (past the end) has any codes, and factors of zero."""
    group = tl.minimum(group, COLUMNS // 128 - 1)
    block = row * (COLUMNS // 32) + group * 4
    w0, w1, w2, w3 = load_four(codes + block * 4 + t * 4, live.to(tl.int32))
    e0, e1 = load_scales(scales + block)
    super = tl.load(super_scales + row * (COLUMNS // 256) + group // 2, live, other=0)
    h = tl.load(high_bits + block + t) if bits_of(TYPE) > 4 else w0
    return w0, w1, w2, w3, e0, e1, super, h


@triton.jit
def ask_for_codes(codes, high_bits, row, block, live, t, COLUMNS: tl.constexpr, TYPE: tl.constexpr):
    """The codes of the group of one row that begins with a block."""
    block += row * (COLUMNS // 32)
    go = live.to(tl.int32)
    ask_for(codes + block * 4 + t * 4, go)
    if bits_of(TYPE) > 4:
        ask_for(high_bits + block + t, go)


@triton.jit
def factors(super, TYPE: tl.constexpr):
    """(of scales, of minima) from the entry of super_scales; minima are taken off by way of −128 · Σ x."""
    if has_minimum(TYPE):
        return half_at(super & 0xFFFF), half_at(super >> 16) * (1 / 128)
    else:
        return super, super


@triton.jit
def scales_at(word, byte: tl.constexpr, d, m, TYPE: tl.constexpr):
    """The scale of a block, or of its first half, and its minimum, or the scale of the other half: bytes `byte` and
    byte + 1 of the word, times the factors.

    Fused: the product is not rounded before what was lifted is taken off, so they come out exact.
    """
    if has_minimum(TYPE):
        a = tl.fma(byte_as_float(word, byte), d, -32768.0 * d)
        return a, tl.fma(byte_as_float(word, byte + 1), m, -32768.0 * m)
    else:
        turned = word ^ -0x7F7F7F80  # 0x80808080: bytes s become s + 128
        a = tl.fma(byte_as_float(turned, byte), d, -32896.0 * d)
        return a, tl.fma(byte_as_float(turned, byte + 1), d, -32896.0 * d)


@triton.jit
def expanded_pairs(word, h, i: tl.constexpr, TYPE: tl.constexpr):
    """The four registers of block i of a group from its word and the group's upper bits."""
    p0, p1, p2, p3 = lifted_nibbles(word)
    if bits_of(TYPE) == 5:
        p0 = with_bits(p0, shifted(h, 4 * i - 4), 0x00100010)
        p1 = with_bits(p1, shifted(h, 4 * i - 3), 0x00100010)
        p2 = with_bits(p2, shifted(h, 4 * i - 2), 0x00100010)
        p3 = with_bits(p3, shifted(h, 4 * i - 1), 0x00100010)
    if bits_of(TYPE) == 6:
        half = (h >> (32 * (i // 2))).to(tl.int32)
        right: tl.constexpr = 8 * (i % 2)
        p0 = with_bits(p0, shifted(half, right - 4), 0x00300030)
        p1 = with_bits(p1, shifted(half, right - 2), 0x00300030)
        p2 = with_bits(p2, shifted(half, right), 0x00300030)
        p3 = with_bits(p3, shifted(half, right + 2), 0x00300030)
    return p0, p1, p2, p3


@triton.jit
def shifted(word, right: tl.constexpr):
    if right >= 0:
        return word >> right
    else:
        return word << -right


@triton.jit
def block_products(acc, first, second, d, m, d2, m2, b, sums, i: tl.constexpr, TYPE: tl.constexpr):
    """acc += block i of the rows `first` (factors d, m) and `second` (d2, m2) times x in the registers b."""
    c0, c1, c2, c3 = acc
    b0, b1, b2, b3 = b
    word: tl.constexpr = 4 + i // 2
    byte: tl.constexpr = 2 * (i % 2)
    p0, p1, p2, p3 = expanded_pairs(first[i], first[7], i, TYPE)
    q0, q1, q2, q3 = expanded_pairs(second[i], second[7], i, TYPE)
    if has_minimum(TYPE):
        z0, z1, z2, z3 = sums
        y0, y1, y2, y3 = mma(p0, q0, p1, q1, b0, b1, z0, z1, z2, z3)
        y0, y1, y2, y3 = mma(p2, q2, p3, q3, b2, b3, y0, y1, y2, y3)
    else:  # each half of the block has its own signed scale
        s0, s1, s2, s3, r0, r1, r2, r3 = sums
        y0, y1, y2, y3 = mma(p0, q0, p1, q1, b0, b1, s0, s1, s2, s3)
        z0, z1, z2, z3 = mma(p2, q2, p3, q3, b2, b3, r0, r1, r2, r3)
    a, n = scales_at(first[word], byte, d, m, TYPE)
    a2, n2 = scales_at(second[word], byte, d2, m2, TYPE)
    c0 += a * y0
    c1 += a * y1
    c2 += a2 * y2
    c3 += a2 * y3
    c0 += n * z0
    c1 += n * z1
    c2 += n2 * z2
    c3 += n2 * z3
    return c0, c1, c2, c3


@triton.jit
def block_sums(b, TYPE: tl.constexpr):
    """−(128 + zero) · Σ x of the block, the same for every row: a quad of registers, two where halves have scales."""
    b0, b1, b2, b3 = b
    lift: tl.constexpr = lift_of(TYPE)
    nought = tl.zeros(b0.shape, tl.float32)
    s0, s1, s2, s3 = mma(lift, lift, lift, lift, b0, b1, nought, nought, nought, nought)
    if has_minimum(TYPE):
        return mma(lift, lift, lift, lift, b2, b3, s0, s1, s2, s3)
    else:
        r0, r1, r2, r3 = mma(lift, lift, lift, lift, b2, b3, nought, nought, nought, nought)
        return s0, s1, s2, s3, r0, r1, r2, r3


@triton.jit
def load_x(address, i: tl.constexpr):
    """Block i of this thread's row of x as the registers of two matrix instructions."""
    b0, b1 = load_two(address + 64 * i)
    b2, b3 = load_two(address + 64 * i + 32)
    return b0, b1, b2, b3


@triton.jit
def group_products(acc, acc2, tile, tile2, address, TYPE: tl.constexpr, TILES: tl.constexpr):
    """acc, and acc2 where there are two tiles, += a group's weights times x; address: bytes, [N_TILES, threads]."""
    first, second = tile
    d, m = factors(first[6], TYPE)
    d2, m2 = factors(second[6], TYPE)
    third, fourth = tile2
    d3, m3 = factors(third[6], TYPE)
    d4, m4 = factors(fourth[6], TYPE)
    for i in tl.static_range(4):
        b = load_x(address, i)
        sums = block_sums(b, TYPE)
        acc = block_products(acc, first, second, d, m, d2, m2, b, sums, i, TYPE)
        if TILES == 2:
            acc2 = block_products(acc2, third, fourth, d3, m3, d4, m4, b, sums, i, TYPE)
    return acc, acc2


@triton.jit
def load_tile(
    codes, high_bits, scales, super_scales, row, row2, group, live, t, COLUMNS: tl.constexpr, TYPE: tl.constexpr
):
    first = load_group(codes, high_bits, scales, super_scales, row, group, live, t, COLUMNS, TYPE)
    return first, load_group(codes, high_bits, scales, super_scales, row2, group, live, t, COLUMNS, TYPE)


@triton.jit
def load_tiles(
    codes, high_bits, scales, super_scales, row, row2, row3, row4, group, t,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A group of rows `row` and `row2`, and of the other two where there are two tiles."""
    live = group < COLUMNS // 128
    tile = load_tile(codes, high_bits, scales, super_scales, row, row2, group, live, t, COLUMNS, TYPE)
    if TILES == 2:
        return tile, load_tile(codes, high_bits, scales, super_scales, row3, row4, group, live, t, COLUMNS, TYPE)
    else:
        return tile, tile


@triton.jit
def tile_products(
    address, codes, high_bits, scales, super_scales, row, row2, row3, row4, group,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, STRIDE: tl.constexpr, TILES: tl.constexpr, AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Rows `row` and `row2` of a matrix, a tile, and `row3` and `row4`, where there are two, times x over the groups
    group, group + STRIDE, …: four [N_TILES, threads] for each tile.

    AHEAD: the next group is asked for before this one is multiplied, at the price of registers.
    PDL: this launch began before the one that writes x was done, and waits for it here.
    """
    t = threads(group.shape[1] // 32)[1]
    groups: tl.constexpr = COLUMNS // 128
    nought = tl.zeros(address.shape, tl.float32)
    acc = (nought, nought, nought, nought)
    acc2 = acc
    if AHEAD:
        tile, tile2 = load_tiles(
            codes, high_bits, scales, super_scales, row, row2, row3, row4, group, t, COLUMNS, TYPE, TILES
        )  # fmt: skip
        if PDL:
            gdc_wait()
        for _ in range(0, groups, STRIDE):
            x = address + tl.minimum(group, groups - 1) * 256
            group += STRIDE
            tile_next, tile2_next = load_tiles(
                codes, high_bits, scales, super_scales, row, row2, row3, row4, group, t, COLUMNS, TYPE, TILES
            )  # fmt: skip
            acc, acc2 = group_products(acc, acc2, tile, tile2, x, TYPE, TILES)
            tile = tile_next
            tile2 = tile2_next
    else:
        if PDL:
            live = group < groups
            ask_for_codes(codes, high_bits, row, group * 4, live, t, COLUMNS, TYPE)
            ask_for_codes(codes, high_bits, row2, group * 4, live, t, COLUMNS, TYPE)
            if TILES == 2:
                ask_for_codes(codes, high_bits, row3, group * 4, live, t, COLUMNS, TYPE)
                ask_for_codes(codes, high_bits, row4, group * 4, live, t, COLUMNS, TYPE)
            gdc_wait()
        for _ in range(0, groups, STRIDE):
            tile, tile2 = load_tiles(
                codes, high_bits, scales, super_scales, row, row2, row3, row4, group, t, COLUMNS, TYPE, TILES
            )  # fmt: skip
            x = address + tl.minimum(group, groups - 1) * 256
            acc, acc2 = group_products(acc, acc2, tile, tile2, x, TYPE, TILES)
            group += STRIDE
    return acc, acc2


@triton.jit
def load_dense(weight, row, row2, group, t, i: tl.constexpr, COLUMNS: tl.constexpr):
    """Half i of a group of bfloat16 weights of both rows: its blocks 2 · i and 2 · i + 1."""
    column = tl.minimum(group, COLUMNS // 128 - 1) * 128 + 64 * i + 8 * t
    p, q = weight + row * COLUMNS + column, weight + row2 * COLUMNS + column
    return load_four(p, 1), load_four(q, 1), load_four(p + 32, 1), load_four(q + 32, 1)


@triton.jit
def dense_block(acc, first, second, address, live):
    """acc += 32 columns of the rows `first` and `second` times the x at address, where live."""
    c0, c1, c2, c3 = acc
    b0, b1 = load_two(address)
    b2, b3 = load_two(address + 8)
    b0, b1 = tl.where(live, b0, 0), tl.where(live, b1, 0)
    b2, b3 = tl.where(live, b2, 0), tl.where(live, b3, 0)
    c0, c1, c2, c3 = mma(first[0], second[0], first[1], second[1], b0, b1, c0, c1, c2, c3)
    return mma(first[2], second[2], first[3], second[3], b2, b3, c0, c1, c2, c3)


@triton.jit
def dense_products(address, weight, row, row2, group, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, PDL: tl.constexpr):
    """As `tile_products`, for bfloat16 weights [rows, COLUMNS]; address: that of column 8 · t of this thread's x.

    The next half of a group is asked for before this one is multiplied: a whole one would take more registers than
    the quantised matrices of the launch, and so places on the card from all of its programs.
    """
    t = threads(group.shape[1] // 32)[1]
    groups: tl.constexpr = COLUMNS // 128
    nought = tl.zeros(address.shape, tl.float32)
    acc = (nought, nought, nought, nought)
    if PDL:
        mine = tl.where(t % 2 == 0, row, row2)
        bring(weight + mine * COLUMNS, COLUMNS * 2, ((group == 0) & (t < 2)).to(tl.int32))
    half = load_dense(weight, row, row2, group, t, 0, COLUMNS)
    if PDL:
        gdc_wait()
    for _ in range(0, groups, STRIDE):
        live = group < groups  # past the end the last group is read once more
        x = address + tl.minimum(group, groups - 1) * 256
        other = load_dense(weight, row, row2, group, t, 1, COLUMNS)
        acc = dense_block(acc, half[0], half[1], x, live)
        acc = dense_block(acc, half[2], half[3], x + 64, live)
        group += STRIDE
        half = load_dense(weight, row, row2, group, t, 0, COLUMNS)
        acc = dense_block(acc, other[0], other[1], x + 128, live)
        acc = dense_block(acc, other[2], other[3], x + 192, live)
    return acc


@triton.jit
def over_warps(acc, N_TILES: tl.constexpr, WARPS: tl.constexpr):
    """The warps' shares added up: four [N_TILES, 32], lane by lane."""
    c0, c1, c2, c3 = acc
    if WARPS > 1:
        quads = tl.join(tl.join(c0, c1), tl.join(c2, c3)).reshape(N_TILES, WARPS, 128)
        upper, lower = tl.split(tl.sum(quads, 1).reshape(N_TILES, 32, 2, 2))
        c0, c1 = tl.split(upper)
        c2, c3 = tl.split(lower)
    return c0, c1, c2, c3


@triton.jit
def gated_over_warps(acc, N_TILES: tl.constexpr, WARPS: tl.constexpr):
    """silu(gate) · up, where even warps hold shares of gate and odd warps shares of up."""
    c0, c1, c2, c3 = acc
    quads = tl.join(tl.join(c0, c1), tl.join(c2, c3)).reshape(N_TILES, WARPS // 2, 256)
    both = tl.permute(tl.sum(quads, 1).reshape(N_TILES, 2, 128), (0, 2, 1))
    gate, up = tl.split(both)
    upper, lower = tl.split((gate * tl.sigmoid(gate) * up).reshape(N_TILES, 32, 2, 2))
    c0, c1 = tl.split(upper)
    c2, c3 = tl.split(lower)
    return c0, c1, c2, c3


@triton.jit
def store_tile(out, acc, m_first, rows, n_first, width, N_TILES: tl.constexpr):
    """The products of 16 matrix rows [n_first, …) with rows [m_first, …) of x, into out [rows, width]."""
    c0, c1, c2, c3 = acc
    lane = tl.arange(0, 32)[None, :]
    m = m_first + 8 * tl.arange(0, N_TILES)[:, None] + lane % 4 * 2
    n = n_first + lane // 4
    store_one(out, c0, m, rows, n, width)
    store_one(out, c1, m + 1, rows, n, width)
    store_one(out, c2, m, rows, n + 8, width)
    store_one(out, c3, m + 1, rows, n + 8, width)


@triton.jit
def store_one(out, value, m, rows, n, width):
    mask = (m < rows) & (n < width)
    at = m.to(tl.int64) * width + n
    tl.store(out + at, value, mask)

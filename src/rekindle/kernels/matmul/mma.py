"""Pieces that multiply grouped planes in NVIDIA's matrix units, written thread by thread.

Every tensor here is [1 or NT, 32 · warps]: one element per thread and tile of eight columns, so that an element is a
register and a warp instruction can be issued from inline assembly. A warp multiplies 16 rows of the matrix by 8 · NT
rows of x; thread 4 · g + t of it holds matrix rows g and g + 8 and row g of each eight of x, and of the products the
columns 2 · t and 2 · t + 1 (the register order of mma.m16n8k16).

A code q enters as the bfloat16 number 128 + q, which is one or-instruction for two codes. What the 128 adds, and the
minima of the types that have them, are taken off by way of −128 · Σ x over the block, which the matrix unit gives too.
One step is a group: 128 columns, 4 blocks, half an entry of `supers`.
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
from rekindle.kernels.matmul.tiles import bits_of, half_at, has_minimum, zero_of
from rekindle.kernels.matmul.types import Packed

TILE = 16  # rows of a matrix that a matrix instruction takes


def available(x: Tensor) -> bool:
    """The card runs these instructions, and x is of the type they take."""
    return x.is_cuda and torch.version.hip is None and x.dtype == torch.bfloat16 and _has_units(x.device)


def takes(weight: Packed) -> bool:
    return weight.type in GROUPED and weight.rows >= TILE


@functools.cache
def _has_units(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 0)


@triton.constexpr_function
def lift_of(type):
    """Two bfloat16 numbers −(128 + zero): −128 is 0xC300, −160 is 0xC320, as a signed 32-bit number."""
    half = 0xC300 + zero_of(type)
    return (half << 16 | half) - (1 << 32)


@triton.jit
def load_four(p, live):
    """16 bytes at p as four registers, any bits where not live; they pass the cache once."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred go;
            setp.ne.b32 go, $5, 0;
            @go ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4];
        }
        """,
        "=&r,=&r,=&r,=&r,l,r",
        [p.to(tl.int64), live],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def ask_for(p, live):
    """The line at p is on its way to the L2, where live; the result is of no use."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred go;
            setp.ne.b32 go, $2, 0;
            @go prefetch.global.L2 [$1];
            mov.b32 $0, 0;
        }
        """,
        "=r,l,r",
        [p.to(tl.int64), live],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def bring(p, nbytes, live):
    """As `ask_for`, for nbytes from p on (both in units of 16), with one instruction (Hopper on)."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred go;
            setp.ne.b32 go, $3, 0;
            @go cp.async.bulk.prefetch.L2.global [$1], $2;
            mov.b32 $0, 0;
        }
        """,
        "=r,l,r,r",
        [p.to(tl.int64), nbytes, live],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_two(address):
    """8 bytes as two registers."""
    return tl.inline_asm_elementwise(
        "ld.global.v2.b32 {$0, $1}, [$2];",
        "=r,=r,l",
        [address],
        dtype=(tl.int32, tl.int32),
        is_pure=False,  # it must not move to before the launch that writes x is done
        pack=1,
    )


@triton.jit
def load_scales(p):
    """8 bytes at p as two registers."""
    return tl.inline_asm_elementwise(
        "ld.global.nc.v2.b32 {$0, $1}, [$2];",
        "=r,=r,l",
        [p.to(tl.int64)],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def load_one(p):
    """4 bytes as a register. A plain load of several elements per thread could bring its own order of threads."""
    return tl.inline_asm_elementwise(
        "ld.global.b32 $0, [$1];", "=r,l", [p.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def lifted_nibbles(word):
    """Nibbles f = 0 … 3 of both halves of a word as pairs of bfloat16 128 + nibble."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 a, b, c;
            shr.u32 a, $4, 4;
            shr.u32 b, $4, 8;
            shr.u32 c, $4, 12;
            lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $1, a, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $2, b, 0x000F000F, 0x43004300, 0xEA;
            lop3.b32 $3, c, 0x000F000F, 0x43004300, 0xEA;
        }
        """,
        "=&r,=&r,=&r,=&r,r",
        [word],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def with_bits(pair, bits, mask):
    """pair | (bits & mask), one instruction."""
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r", [bits, mask, pair], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def byte_as_float(word, k: tl.constexpr):
    """32768 + byte k of the word, as float32: the byte sits right where the units of 2^15 are."""
    bits = tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;",
        "=r,r,r,r",
        [word, 0x47000000, 0x7404 + 16 * k],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def mma(a0, a1, a2, a3, b0, b1, c0, c1, c2, c3):
    """c + a · b for a [16, 16] and b [16, 8] of bfloat16, c in float32."""
    return tl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        [a0, a1, a2, a3, b0, b1, c0, c1, c2, c3],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def threads(WARPS: tl.constexpr):
    """(g, t, warp), each [1, 32 · WARPS]."""
    thread = tl.arange(0, 32 * WARPS)[None, :]
    return thread % 32 // 4, thread % 4, thread // 32


@triton.jit
def load_group(codes, high, scales, supers, row, group, live, t, COLUMNS: tl.constexpr, TYPE: tl.constexpr):
    """What this thread needs of one row (int64 [1, threads]) for one group: 4 words, 2 of scales, supers, upper bits.
    A group that is not live (past the end) has any codes, and factors of zero."""
    group = tl.minimum(group, COLUMNS // 128 - 1)
    block = row * (COLUMNS // 32) + group * 4
    w0, w1, w2, w3 = load_four(codes + block * 4 + t * 4, live.to(tl.int32))
    e0, e1 = load_scales(scales + block)
    super = tl.load(supers + row * (COLUMNS // 256) + group // 2, live, other=0)
    h = tl.load(high + block + t) if bits_of(TYPE) > 4 else w0
    return w0, w1, w2, w3, e0, e1, super, h


@triton.jit
def ask_for_codes(codes, high, row, block, live, t, COLUMNS: tl.constexpr, TYPE: tl.constexpr):
    """The codes of the group of one row that begins with a block."""
    block += row * (COLUMNS // 32)
    go = live.to(tl.int32)
    ask_for(codes + block * 4 + t * 4, go)
    if bits_of(TYPE) > 4:
        ask_for(high + block + t, go)


@triton.jit
def factors(super, TYPE: tl.constexpr):
    """(of scales, of minima) from the entry of supers; minima are taken off by way of −128 · Σ x."""
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
    """acc, and acc2 where there are two tiles, += a group's weights times the x at address (bytes, [NT, threads])."""
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
def load_tile(codes, high, scales, supers, row, row2, group, live, t, COLUMNS: tl.constexpr, TYPE: tl.constexpr):
    first = load_group(codes, high, scales, supers, row, group, live, t, COLUMNS, TYPE)
    return first, load_group(codes, high, scales, supers, row2, group, live, t, COLUMNS, TYPE)


@triton.jit
def load_tiles(
    codes, high, scales, supers, row, row2, row3, row4, group, t,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """A group of rows `row` and `row2`, and of the other two where there are two tiles."""
    live = group < COLUMNS // 128
    tile = load_tile(codes, high, scales, supers, row, row2, group, live, t, COLUMNS, TYPE)
    if TILES == 2:
        return tile, load_tile(codes, high, scales, supers, row3, row4, group, live, t, COLUMNS, TYPE)
    else:
        return tile, tile


@triton.jit
def tile_products(
    address, codes, high, scales, supers, row, row2, row3, row4, group,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, STRIDE: tl.constexpr, TILES: tl.constexpr, AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Rows `row` and `row2` of a matrix, a tile, and `row3` and `row4`, where there are two, times x over the groups
    group, group + STRIDE, …: four [NT, threads] for each tile.

    AHEAD: the next group is asked for before this one is multiplied, at the price of registers.
    EARLY: this launch began before the one that writes x was done, and waits for it here.
    """
    t = threads(group.shape[1] // 32)[1]
    groups: tl.constexpr = COLUMNS // 128
    nought = tl.zeros(address.shape, tl.float32)
    acc = (nought, nought, nought, nought)
    acc2 = acc
    if AHEAD:
        tile, tile2 = load_tiles(
            codes, high, scales, supers, row, row2, row3, row4, group, t, COLUMNS, TYPE, TILES
        )  # fmt: skip
        if EARLY:
            gdc_wait()
        for _ in range(0, groups, STRIDE):
            x = address + tl.minimum(group, groups - 1) * 256
            group += STRIDE
            tile_next, tile2_next = load_tiles(
                codes, high, scales, supers, row, row2, row3, row4, group, t, COLUMNS, TYPE, TILES
            )  # fmt: skip
            acc, acc2 = group_products(acc, acc2, tile, tile2, x, TYPE, TILES)
            tile = tile_next
            tile2 = tile2_next
    else:
        if EARLY:
            live = group < groups
            ask_for_codes(codes, high, row, group * 4, live, t, COLUMNS, TYPE)
            ask_for_codes(codes, high, row2, group * 4, live, t, COLUMNS, TYPE)
            if TILES == 2:
                ask_for_codes(codes, high, row3, group * 4, live, t, COLUMNS, TYPE)
                ask_for_codes(codes, high, row4, group * 4, live, t, COLUMNS, TYPE)
            gdc_wait()
        for _ in range(0, groups, STRIDE):
            tile, tile2 = load_tiles(
                codes, high, scales, supers, row, row2, row3, row4, group, t, COLUMNS, TYPE, TILES
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
def dense_products(address, weight, row, row2, group, COLUMNS: tl.constexpr, STRIDE: tl.constexpr, EARLY: tl.constexpr):
    """As `tile_products`, for bfloat16 weights [rows, COLUMNS]; address: that of column 8 · t of this thread's x.

    The next half of a group is asked for before this one is multiplied: a whole one would take more registers than
    the quantised matrices of the launch, and so places on the card from all of its programs.
    """
    t = threads(group.shape[1] // 32)[1]
    groups: tl.constexpr = COLUMNS // 128
    nought = tl.zeros(address.shape, tl.float32)
    acc = (nought, nought, nought, nought)
    if EARLY:
        mine = tl.where(t % 2 == 0, row, row2)
        bring(weight + mine * COLUMNS, COLUMNS * 2, ((group == 0) & (t < 2)).to(tl.int32))
    half = load_dense(weight, row, row2, group, t, 0, COLUMNS)
    if EARLY:
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
def over_warps(acc, NT: tl.constexpr, WARPS: tl.constexpr):
    """The warps' shares added up: four [NT, 32], lane by lane."""
    c0, c1, c2, c3 = acc
    if WARPS > 1:
        quads = tl.join(tl.join(c0, c1), tl.join(c2, c3)).reshape(NT, WARPS, 128)
        upper, lower = tl.split(tl.sum(quads, 1).reshape(NT, 32, 2, 2))
        c0, c1 = tl.split(upper)
        c2, c3 = tl.split(lower)
    return c0, c1, c2, c3


@triton.jit
def gated_over_warps(acc, NT: tl.constexpr, WARPS: tl.constexpr):
    """silu(gate) · up, where even warps hold shares of gate and odd warps shares of up."""
    c0, c1, c2, c3 = acc
    quads = tl.join(tl.join(c0, c1), tl.join(c2, c3)).reshape(NT, WARPS // 2, 256)
    both = tl.permute(tl.sum(quads, 1).reshape(NT, 2, 128), (0, 2, 1))
    gate, up = tl.split(both)
    upper, lower = tl.split((gate * tl.sigmoid(gate) * up).reshape(NT, 32, 2, 2))
    c0, c1 = tl.split(upper)
    c2, c3 = tl.split(lower)
    return c0, c1, c2, c3


@triton.jit
def store_tile(out, residual, acc, m_first, rows, n_first, width, NT: tl.constexpr, ADD: tl.constexpr):
    """The products of 16 matrix rows [n_first, …) with rows [m_first, …) of x, into out [rows, width]."""
    c0, c1, c2, c3 = acc
    lane = tl.arange(0, 32)[None, :]
    m = m_first + 8 * tl.arange(0, NT)[:, None] + lane % 4 * 2
    n = n_first + lane // 4
    store_one(out, residual, c0, m, rows, n, width, ADD)
    store_one(out, residual, c1, m + 1, rows, n, width, ADD)
    store_one(out, residual, c2, m, rows, n + 8, width, ADD)
    store_one(out, residual, c3, m + 1, rows, n + 8, width, ADD)


@triton.jit
def store_one(out, residual, value, m, rows, n, width, ADD: tl.constexpr):
    mask = (m < rows) & (n < width)
    at = m.to(tl.int64) * width + n
    if ADD:
        value += tl.load(residual + at, mask, other=0.0).to(tl.float32)
    tl.store(out + at, value, mask)


# ---- one row of x -------------------------------------------------------------------------------------------------
#
# With one row of x the eight columns would hold seven copies. Instead columns 2·i and 2·i + 1 belong to block i of a
# group: x of that block stands in these columns and the other blocks' does not, so that one quad of registers collects
# the sums of four blocks, block t in thread t, which then needs the scales of that block only. What the odd columns
# give is left alone.


@triton.jit
def load_supers(supers, row, row2, group, live, COLUMNS: tl.constexpr):
    """The entries of both rows for a group, the same for an even group and the next; zero where not live."""
    entry = tl.minimum(group, COLUMNS // 128 - 1) // 2
    first = tl.load(supers + row * (COLUMNS // 256) + entry, live, other=0)
    return first, tl.load(supers + row2 * (COLUMNS // 256) + entry, live, other=0)


@triton.jit
def load_group_single(codes, high, scales, super, row, group, live, t, COLUMNS: tl.constexpr, TYPE: tl.constexpr):
    """What this thread needs of one row for one group: 4 words, the scales of block t, supers, upper bits."""
    block = row * (COLUMNS // 32) + tl.minimum(group, COLUMNS // 128 - 1) * 4
    w0, w1, w2, w3 = load_four(codes + block * 4 + t * 4, live.to(tl.int32))
    e = tl.load(scales + block + t).to(tl.int32)
    h = tl.load(high + block + t) if bits_of(TYPE) > 4 else w0
    return w0, w1, w2, w3, e, super, h


@triton.jit
def load_tile_single(
    codes, high, scales, both, row, row2, group, live, t, COLUMNS: tl.constexpr, TYPE: tl.constexpr
):  # fmt: skip
    """A group of both rows, with their entries of `supers`."""
    first = load_group_single(codes, high, scales, both[0], row, group, live, t, COLUMNS, TYPE)
    return first, load_group_single(codes, high, scales, both[1], row2, group, live, t, COLUMNS, TYPE)


@triton.jit
def group_products_single(acc, tile, address, g, factor, TYPE: tl.constexpr):
    """acc += a group's weights of both rows, times factor, times x; address is that of block g // 2."""
    c0, c1, c2, c3 = acc
    first, second = tile
    d, m = factors(first[5], TYPE)
    d2, m2 = factors(second[5], TYPE)
    d *= factor
    m *= factor
    d2 *= factor
    m2 *= factor
    lift: tl.constexpr = lift_of(TYPE)
    nought = tl.zeros(address.shape, tl.float32)
    b0, b1 = load_two(address)
    b2, b3 = load_two(address + 32)
    s0, s1, s2, s3 = mma(lift, lift, lift, lift, b0, b1, nought, nought, nought, nought)
    if has_minimum(TYPE):
        s0, s1, s2, s3 = mma(lift, lift, lift, lift, b2, b3, s0, s1, s2, s3)
        z0, z1, z2, z3 = s0, s1, s2, s3
    else:  # each half of a block has its own signed scale
        z0, z1, z2, z3 = mma(lift, lift, lift, lift, b2, b3, nought, nought, nought, nought)
    y0, y1, y2, y3 = s0, s1, s2, s3
    for i in tl.static_range(4):
        mine = g // 2 == i
        p0, p1, p2, p3 = expanded_pairs(first[i], first[6], i, TYPE)
        q0, q1, q2, q3 = expanded_pairs(second[i], second[6], i, TYPE)
        x0, x1 = tl.where(mine, b0, 0), tl.where(mine, b1, 0)
        x2, x3 = tl.where(mine, b2, 0), tl.where(mine, b3, 0)
        y0, y1, y2, y3 = mma(p0, q0, p1, q1, x0, x1, y0, y1, y2, y3)
        if has_minimum(TYPE):
            y0, y1, y2, y3 = mma(p2, q2, p3, q3, x2, x3, y0, y1, y2, y3)
        else:
            z0, z1, z2, z3 = mma(p2, q2, p3, q3, x2, x3, z0, z1, z2, z3)
    a, n = scales_at(first[4], 0, d, m, TYPE)
    a2, n2 = scales_at(second[4], 0, d2, m2, TYPE)
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
def single_address(x, WARPS: tl.constexpr):
    """Where this thread reads the row x: its share of block g // 2."""
    g, t, _ = threads(WARPS)
    return (x + 4 * t + 32 * (g // 2)).to(tl.int64)


@triton.jit
def single_over_warps(acc, WARPS: tl.constexpr):
    """Rows g and g + 8 of the tile: two [8]."""
    upper, _, lower, _ = acc
    both = tl.join(upper, lower).reshape(WARPS, 8, 4, 2)
    return tl.split(tl.sum(tl.sum(both, 2), 0))


@triton.jit
def single_gated_over_warps(acc, WARPS: tl.constexpr):
    """silu(gate) · up for rows g and g + 8; even warps hold shares of gate, odd warps of up."""
    upper, _, lower, _ = acc
    both = tl.join(upper, lower).reshape(WARPS // 2, 2, 8, 4, 2)
    gate, up = tl.split(tl.permute(tl.sum(tl.sum(both, 3), 0), (1, 2, 0)))
    return tl.split(gate * tl.sigmoid(gate) * up)


@triton.jit
def store_single(out, residual, acc, n_first, width, ADD: tl.constexpr):
    """16 outputs of one row."""
    upper, lower = acc
    n = n_first + tl.arange(0, 8)
    if ADD:
        upper += tl.load(residual + n, n < width, other=0.0).to(tl.float32)
        lower += tl.load(residual + n + 8, n + 8 < width, other=0.0).to(tl.float32)
    tl.store(out + n, upper, n < width)
    tl.store(out + n + 8, lower, n + 8 < width)

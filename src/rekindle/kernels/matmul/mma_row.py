"""As `mma`, for a single row of x.

With one row of x the eight columns would hold seven copies. Instead columns 2·i and 2·i + 1 belong to block i of a
group: x of that block stands in these columns and that of the other blocks does not, so that one quad of registers
collects the sums of four blocks, block t in thread t, which needs the scales of that block only. The products in odd
columns are ignored.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from rekindle.kernels.matmul.mma import expanded_pairs, factors, lift_of, scales_at
from rekindle.kernels.matmul.ptx import load_four, load_two, mma, threads
from rekindle.kernels.matmul.tiles import bits_of, has_minimum


@triton.jit
def load_super_scales(super_scales, row, row2, group, live, COLUMNS: tl.constexpr):
    """The entries of both rows for a group, the same for an even group and the next; zero where not live."""
    entry = tl.minimum(group, COLUMNS // 128 - 1) // 2
    first = tl.load(super_scales + row * (COLUMNS // 256) + entry, live, other=0)
    return first, tl.load(super_scales + row2 * (COLUMNS // 256) + entry, live, other=0)


@triton.jit
def load_group_single(codes, high_bits, scales, super, row, group, live, t, COLUMNS: tl.constexpr, TYPE: tl.constexpr):
    """What this thread needs of one row for one group: 4 words, the scales of block t, super_scales, upper bits."""
    block = row * (COLUMNS // 32) + tl.minimum(group, COLUMNS // 128 - 1) * 4
    w0, w1, w2, w3 = load_four(codes + block * 4 + t * 4, live.to(tl.int32))
    e = tl.load(scales + block + t).to(tl.int32)
    h = tl.load(high_bits + block + t) if bits_of(TYPE) > 4 else w0
    return w0, w1, w2, w3, e, super, h


@triton.jit
def load_tile_single(
    codes, high_bits, scales, both, row, row2, group, live, t, COLUMNS: tl.constexpr, TYPE: tl.constexpr
):  # fmt: skip
    """A group of both rows, with their entries of `super_scales`."""
    first = load_group_single(codes, high_bits, scales, both[0], row, group, live, t, COLUMNS, TYPE)
    return first, load_group_single(codes, high_bits, scales, both[1], row2, group, live, t, COLUMNS, TYPE)


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
def store_single(out, acc, n_first, width):
    """16 outputs of one row."""
    upper, lower = acc
    n = n_first + tl.arange(0, 8)
    tl.store(out + n, upper, n < width)
    tl.store(out + n + 8, lower, n + 8 < width)

"""GEMV: one row of x through grouped planes in NVIDIA's tensor cores.

With one row of x the eight columns of an mma instruction would hold seven copies. Instead columns 2·i and 2·i + 1 hold
the x of block i of a group. Every block of the matrix is multiplied by all of them, and thread t, which holds columns
2·t and 2·t + 1 of the products, keeps those of block t: it needs the scales of that block only.

A step is two groups, which share an entry of `super_scales`. Its loads are issued first and all together; while a warp
waits for them other warps multiply. Instructions per step, and not the memory alone, bound this kernel: hence addresses
that are incremented, and no second set of registers to prefetch into.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from rekindle.kernels.matmul.mma import expanded_pairs, factors, lift_of, scales_at
from rekindle.kernels.matmul.ptx import load_two, mma, threads
from rekindle.kernels.matmul.tiles import bits_of, has_minimum


@triton.jit
def load_codes(p, live):
    """16 bytes at p as four registers, any bits where not live; they pass the cache once.

    A plain load, unlike `mma.load_four`: ptxas leaves it in front of gdc_wait or `hold`, and so of all products.
    """
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred go;
            setp.ne.b32 go, $5, 0;
            @go ld.global.L1::no_allocate.L2::128B.v4.b32 {$0, $1, $2, $3}, [$4];
        }
        """,
        "=&r,=&r,=&r,=&r,l,r",
        [p.to(tl.int64), live],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def hold(address):
    """The address, once every load before this is on its way: ptxas would put some off until they are used."""
    return tl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b64 $0, $1;", "=l,l", [address], dtype=tl.int64, is_pure=False, pack=1
    )


@triton.jit
def load_group(codes, high_bits, scales, live, FULL: tl.constexpr, TYPE: tl.constexpr):
    """What this thread needs of one row for one group: 4 words, the scales of block t, upper bits."""
    if FULL:
        w0, w1, w2, w3 = load_codes(codes, 1)
        e = tl.load(scales).to(tl.int32)
        h = tl.load(high_bits) if bits_of(TYPE) > 4 else w0
    else:
        w0, w1, w2, w3 = load_codes(codes, live.to(tl.int32))
        e = tl.load(scales, live, other=0).to(tl.int32)
        h = tl.load(high_bits, live, other=0) if bits_of(TYPE) > 4 else w0
    return w0, w1, w2, w3, e, h


@triton.jit
def group_products(upper, lower, first, second, super, super2, address, t, TYPE: tl.constexpr):
    """upper, lower += block t of a group of the rows `first` and `second`, times x; address: that of block g // 2."""
    d, m = factors(super, TYPE)
    d2, m2 = factors(super2, TYPE)
    lift: tl.constexpr = lift_of(TYPE)
    nought = tl.zeros(address.shape, tl.float32)
    b0, b1 = load_two(address)
    b2, b3 = load_two(address + 32)
    s0, s1, s2, s3 = mma(lift, lift, lift, lift, b0, b1, nought, nought, nought, nought)
    if has_minimum(TYPE):
        s0, s1, s2, s3 = mma(lift, lift, lift, lift, b2, b3, s0, s1, s2, s3)
        r0, r1, r2, r3 = s0, s1, s2, s3
    else:  # each half of a block has its own signed scale
        r0, r1, r2, r3 = mma(lift, lift, lift, lift, b2, b3, nought, nought, nought, nought)
    y, y2, z, z2 = s0, s2, r0, r2
    for i in tl.static_range(4):
        p0, p1, p2, p3 = expanded_pairs(first[i], first[5], i, TYPE)
        q0, q1, q2, q3 = expanded_pairs(second[i], second[5], i, TYPE)
        c0, c1, c2, c3 = mma(p0, q0, p1, q1, b0, b1, s0, s1, s2, s3)
        if has_minimum(TYPE):
            c0, c1, c2, c3 = mma(p2, q2, p3, q3, b2, b3, c0, c1, c2, c3)
        else:
            h0, _, h2, _ = mma(p2, q2, p3, q3, b2, b3, r0, r1, r2, r3)
            z = tl.where(t == i, h0, z)
            z2 = tl.where(t == i, h2, z2)
        y = tl.where(t == i, c0, y)
        y2 = tl.where(t == i, c2, y2)
    a, n = scales_at(first[4], 0, d, m, TYPE)
    a2, n2 = scales_at(second[4], 0, d2, m2, TYPE)
    upper += a * y
    lower += a2 * y2
    upper += n * z
    lower += n2 * z2
    return upper, lower


@triton.jit
def gemv_products(
    address, codes, high_bits, scales, super_scales, row, warp, part,
    COLUMNS: tl.constexpr, TYPE: tl.constexpr, WARPS: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows `row` and row + 8 of a matrix times the row x: the first and third of four [1, threads], to be added up over
    t and the warps. address: `single_address`.

    In a step each of WARPS warps takes a pair of groups. A program takes all steps, or the `part`th of PARTS stretches.
    PDL: the launch that writes x may still run, so gdc_wait stands before x is read. It stands in every step, which
    costs next to nothing after the first and keeps the loads of a step together.
    """
    t = threads(warp.shape[1] // 32)[1]
    pairs: tl.constexpr = COLUMNS // 256
    steps: tl.constexpr = (pairs + WARPS - 1) // WARPS
    FULL: tl.constexpr = pairs % WARPS == 0  # no warp has a step past the end
    upper = tl.zeros(warp.shape, tl.float32)
    lower = upper
    scales = scales.to(tl.pointer_type(tl.uint16))  # so that a load leaves no sign to be extended
    begin, end = 0, steps
    if PARTS > 1:
        begin, end = part * steps // PARTS, (part + 1) * steps // PARTS
    pair = warp + begin * WARPS
    block = row * (COLUMNS // 32) + pair * 8
    c, h, e = codes + block * 4 + t * 4, high_bits + block + t, scales + block + t
    s = super_scales + row * pairs + pair
    x = address + pair * 512
    for _ in tl.range(begin, end, loop_unroll_factor=1):
        live = pair < pairs
        # Eight rows on. Not so far that a load could not add it by itself: these take no registers.
        c2, h2, e2, s2 = c + COLUMNS, h + COLUMNS // 4, e + COLUMNS // 4, s + COLUMNS // 32
        first = load_group(c, h, e, live, FULL, TYPE)
        second = load_group(c2, h2, e2, live, FULL, TYPE)
        third = load_group(c + 16, h + 4, e + 4, live, FULL, TYPE)
        fourth = load_group(c2 + 16, h2 + 4, e2 + 4, live, FULL, TYPE)
        super = tl.load(s) if FULL else tl.load(s, live, other=0)
        super2 = tl.load(s2) if FULL else tl.load(s2, live, other=0)
        here = x if FULL else tl.where(live, x, address)
        if PDL:
            gdc_wait()
        else:
            here = hold(here)
        upper, lower = group_products(upper, lower, first, second, super, super2, here, t, TYPE)
        upper, lower = group_products(upper, lower, third, fourth, super, super2, here + 256, t, TYPE)
        pair += WARPS
        c += 32 * WARPS
        h += 8 * WARPS
        e += 8 * WARPS
        s += WARPS
        x += 512 * WARPS
    return upper, upper, lower, lower

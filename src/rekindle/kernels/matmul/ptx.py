"""NVIDIA's instructions that Triton has no words for, as inline PTX on one element per thread ([…, 32 · warps])."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


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
def store_word(p, bits, live):
    """4 bytes at p, where live; the result is of no use. A plain store of several elements per thread could bring its
    own order of threads, and so touch two to four times the sectors."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred go;
            setp.ne.b32 go, $3, 0;
            @go st.global.b32 [$1], $2;
            mov.b32 $0, 0;
        }
        """,
        "=r,l,r,r",
        [p.to(tl.int64), bits, live.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def store_half(p, bits, live):
    """As `store_word`, for the lower 2 bytes."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred go;
            .reg .b16 low;
            setp.ne.b32 go, $3, 0;
            cvt.u16.u32 low, $2;
            @go st.global.b16 [$1], low;
            mov.b32 $0, 0;
        }
        """,
        "=r,l,r,r",
        [p.to(tl.int64), bits, live.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
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
def in_two_parts(low, high):
    """Two float32 numbers as pairs of bfloat16: what is nearest to them, and what is nearest to the rest."""
    return tl.inline_asm_elementwise(
        """
        {
            .reg .b32 a, b;
            .reg .f32 x, y;
            cvt.rn.bf16x2.f32 a, $3, $2;
            shl.b32 b, a, 16;
            mov.b32 x, b;
            and.b32 b, a, 0xFFFF0000;
            mov.b32 y, b;
            sub.f32 x, $2, x;
            sub.f32 y, $3, y;
            mov.b32 $0, a;
            cvt.rn.bf16x2.f32 $1, y, x;
        }
        """,
        "=&r,=&r,f,f",
        [low, high],
        dtype=(tl.int32, tl.int32),
        is_pure=True,
        pack=1,
    )


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

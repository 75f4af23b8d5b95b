"""Chosen experts whose weights are not on the device, brought by the launch that needs them.

A program of gate and up that finds its expert missing copies its part of all planes, down's too, from pinned host
memory to the expert's slot before it multiplies; programs of experts that are there do not wait for it.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

ROUND = tl.constexpr(4096)  # 32-bit words a program has under way


@triton.jit
def bring_part(pieces, count, part, place, slot, WORDS: tl.constexpr):
    """One part of the expert at `place` in host memory, to its slot."""
    ROWS: tl.constexpr = ROUND // WORDS
    row = tl.arange(0, ROWS)
    word = tl.arange(0, WORDS)
    for start in range(0, count, ROWS):
        piece = pieces + (part * count + start + row) * 3
        live = start + row < count
        size = tl.load(piece + 2, live, other=0)
        there = tl.load(piece, live, other=0) + place * size
        here = tl.load(piece + 1, live, other=0) + slot * size
        source = there.to(tl.pointer_type(tl.int32))[:, None] + word[None, :]
        target = here.to(tl.pointer_type(tl.int32))[:, None] + word[None, :]
        source = tl.max_contiguous(tl.multiple_of(source, (16, 16)), (1, WORDS))
        target = tl.max_contiguous(tl.multiple_of(target, (16, 16)), (1, WORDS))
        mask = live[:, None] & (word >= 0)[None, :]
        tl.store(target, tl.load(source, mask, cache_modifier=".cg"), mask)


@triton.jit
def when_stored(base, WARPS: tl.constexpr):
    """base, which depends on that all threads of the program see what all of them stored: reads by way of it come
    after, also those that pass by the cache for what never changes."""
    thread = tl.arange(0, 32 * WARPS)
    tl.inline_asm_elementwise(
        "fence.acq_rel.gpu; mov.b32 $0, $1;", "=r,r", [thread], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.debug_barrier()
    return tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [base], dtype=tl.int64, is_pure=False, pack=1)

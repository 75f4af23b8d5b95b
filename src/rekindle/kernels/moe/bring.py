"""Chosen experts whose weights are not on the device: brought by the launch that needs them, or computed by the host.

A program of gate and up that finds its expert missing copies its part of all planes, down's too, from pinned host
memory to the expert's slot before it multiplies; programs of experts that are there do not wait for it. One of the
others waits meanwhile for what the host computes and copies that to the device, where down finds it: a wait or a read
in host memory by every program would crowd the link.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

ROUND = tl.constexpr(4096)  # 32-bit words a program has under way
AT_ONCE = tl.constexpr(2048)  # values of an answer that are copied at once


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


@triton.jit
def host_answered(number, gone, done, lost, patience):
    """Wait for the host. False if it did not answer, now or once before: that is said, and never waited for again."""
    want = tl.load(number)
    flag = done.to(tl.pointer_type(tl.int32))
    seen = tl.load(flag, volatile=True)
    was_gone = tl.load(gone) != 0
    tries = tl.where(was_gone, patience, 0)
    while (seen != want) & (tries < patience):
        seen = tl.load(flag, volatile=True)
        tries += 1
    if seen != want:
        tl.store(gone, 1)
        tl.store(lost.to(tl.pointer_type(tl.int32)), 1)
    return (seen == want) & (was_gone == 0)


@triton.jit
def take_answer(here, asked, number, gone, done, lost, out, patience, SIZE: tl.constexpr):
    """To the device, if the host was asked; not a number where it does not answer, so that nothing plausible comes of
    it."""
    if tl.load(asked) > 0:
        fine = host_answered(number, gone, done, lost, patience)
        for start in range(0, SIZE, AT_ONCE):
            k = start + tl.arange(0, AT_ONCE)
            value = tl.load(out.to(tl.pointer_type(tl.float32)) + k, k < SIZE, other=0.0, volatile=True)
            tl.store(here + k, tl.where(fine, value, float("nan")), k < SIZE)


@triton.jit
def answered(here, asked, row, is_first, width):
    """What the sums of these rows begin with: the host's share, for the thread that is first to add to a row."""
    return tl.load(here + row, asked & is_first & (row < width), other=0.0)

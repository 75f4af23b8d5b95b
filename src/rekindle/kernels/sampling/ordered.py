"""Draws that can be recorded: all that differs from one to the next lies in one block of device memory.

Every row has an order: where its logits are, what its penalties have counted, which mask it has, which token is forced,
where the token that is drawn is counted, and where it is written. An order of zeros is padding: it reads and writes
nothing outside the draw's own memory. The tokens are those of the same calls made one by one.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rekindle.kernels.sampling.triton import (
    IN_PROMPT,
    LOWEST,
    PART,
    best_of_parts,
    draw_keys,
    draw_open,
    key_of,
    penalised,
    run_of,
    seen,
)

# Fields of an order. 0 stands for none; a number that may be 0 is written as one more.
LOGITS = tl.constexpr(0)  # address of the row, float32 [vocab], a multiple of 16
OUT = tl.constexpr(1)  # address of the token, int64
MASK = tl.constexpr(2)  # number of the mask, plus 1
FORCED = tl.constexpr(3)  # token, plus 1
COUNTS = tl.constexpr(4)  # address of what penalties read, int32 [vocab]
COUNTED = tl.constexpr(5)  # address of the counts to which the token is added
DRAFTED = tl.constexpr(6)  # how many drafted tokens there are; they follow
FIELDS = 7
MOST_DRAFTED = 15  # before the last row of the longest block; an order is a multiple of 16 bytes
ORDER = tl.constexpr(FIELDS + MOST_DRAFTED)
SETTINGS = 8  # temperature, top_k, top_p, min_p, uniform number, presence, frequency, repetition

OPEN, GREEDY = 0, 1  # widths of a selection that have kernels of their own


class OrderParts(NamedTuple):
    """Views of one block of memory."""

    orders: Tensor  # int64 [rows, ORDER]
    settings: Tensor  # float32 [SETTINGS, rows]
    masks: Tensor  # int32 [rows, words]; as many as rows have one are in use


def block_words(rows: int, vocab: int, masks: int) -> int:
    """Of int64: as far as a block for so many rows is in use with so many masks."""
    return rows * (ORDER.value + SETTINGS // 2) + masks * mask_words(vocab) // 2


def mask_words(vocab: int) -> int:
    """Of int32, an even number: 32 tokens each."""
    return 2 * -(-vocab // 64)


def parts_of(block: Tensor, rows: int, vocab: int) -> OrderParts:
    """block: int64 [block_words(rows, vocab, rows) or more]."""
    first, second, end = rows * ORDER.value, block_words(rows, vocab, 0), block_words(rows, vocab, rows)
    return OrderParts(
        block[:first].view(rows, ORDER.value),
        block[first:second].view(torch.float32).view(SETTINGS, rows),
        block[second:end].view(torch.int32).view(rows, mask_words(vocab)),
    )


def draw_ordered(parts: OrderParts, vocab: int, width: int) -> None:
    """Draw what the orders say among the `width` highest logits of every row: a power of two from 16 on; OPEN, among
    all of them; GREEDY, the highest."""
    _settle_kernel[(len(parts.orders),)](_drawn(parts, vocab, width), parts.orders, num_warps=1)


def _drawn(parts: OrderParts, vocab: int, width: int) -> Tensor:
    """Before tokens are imposed: int64 [rows]."""
    (rows, words), device = parts.masks.shape, parts.orders.device
    if width == OPEN:
        logits = torch.empty((rows, vocab), dtype=torch.float32, device=device)
        _prepare_kernel[(triton.cdiv(vocab, PART), rows)](*parts, logits, rows, vocab, words, PART=PART, num_warps=8)
        return draw_open(logits, parts.settings)
    if width == GREEDY:
        count = triton.cdiv(vocab, PART)
        values = torch.empty((rows, count), dtype=torch.float32, device=device)
        tokens = torch.empty((rows, count), dtype=torch.int64, device=device)
        _highest_kernel[(count, rows)](
            *parts, values, tokens, rows, vocab, words, count, PART=PART, num_warps=8
        )  # fmt: skip
        return best_of_parts(values, tokens)
    run = run_of(width)
    runs = triton.cdiv(vocab, run)
    keys = torch.empty((rows, runs * width), dtype=torch.int64, device=device)
    _select_kernel[(runs, rows)](*parts, keys, rows, vocab, words, runs, RUN=run, WIDTH=width, num_warps=4)
    return draw_keys(keys, parts.settings, width)


@triton.jit
def _prepared(orders, settings, masks, rows, row, at, vocab, words):
    """Logits of the row's tokens `at`, after penalties and mask; the lowest there are where there is none."""
    order = orders + row * ORDER
    source, counts, mask = tl.load(order + LOGITS), tl.load(order + COUNTS), tl.load(order + MASK)
    inside = (at < vocab) & (source != 0)
    logits = tl.multiple_of(source.to(tl.pointer_type(tl.float32)), 16)
    value = tl.load(logits + at, mask=inside, other=float("-inf"))
    if counts != 0:
        entries = tl.multiple_of(counts.to(tl.pointer_type(tl.int32)), 16)
        entry = tl.load(entries + at, mask=inside, other=0)
        answered = entry & (IN_PROMPT - 1)
        drafted = tl.load(order + DRAFTED).to(tl.int32)
        for place in range(drafted):
            answered += (at == tl.load(order + DRAFTED + 1 + place)).to(tl.int32)
        own = settings + row
        value = penalised(
            value, entry, answered, tl.load(own + 5 * rows), tl.load(own + 6 * rows), tl.load(own + 7 * rows)
        )
    if mask != 0:
        word = tl.load(masks + (mask - 1) * words + at // 32, mask=inside, other=0)
        stays = (((word >> (at % 32)) & 1) == 1) | (value != value)
        value = tl.where(stays, value, float("-inf"))
    return tl.where(inside, value, float("-inf"))


@triton.jit(do_not_specialize=["rows", "words", "runs"])
def _select_kernel(
    orders, settings, masks, keys, rows, vocab, words, runs, RUN: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The WIDTH highest of every run, as keys."""
    run, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = run * RUN + tl.arange(0, RUN)
    value = _prepared(orders, settings, masks, rows, row, at, vocab, words)
    key = tl.where(at < vocab, key_of(value, at), LOWEST)
    to = keys + (row * runs + run) * WIDTH + tl.arange(0, WIDTH)
    tl.store(to, tl.topk(key, WIDTH))


@triton.jit(do_not_specialize=["rows", "words", "parts"])
def _highest_kernel(
    orders, settings, masks, values, tokens, rows, vocab, words, parts, PART: tl.constexpr
):  # fmt: skip
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = part * PART + tl.arange(0, PART)
    value = _prepared(orders, settings, masks, rows, row, at, vocab, words)
    best, which = tl.max(seen(value), axis=0, return_indices=True)  # the lowest index among equals
    tl.store(values + row * parts + part, best)
    tl.store(tokens + row * parts + part, (part * PART + which).to(tl.int64))


@triton.jit(do_not_specialize=["rows", "words"])
def _prepare_kernel(orders, settings, masks, out, rows, vocab, words, PART: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = part * PART + tl.arange(0, PART)
    value = _prepared(orders, settings, masks, rows, row, at, vocab, words)
    tl.store(out + row * vocab + at, value, mask=at < vocab)


@triton.jit
def _settle_kernel(drawn, orders):
    """Forced tokens are imposed, then each is counted and written. -1 stays: a row whose logits are no numbers."""
    row = tl.program_id(0)
    order = orders + row * ORDER
    token, forced = tl.load(drawn + row), tl.load(order + FORCED)
    token = tl.where((forced != 0) & (token >= 0), forced - 1, token)
    out, counted = tl.load(order + OUT), tl.load(order + COUNTED)
    if out != 0:
        tl.store(out.to(tl.pointer_type(tl.int64)), token)
    if (counted != 0) & (token >= 0):
        entry = counted.to(tl.pointer_type(tl.int32)) + token
        tl.store(entry, tl.load(entry) + 1)

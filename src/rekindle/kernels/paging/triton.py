"""A GPU fetches pages by their addresses, which mean the same on the host and on the device; and scores them, in a few
launches: the host, which hands over the next step meanwhile, has no time for many."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rekindle.kernels.attention.rows import is_packed
from rekindle.kernels.attention.triton import load_tile, views
from rekindle.spec.attention import Q8_BLOCK

WORD = 8  # bytes moved by one lane
BLOCK = 2048  # words that a program moves at a time
SCORED = 16  # pages that one program scores
QUIET = 8  # programs that together keep a link of 55 GB/s busy (docs/LOG.md)


def fetch_pages(targets: Tensor, sources: Tensor, nbytes: int) -> None:
    assert targets.shape == sources.shape, f"{targets.shape} targets for {sources.shape} sources"
    assert targets.stride(1) == sources.stride(1) == 1, "the pages of a layer are listed side by side"
    assert nbytes % WORD == 0, f"a page of {nbytes} bytes is no whole number of words"
    words, (layers, pages) = nbytes // WORD, targets.shape
    blocks = triton.cdiv(words, BLOCK)
    count = blocks * pages * layers
    _fetch_kernel[(count,)](targets, sources, targets.stride(0), sources.stride(0), words, blocks, pages, BLOCK=BLOCK)


def fetch_listed(page_addresses: Tensor, moves: Tensor, layer: int, nbytes: int) -> None:
    assert all((page_addresses.stride(1) == 1, moves.is_contiguous())), "addresses and moves lie side by side"
    assert nbytes % WORD == 0, f"a page of {nbytes} bytes is no whole number of words"
    words = nbytes // WORD
    _listed_kernel[(QUIET,)](
        page_addresses,
        moves,
        layer * page_addresses.stride(0),
        moves.shape[1],
        words,
        triton.cdiv(words, BLOCK),
        BLOCK=BLOCK,
    )


@triton.jit
def _pointer(address):
    """To int64 words. Addresses are multiples of 16, so that a lane loads and stores two words at once."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)


# A list of addresses begins anywhere in a longer one: one kernel for all, so that none is compiled amid a request.
@triton.jit(
    do_not_specialize=["target_row", "source_row", "blocks", "pages"],
    do_not_specialize_on_alignment=["targets", "sources"],
)
def _fetch_kernel(targets, sources, target_row, source_row, words, blocks, pages, BLOCK: tl.constexpr):
    i = tl.program_id(0)
    page, layer = i // blocks % pages, i // blocks // pages
    source, target = tl.load(sources + layer * source_row + page), tl.load(targets + layer * target_row + page)
    _move(target, source, i % blocks, words, BLOCK)


@triton.jit
def _move(target, source, block, words, BLOCK: tl.constexpr):
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    tl.store(_pointer(target) + at, tl.load(_pointer(source) + at, mask=inside, other=0), mask=inside)


@triton.jit(do_not_specialize=["first", "width", "blocks"])
def _listed_kernel(page_addresses, moves, first, width, words, blocks, BLOCK: tl.constexpr):
    count = tl.load(moves) * blocks
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        move = moves + 1 + i // blocks
        source = tl.load(page_addresses + first + tl.load(move + width))
        target = tl.load(page_addresses + first + tl.load(move))
        _move(target, source, i % blocks, words, BLOCK)


def key_directions(keys: Tensor) -> Tensor:
    layers, pages, page, kv_heads, row = keys.shape
    assert keys.is_contiguous(), "pages lie side by side"
    dim = row // (Q8_BLOCK + 2) * Q8_BLOCK if is_packed(keys) else row
    out = torch.empty((pages, layers, kv_heads, dim), dtype=torch.float16, device=keys.device)
    values, scales = views(keys)
    _directions_kernel[(pages, layers, kv_heads)](
        values, scales, out, KV_HEADS=kv_heads, DIM=dim, PAGE=page, PACKED=is_packed(keys), BLOCK=Q8_BLOCK
    )
    return out


@triton.jit
def _directions_kernel(
    keys, scales, out,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    page, layer, head = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    at = (layer * tl.num_programs(0) + page) * PAGE * KV_HEADS + head  # its first row of keys
    tile = load_tile(keys, scales, at, tl.arange(0, PAGE), None, tl.float32, KV_HEADS, DIM, PACKED, BLOCK)
    sums = tl.sum(tile, axis=0)
    length = tl.maximum(tl.sqrt(tl.sum(sums * sums, axis=0)), 1e-12)
    to = (page * tl.num_programs(1) + layer) * KV_HEADS + head
    tl.store(out + to * DIM + tl.arange(0, DIM), (sums / length).to(tl.float16))


def score_pages(keys: Tensor, query: Tensor) -> Tensor:
    pages, layers, kv_heads, dim = keys.shape
    assert all((keys.is_contiguous(), query.is_contiguous())), "heads and layers lie side by side"
    best = torch.empty((layers, pages), dtype=torch.float32, device=keys.device)
    _score_kernel[(triton.cdiv(pages, SCORED), layers)](
        keys, query, best, pages, query.shape[1] // kv_heads, KV_HEADS=kv_heads, DIM=dim, TILE=SCORED
    )
    return best.mean(0)


@triton.jit(do_not_specialize=["pages", "group"])
def _score_kernel(
    keys, query, best, pages, group, KV_HEADS: tl.constexpr, DIM: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Of the heads of one layer: decode waits while all layers are scored, so they go beside each other."""
    page, layer = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE), tl.program_id(1)
    inside = page < pages
    d = tl.arange(0, DIM)
    top = tl.full([TILE], float("-inf"), tl.float32)
    for head in range(0, KV_HEADS):
        at = (page * tl.num_programs(1) + layer) * KV_HEADS + head
        direction = tl.load(keys + at[:, None] * DIM + d[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
        for i in range(0, group):
            asked = tl.load(query + ((layer * KV_HEADS + head) * group + i) * DIM + d)
            length = tl.maximum(tl.sqrt(tl.sum(asked * asked, axis=0)), 1e-12)
            top = tl.maximum(top, tl.sum(direction * (asked / length)[None, :], axis=1))
    tl.store(best + layer * pages + page, top, mask=inside)

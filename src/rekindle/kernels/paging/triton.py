"""A GPU fetches pages by their addresses, which mean the same on the host and on the device."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WORD = 8  # bytes moved by one lane
BLOCK = 2048  # words of one program


def fetch_pages(targets: Tensor, sources: Tensor, nbytes: int) -> None:
    assert targets.shape == sources.shape, f"{targets.shape} targets for {sources.shape} sources"
    assert targets.stride(1) == sources.stride(1) == 1, "the pages of a layer are listed side by side"
    assert nbytes % WORD == 0, f"a page of {nbytes} bytes is no whole number of words"
    words, (layers, pages) = nbytes // WORD, targets.shape
    _fetch_kernel[(triton.cdiv(words, BLOCK), pages, layers)](
        targets, sources, targets.stride(0), sources.stride(0), words, BLOCK=BLOCK
    )


@triton.jit
def _pointer(address):
    """To words; said to lie on an edge, so that a lane moves two of them at once."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int64)), 16)


# A list of addresses begins anywhere in a longer one: one kernel for all, so that none is compiled amid a request.
@triton.jit(do_not_specialize=["target_row", "source_row"], do_not_specialize_on_alignment=["targets", "sources"])
def _fetch_kernel(targets, sources, target_row, source_row, words, BLOCK: tl.constexpr):
    page, layer = tl.program_id(1), tl.program_id(2)
    source = _pointer(tl.load(sources + layer * source_row + page))
    target = _pointer(tl.load(targets + layer * target_row + page))
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    tl.store(target + at, tl.load(source + at, mask=inside, other=0), mask=inside)

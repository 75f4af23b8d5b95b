"""A GPU fetches pages from pinned host memory by their addresses, which mean the same on the host and on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD = 8  # bytes moved by one lane
BLOCK = 2048  # words of one program


def fetch_pages(to: Tensor, places: Tensor, addresses: Tensor) -> None:
    """addresses int64 [pages], each on a 16-byte edge."""
    nbytes = to[0].nbytes
    assert to.is_contiguous(), "the buffer is one block"
    assert nbytes % WORD == 0, f"a page of {nbytes} bytes is no whole number of words"
    words = nbytes // WORD
    _fetch_kernel[(addresses.shape[0], triton.cdiv(words, BLOCK))](
        to.view(torch.uint8).view(-1).view(torch.int64), places, addresses, words, BLOCK=BLOCK
    )


@triton.jit
def _fetch_kernel(to, places, addresses, words, BLOCK: tl.constexpr):
    page = tl.program_id(0).to(tl.int64)
    source = tl.multiple_of(tl.load(addresses + page), 16).to(tl.pointer_type(tl.int64))
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < words
    place = tl.load(places + page).to(tl.int64)
    tl.store(to + place * words + at, tl.load(source + at, mask=inside, other=0), mask=inside)

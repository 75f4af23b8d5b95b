"""The highest logit of every row on a GPU: parts of the vocabulary side by side, then the best of the parts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 4096  # logits one program reads


def argmax(logits: Tensor) -> Tensor:
    """The lowest id among the highest logits [rows, vocab] -> int64 [rows]."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1, "the logits of a row lie side by side"
    parts = triton.cdiv(vocab, PART)
    values = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((rows, parts), dtype=torch.int64, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _part_kernel[(parts, rows)](logits, values, tokens, logits.stride(0), vocab, parts, PART=PART, num_warps=8)
    _best_kernel[(rows,)](values, tokens, out, parts, BLOCK=triton.next_power_of_2(parts), num_warps=1)
    return out


@triton.jit
def _part_kernel(logits, values, tokens, logit_row, vocab, parts, PART: tl.constexpr):
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = part * PART + tl.arange(0, PART)
    value = tl.load(logits + row * logit_row + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    best, which = tl.max(value, axis=0, return_indices=True)  # the lowest index among equals
    tl.store(values + row * parts + part, best)
    tl.store(tokens + row * parts + part, (part * PART + which).to(tl.int64))


@triton.jit
def _best_kernel(values, tokens, out, parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    value = tl.load(values + row * parts + at, mask=at < parts, other=float("-inf"))
    _, which = tl.max(value, axis=0, return_indices=True)
    tl.store(out + row, tl.load(tokens + row * parts + which))

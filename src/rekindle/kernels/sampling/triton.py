"""Choosing tokens on a GPU: the highest logit of a row, and the draw among a row's best."""

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


def draw(values: Tensor, tokens: Tensor, settings: Tensor) -> Tensor:
    """naive.draw in one launch, for few candidates."""
    rows, n = values.shape
    assert values.stride(1) == tokens.stride(1) == settings.stride(1) == 1, "candidates and settings are dense"
    out = torch.empty(rows, dtype=torch.int64, device=values.device)
    _draw_kernel[(rows,)](
        values, tokens, settings, out, values.stride(0), tokens.stride(0), settings.stride(0), n,
        BLOCK=triton.next_power_of_2(n), num_warps=1,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["value_row", "token_row", "setting_row", "n"])
def _draw_kernel(values, tokens, settings, out, value_row, token_row, setting_row, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    rank = tl.arange(0, BLOCK)
    temperature, top_k = tl.load(settings + row), tl.load(settings + setting_row + row)
    top_p, min_p = tl.load(settings + 2 * setting_row + row), tl.load(settings + 3 * setting_row + row)
    uniform = tl.load(settings + 4 * setting_row + row)
    value = tl.load(values + row * value_row + rank, mask=rank < n, other=float("-inf"))
    greedy = temperature == 0.0
    weight = tl.exp((value - tl.max(value, axis=0)) / tl.where(greedy, 1.0, temperature))
    weight = tl.where(rank < tl.where(top_k > 0.0, top_k, BLOCK), weight, 0.0)
    before = tl.cumsum(weight, axis=0) - weight
    reach = tl.where(top_p < 1.0, top_p, 2.0) * tl.sum(weight, axis=0)  # twice the whole is never reached
    weight = tl.where((rank == 0) | (before < reach), weight, 0.0)
    weight = tl.where((rank == 0) | (weight >= min_p), weight, 0.0)
    cumulated = tl.cumsum(weight, axis=0)
    whole = tl.max(cumulated, axis=0)
    first = tl.sum((cumulated <= uniform * whole).to(tl.int32), axis=0)
    tl.store(out + row, tl.load(tokens + row * token_row + tl.where(greedy, 0, first)))

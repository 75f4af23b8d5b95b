"""Attention on a CPU, by the kernels in C."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from rekindle.kernels import native
from rekindle.kernels.attention.naive import ROWS
from rekindle.kernels.ragged import Ragged

KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.uint8: 3}  # as attention.c numbers them
MOST_SHARED = 64  # query heads of one kv head


def reads(q: Tensor, kv: Tensor) -> bool:
    return not kv.is_cuda and q.shape[1] <= MOST_SHARED * kv.shape[3] and native.library() is not None


def attend(q: Tensor, kv: Tensor, ragged: Ragged, scale: float, gate: Tensor | None) -> Tensor:
    """[rows, heads, dim]; gate [rows, heads, dim] in any row and head stride."""
    rows, heads, dim = q.shape
    dtype, q, out = q.dtype, q.float().contiguous(), torch.empty(rows, heads, dim)
    gate = None if gate is None else gate.float()
    gating = (None, 0, 0) if gate is None else (gate.data_ptr(), gate.stride(0), gate.stride(1))
    native.library().attention_run(
        q.data_ptr(), heads, kv.data_ptr(), KV_TYPES[kv.dtype], kv.shape[3], dim, ragged.starts.data_ptr(),
        ragged.segments, ragged.row_places.data_ptr(), ragged.tables.data_ptr(), ragged.tables.stride(0), ROWS, scale,
        *gating, out.data_ptr(),
    )  # fmt: skip
    return out if dtype is torch.float32 else out.to(dtype)


def attend_partial(
    q: Tensor, kv: Tensor, pages: Tensor, page_positions: Tensor, row_positions: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """The groups of `attend` one by one: the same bits, once they are merged."""
    rows, heads, dim = q.shape
    q, pages, firsts, places = q.float().contiguous(), pages.int(), page_positions.long(), row_positions.long()
    kv = kv.contiguous()
    out, lse = torch.empty(rows, heads, dim), torch.empty(rows, heads)
    native.library().attention_part(
        q.data_ptr(), rows, heads, kv.data_ptr(), KV_TYPES[kv.dtype], kv.shape[3], dim, pages.data_ptr(),
        firsts.data_ptr(), len(pages), places.data_ptr(), scale, out.data_ptr(), lse.data_ptr(),
    )  # fmt: skip
    return out, lse


def merges(outs: Sequence[Tensor]) -> bool:
    return not outs[0].is_cuda and native.library() is not None


def sigmoid_gate(o: Tensor, gate: Tensor) -> Tensor:
    """`attention.sigmoid_gate`, as `attend` does it."""
    out, gate = o.float().clone(memory_format=torch.contiguous_format), gate.float()
    native.library().attention_gate(out.data_ptr(), *o.shape, gate.data_ptr(), gate.stride(0), gate.stride(1))
    return out.to(o.dtype).flatten(1)


def merge_partials(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> Tensor:
    outs, lses = [out.float().contiguous() for out in outs], [lse.float().contiguous() for lse in lses]
    if len(outs) == 1:
        return outs[0]
    merged, count = torch.empty_like(outs[0]), len(outs)
    addresses = (ctypes.c_void_p * (2 * count))(*(t.data_ptr() for t in (*outs, *lses)))
    at = ctypes.addressof(addresses)
    native.library().attention_merge(at, at + 8 * count, count, lses[0].numel(), merged.shape[-1], merged.data_ptr())
    return merged

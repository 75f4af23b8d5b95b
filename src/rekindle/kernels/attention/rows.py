"""How one KV row (one position of one kv head, K or V) is stored, for every KV type. Read here, nowhere else.

f32, bf16, f16   head_dim values of that type
q8               bytes: head_dim values int8, then head_dim / 32 scales float16; value i is int8[i] · scale[i // 32]

A q8 row of 256 values takes 272 bytes, so rows stay on 16-byte edges; kv tensors of this type are uint8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rekindle.spec.attention import Q8_BLOCK

KV_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "q8": torch.uint8}


def row_size(kv_type: str, head_dim: int) -> int:
    """Elements of the KV type's dtype in one row."""
    if kv_type != "q8":
        return head_dim
    assert head_dim % Q8_BLOCK == 0, f"q8 KV packs {Q8_BLOCK} values, the heads have {head_dim}"
    return head_dim + 2 * (head_dim // Q8_BLOCK)


def is_packed(kv: Tensor) -> bool:
    return kv.dtype is torch.uint8


def to_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Values [..., head_dim] as rows [..., row] of the kv tensor's dtype."""
    if dtype is not torch.uint8:
        return x.to(dtype)
    blocks = x.float().unflatten(-1, (-1, Q8_BLOCK))
    scales = (blocks.abs().amax(-1, keepdim=True) / 127).half()
    steps = scales.float().masked_fill(scales == 0, 1.0)  # a block of zeros stays zeros
    values = (blocks / steps).round_().clamp_(-127, 127).to(torch.int8).flatten(-2)
    return torch.cat((values.view(torch.uint8), scales.squeeze(-1).contiguous().view(torch.uint8)), dim=-1)


def from_rows(rows: Tensor) -> Tensor:
    """Rows [..., row] as float32 values [..., head_dim]."""
    if not is_packed(rows):
        return rows.float()
    head_dim = rows.shape[-1] // (Q8_BLOCK + 2) * Q8_BLOCK
    values = rows[..., :head_dim].view(torch.int8).unflatten(-1, (-1, Q8_BLOCK))
    scales = rows[..., head_dim:].view(torch.float16)
    return (values.float() * scales.float()[..., None]).flatten(-2)

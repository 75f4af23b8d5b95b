"""Full attention: K and V of every token, in pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rekindle.errors import BadConfig
from rekindle.spec.base import F16, F32, PAGE, Bytes, MixerSpec, Shapes

KV_TYPES = ("bf16", "f16", "f32", "q8")
Q8_BLOCK = 32  # values of q8 that share a scale
Q8_BLOCK_BYTES = 34  # a byte each, and the scale in two
# Rows × heads × splits whose results wait to be merged: the plan reserves them, and a launch takes no more splits than
# fit. Programs that fill an H200 have 33,792 at most.
PARTIAL_ROWS = 36 << 10


def most_splits(rows: int, heads: int) -> int:
    """Into which attention over a sequence may be cut, for so many rows."""
    return max(1, PARTIAL_ROWS // (rows * heads))


def kv_row_bytes(kv_type: str, head_dim: int) -> int:
    """K or V of one head and token."""
    if kv_type == "q8":
        if head_dim % Q8_BLOCK:
            raise BadConfig(f"--kv-type q8 packs {Q8_BLOCK} values at a time, the model's heads have {head_dim}")
        return head_dim // Q8_BLOCK * Q8_BLOCK_BYTES
    return head_dim * (4 if kv_type == "f32" else 2)


@dataclass(frozen=True, slots=True)
class AttentionSpec(MixerSpec):
    """Full attention: grouped heads, rotary positions, optional gate and per-head norms."""

    kind: ClassVar[str] = "attention"

    heads: int
    kv_heads: int
    head_dim: int
    rope_dim: int  # the first rope_dim of head_dim rotate, in pairs (j, j + rope_dim / 2)
    rope_theta: float
    rope_factors: tuple[float, ...] | None = None  # divisors of the frequencies, rope_dim / 2 of them
    qk_norm: bool = False
    gated: bool = False

    @property
    def kv_values_per_token(self) -> int:
        """K and V of one layer, in values."""
        return 2 * self.kv_heads * self.head_dim

    def tensors(self, hidden: int) -> Shapes:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: Shapes = {
            "attn_q.weight": (q * (2 if self.gated else 1), hidden),  # gated: per head [q | gate]
            "attn_k.weight": (kv, hidden),
            "attn_v.weight": (kv, hidden),
            "attn_output.weight": (hidden, q),
        }
        if self.qk_norm:
            shapes |= {"attn_q_norm.weight": (self.head_dim,), "attn_k_norm.weight": (self.head_dim,)}
        return shapes

    @property
    def row_values(self) -> int:
        return self.heads * self.head_dim * (3 if self.gated else 2) + self.kv_values_per_token

    @property
    def head_sizes(self) -> frozenset[int]:
        return frozenset({self.head_dim})

    def token_bytes(self, kv_type: str) -> int:
        """K and V of one token in one layer."""
        return 2 * self.kv_heads * kv_row_bytes(kv_type, self.head_dim)

    def page_bytes(self, kv_type: str) -> int:
        return PAGE * self.token_bytes(kv_type)

    def page_key_bytes(self) -> int:
        return self.kv_heads * self.head_dim * F16

    def work_bytes(self, rows: int, decode_rows: int) -> Bytes:
        # of every split: the weighted sum of its values, its largest score and the sum of its weights
        return {"attention partials": PARTIAL_ROWS * (self.head_dim + 2) * F32}

"""Gated DeltaNet: a matrix per head and a short convolution, both of a fixed size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from rekindle.spec.base import F32, Bytes, MixerSpec, Shapes

SUB_CHUNK = 64  # rows that the chunked delta rule solves at once


@dataclass(frozen=True, slots=True)
class DeltaSpec(MixerSpec):
    """Gated DeltaNet. Value heads are in tiled order: value head p reads key head p mod key_heads."""

    kind: ClassVar[str] = "delta"

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int

    @property
    def inner(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        return self.inner + 2 * self.key_heads * self.key_dim

    @property
    def state_values(self) -> int:
        """Values of the recurrent matrices of one layer and slot (float32)."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def window_values(self) -> int:
        """Values of the convolution window of one layer and slot (float32)."""
        return (self.conv_width - 1) * self.conv_channels

    def tensors(self, hidden: int) -> Shapes:
        return {
            "attn_qkv.weight": (self.conv_channels, hidden),  # rows q | k | v
            "attn_gate.weight": (self.inner, hidden),
            "ssm_conv1d.weight": (self.conv_channels, self.conv_width),
            "ssm_a": (self.value_heads,),
            "ssm_alpha.weight": (self.value_heads, hidden),
            "ssm_beta.weight": (self.value_heads, hidden),
            "ssm_dt.bias": (self.value_heads,),
            "ssm_norm.weight": (self.value_dim,),
            "ssm_out.weight": (hidden, self.inner),
        }

    @property
    def row_values(self) -> int:
        return 2 * self.conv_channels + 2 * self.inner + 2 * self.value_heads

    @property
    def head_sizes(self) -> frozenset[int]:
        return frozenset({self.key_dim, self.value_dim})

    def slot_bytes(self) -> Bytes:
        return {"recurrent state": self.state_values * F32, "conv windows": self.window_values * F32}

    def rewind_bytes(self, rows: int, value_bytes: int = F32) -> int:
        """The window before the block, and of every row the convolution's input, as it was computed, k of the key
        heads, δ and g."""
        values = self.key_heads * self.key_dim + self.value_heads * (self.value_dim + 1)
        return rows * (values * F32 + self.conv_channels * value_bytes) + (self.window_values * F32 if rows else 0)

    def work_bytes(self, rows: int, decode_rows: int) -> Bytes:
        # solved keys and values, queries, writes, and the matrices between the rows of a sub-chunk
        per_row = 4 * self.key_dim + 3 * self.value_dim + 5 * SUB_CHUNK
        return {"delta scratch": rows * self.value_heads * per_row * F32}

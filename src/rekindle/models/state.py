"""What the layers of one stage carry for its slots."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from rekindle.kernels.ragged import Ragged
from rekindle.pool import PoolReader
from rekindle.spec import DeltaSpec


@dataclass(frozen=True, slots=True)
class KvState:
    """KV of one attention layer: number `index` of the pool's."""

    reader: PoolReader
    index: int

    @property
    def kv(self) -> torch.Tensor:
        """[places + 1, 2, PAGE, kv_heads, row]; open pages are always in it, so rows are stored here."""
        return self.reader.pool.kv[self.index]

    def attend(self, query: torch.Tensor, rows: Ragged, scale: float) -> torch.Tensor:
        """query [rows, heads, dim] over every page that counts, wherever it lies."""
        return self.reader.attend(self.index, query, rows, scale)


@dataclass(slots=True)
class KeptRows:
    """What rewind needs to rebuild the state inside a segment: the state before it, and its rows."""

    position: int  # where the segment began
    state: torch.Tensor  # [value_heads, key_dim, value_dim] before the segment
    window: torch.Tensor  # [conv_width - 1, channels] before the segment
    inputs: torch.Tensor  # [rows, channels] raw convolution inputs
    k: torch.Tensor  # [rows, key_heads, key_dim]
    delta: torch.Tensor  # [rows, value_heads, value_dim]
    g: torch.Tensor  # [rows, value_heads]


@dataclass(slots=True)
class DeltaState:
    """Recurrent state of one DeltaNet layer: one fixed place per slot, and one more for padded rows."""

    states: torch.Tensor  # [slots + 1, value_heads, key_dim, value_dim] float32
    windows: torch.Tensor  # [slots + 1, conv_width - 1, channels] float32
    kept: dict[int, KeptRows] = field(default_factory=dict)  # by slot; dropped at the slot's next forward

    @classmethod
    def zeros(cls, spec: DeltaSpec, slots: int, device: torch.device) -> DeltaState:
        return cls(
            torch.zeros(slots + 1, spec.value_heads, spec.key_dim, spec.value_dim, device=device),
            torch.zeros(slots + 1, spec.conv_width - 1, spec.conv_channels, device=device),
        )

    def reset(self, slot: int) -> None:
        self.states[slot].zero_()
        self.windows[slot].zero_()
        self.kept.pop(slot, None)


LayerState = KvState | DeltaState

"""What the layers of one stage carry for its slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rekindle.kernels.kept import KeptRows
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

    def attend(self, query: torch.Tensor, rows: Ragged, scale: float, gate: torch.Tensor | None) -> torch.Tensor:
        """query [rows, heads, dim] over every page that counts, wherever it lies, gated -> [rows, heads · dim]."""
        return self.reader.attend(self.index, query, rows, scale, gate)


@dataclass(slots=True)
class DeltaState:
    """Recurrent state of one DeltaNet layer: one fixed place per slot, and one more for padded rows."""

    states: torch.Tensor  # [slots + 1, value_heads, key_dim, value_dim] float32
    windows: torch.Tensor  # [slots + 1, conv_width - 1, channels] float32
    kept: KeptRows | None = None  # what rewind goes back into, once a block was to be kept

    @classmethod
    def zeros(cls, spec: DeltaSpec, slots: int, device: torch.device) -> DeltaState:
        return cls(
            torch.zeros(slots + 1, spec.value_heads, spec.key_dim, spec.value_dim, device=device),
            torch.zeros(slots + 1, spec.conv_width - 1, spec.conv_channels, device=device),
        )

    def reset(self, slot: int) -> None:
        self.states[slot].zero_()
        self.windows[slot].zero_()

    def make_room(self, spec: DeltaSpec, rows: int) -> None:
        """For blocks of so many rows in every slot."""
        if self.kept is None:
            self.kept = KeptRows.zeros(spec, self.states.shape[0], rows, self.states.device)
        else:
            self.kept = self.kept.grown(rows)


LayerState = KvState | DeltaState

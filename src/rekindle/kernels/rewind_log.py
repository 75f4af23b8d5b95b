"""The log of the last block of rows in every slot, from which rewind makes the state after as many as stay."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from rekindle.spec import DeltaSpec


@dataclass(frozen=True, slots=True, eq=False)
class RewindLog:
    """The last block of every slot in one DeltaNet layer: the window before it, and its rows; float32, but for the
    inputs of the convolution, which stay in the type that they were computed in. The state before the block is no part
    of it: that stays where it is until it is known how many rows stay."""

    windows: Tensor  # [slots, conv_width - 1, channels] before the block
    inputs: Tensor  # [slots, rows, channels], raw inputs of the convolution
    k: Tensor  # [slots, rows, key_heads, Dk]
    delta: Tensor  # [slots, rows, value_heads, Dv]
    g: Tensor  # [slots, rows, value_heads]

    @classmethod
    def zeros(
        cls, spec: DeltaSpec, slots: int, rows: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> RewindLog:
        """dtype: of activations; the CPU's kernels compute in float32."""

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(slots, *shape, device=device, dtype=dtype)

        return cls(
            zeros(spec.conv_width - 1, spec.conv_channels),
            zeros(rows, spec.conv_channels, dtype=dtype),
            zeros(rows, spec.key_heads, spec.key_dim),
            zeros(rows, spec.value_heads, spec.value_dim),
            zeros(rows, spec.value_heads),
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.windows, self.inputs, self.k, self.delta, self.g

    @property
    def rows(self) -> int:
        return self.g.shape[1]

    def grown(self, rows: int) -> RewindLog:
        """The same with room for longer blocks."""
        more = rows - self.rows
        return replace(
            self,
            inputs=pad(self.inputs, (0, 0, 0, more)),
            k=pad(self.k, (0, 0, 0, 0, 0, more)),
            delta=pad(self.delta, (0, 0, 0, 0, 0, more)),
            g=pad(self.g, (0, 0, 0, more)),
        )

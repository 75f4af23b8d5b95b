"""The short causal convolution in front of the delta rule."""

from __future__ import annotations

from torch import Tensor

from rekindle.kernels.conv import naive
from rekindle.kernels.ragged import Ragged
from rekindle.kernels.rewind_log import RewindLog


def conv_silu(u: Tensor, weight: Tensor, windows: Tensor, ragged: Ragged, log: RewindLog | None = None) -> Tensor:
    """silu(causal depthwise conv) of u [rows, channels] with weight [channels, width], per segment.

    windows float32 [slots, width - 1, channels]: the raw rows before the segment; updated in place. `log` gets the
    windows as they were and the rows.
    """
    if u.is_cuda:
        from rekindle.kernels.conv import triton

        return triton.conv_silu(u, weight, windows, ragged, log)
    return naive.conv_silu(u, weight, windows, ragged, log)


__all__ = ["conv_silu"]

"""Causal depthwise convolution with SiLU over a window that outlives the forward, by definition."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from rekindle.kernels.ragged import Ragged
from rekindle.kernels.rewind_log import RewindLog


def conv_silu(u: Tensor, weight: Tensor, windows: Tensor, ragged: Ragged, log: RewindLog | None = None) -> Tensor:
    """u [rows, channels], weight [channels, width] oldest first; windows [slots, width - 1, channels] move on.

    Segment by segment, so that a segment's bits cannot depend on who shares the batch.
    """
    out = torch.empty_like(u)
    for _, slot, rows in ragged.walk():
        if log is not None:
            log.windows[slot] = windows[slot]
            log.inputs[slot, : rows.stop - rows.start] = u[rows]
        out[rows] = _segment(u[rows], weight.float(), windows[slot])
    return out


def _segment(u: Tensor, weight: Tensor, window: Tensor) -> Tensor:
    length, width = u.shape[0], weight.shape[1]
    seen = torch.cat((window, u.float()))  # [width - 1 + length, channels]
    window.copy_(seen[length:])
    total = seen[:length] * weight[:, 0]
    for i in range(1, width):
        total += seen[i : i + length] * weight[:, i]
    return silu(total)

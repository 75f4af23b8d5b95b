"""Draws on a CPU: the highest logit by the kernels in C, and others without sorting the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from rekindle.kernels import native


def reads(logits: Tensor) -> bool:
    plain = logits.dtype is torch.float32 and not logits.is_cuda and logits.dim() == 2 and logits.stride(1) == 1
    return plain and logits.shape[1] > 0 and native.library() is not None


def argmax(logits: Tensor) -> Tensor:
    """`sampling.argmax`."""
    out = torch.empty(logits.shape[0], dtype=torch.int64)
    native.library().argmax_rows(logits.data_ptr(), logits.stride(0), *logits.shape, out.data_ptr())
    return out


def draw_unbounded(logits: Tensor, settings: Tensor) -> Tensor:
    """`sampling.sample` of rows without top-k; settings float32 [5, rows] as it names them. Sorted is only what can
    stay, which is the same, but for how the sum of all weights is rounded."""
    return torch.tensor([_draw_row(*row) for row in zip(logits.float(), *settings.tolist(), strict=True)])


def _draw_row(logits: Tensor, temperature: float, _: float, top_p: float, min_p: float, uniform: float) -> int:
    peak = logits.max()  # of a row with a NaN that
    if not peak.isfinite():
        return -1
    if temperature == 0:
        return int(logits.argmax())
    weights = logits.sub(peak).div_(temperature).exp_()
    if top_p >= 1 and min_p <= 0:
        return _first_beyond(weights, uniform)
    whole = float(weights.sum())
    # Tokens of this weight or less have, all together, no more than what top-p leaves out: none of them stays.
    out = (1 - top_p) * whole / len(weights) if top_p < 1 else 0.0
    tokens = (weights >= min(1.0, max(min_p, out))).nonzero()[:, 0]
    weights = weights[tokens]
    if top_p < 1:
        ordered, order = weights.sort(descending=True, stable=True)
        before = ordered.cumsum(0).sub_(ordered)
        before[0] = -1.0  # the first always stays
        weights[order[before >= top_p * whole]] = 0.0
    return int(tokens[_first_beyond(weights, uniform)])


def _first_beyond(weights: Tensor, uniform: float) -> int:
    """The first whose cumulated weight exceeds the number's share of the whole."""
    cumulated = weights.cumsum(0)
    return int(torch.searchsorted(cumulated, uniform * cumulated[-1], right=True))

"""The Triton argmax takes the lowest of the highest."""

from __future__ import annotations

import torch

from rekindle.kernels.sampling import triton


def test_argmax_agrees_and_breaks_ties_downwards():
    torch.manual_seed(0)
    logits = torch.randn(4, triton.PART * 2 + 77)
    logits[1, [5, 6, triton.PART + 3]] = 9.0
    logits[2, [triton.PART * 2 + 76]] = 9.0
    logits[3] = -torch.inf
    logits[3, 4] = -3.0
    assert triton.argmax(logits).tolist() == logits.argmax(-1).tolist()
    assert triton.argmax(logits)[1:].tolist() == [5, triton.PART * 2 + 76, 4]

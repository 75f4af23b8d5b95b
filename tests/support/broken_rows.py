"""Rows of logits from which no token can be drawn, beside one from which one can."""

from __future__ import annotations

import torch
from torch import Tensor


def broken_rows(vocab: int) -> Tensor:
    """float32 [6, vocab]: whole; a NaN of either sign; all NaN; an infinite one; none allowed."""
    torch.manual_seed(7)
    logits = torch.randn(1, vocab).repeat(6, 1)
    logits[1, vocab // 2] = torch.nan
    logits[2].view(torch.int32)[vocab - 1] = 0xFFC00000 - 2**32  # as an x86 makes it of 0 · ∞
    logits[3] = torch.nan
    logits[4, 3] = torch.inf
    logits[5] = -torch.inf
    return logits

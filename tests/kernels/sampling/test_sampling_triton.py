"""The Triton argmax and draw compute the definition."""

from __future__ import annotations

import torch

from rekindle.kernels.sampling import naive, triton


def test_argmax_agrees_and_breaks_ties_downwards():
    torch.manual_seed(0)
    logits = torch.randn(4, triton.PART * 2 + 77)
    logits[1, [5, 6, triton.PART + 3]] = 9.0
    logits[2, [triton.PART * 2 + 76]] = 9.0
    logits[3] = -torch.inf
    logits[3, 4] = -3.0
    assert triton.argmax(logits).tolist() == logits.argmax(-1).tolist()
    assert triton.argmax(logits)[1:].tolist() == [5, triton.PART * 2 + 76, 4]


def test_draws_agree():
    torch.manual_seed(1)
    rows, n = 40, 21
    values = (3 * torch.randn(rows, n)).sort(-1, descending=True).values
    tokens = torch.randint(1000, (rows, n))
    settings = torch.stack(
        (
            torch.rand(rows).mul(2).where(torch.rand(rows) > 0.2, 0.0),
            torch.randint(0, n + 5, (rows,)).float(),
            torch.rand(rows).where(torch.rand(rows) > 0.3, 1.0),
            (torch.rand(rows) - 0.5).clamp(min=0),
            torch.rand(rows),
        )
    )
    assert triton.draw(values, tokens, settings).tolist() == naive.draw(values, tokens, settings).tolist()

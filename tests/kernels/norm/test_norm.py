"""Laws of the norms, on the definition."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from rekindle.kernels import norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_normed_row_has_unit_mean_square_before_its_weight(dtype):
    torch.manual_seed(0)
    x, weight = (100 * torch.randn(3, 40)).to(dtype), torch.randn(40)
    out = norm.rms_norm(x, weight, 1e-6)
    assert out.dtype == dtype
    torch.testing.assert_close((out.float() / weight).square().mean(-1), torch.ones(3), atol=1e-2, rtol=1e-2)


def test_the_sum_is_the_one_that_was_normed():
    torch.manual_seed(1)
    x, y, weight = torch.randn(2, 24).bfloat16(), torch.randn(2, 24).bfloat16(), torch.randn(24)
    total, normed = norm.add_rms_norm(x, y, weight, 1e-6)
    assert torch.equal(total, x + y)
    assert torch.equal(normed, norm.rms_norm(total, weight, 1e-6))


def test_the_gated_norm_works_head_by_head():
    torch.manual_seed(2)
    o, z, weight = torch.randn(3, 4, 8), torch.randn(3, 32), torch.randn(8)
    out = norm.gated_rms_norm(o, z, weight, 1e-6)
    for head in range(4):
        part = slice(8 * head, 8 * head + 8)
        expected = norm.rms_norm(o[:, head], weight, 1e-6) * silu(z[:, part])
        torch.testing.assert_close(out[:, part], expected)

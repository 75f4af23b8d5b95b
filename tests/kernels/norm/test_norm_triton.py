"""The Triton norms compute the definition."""

from __future__ import annotations

import pytest
import torch

from rekindle.kernels.norm import naive, triton


@pytest.mark.parametrize("n", [1, 24, 130])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_row_norms_agree(n, dtype):
    torch.manual_seed(n)
    x, y = torch.randn(5, 2 * n).to(dtype)[:, :n], torch.randn(5, n).to(dtype)
    weight = torch.randn(n)
    torch.testing.assert_close(triton.rms_norm(x, weight, 1e-6), naive.rms_norm(x, weight, 1e-6))
    got, expected = triton.add_rms_norm(x, y, weight, 1e-6), naive.add_rms_norm(x, y, weight, 1e-6)
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1])


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_parts_of_a_sum_are_added_up_before_it_is_rounded(parts):
    torch.manual_seed(parts)
    x, y, weight = torch.randn(2, 24).half(), torch.randn(parts, 2, 24), torch.randn(24)
    got, expected = triton.add_rms_norm(x, y, weight, 1e-6), naive.add_rms_norm(x, y, weight, 1e-6)
    assert torch.equal(expected[0], x + y.sum(0).half())
    assert torch.equal(got[0], expected[0])
    torch.testing.assert_close(got[1], expected[1])


@pytest.mark.parametrize(("heads", "dim"), [(3, 8), (6, 24)])
def test_gated_norms_agree(heads, dim):
    torch.manual_seed(heads)
    o, z, weight = torch.randn(3, heads, dim), torch.randn(3, heads * dim + 5)[:, : heads * dim], torch.randn(dim)
    torch.testing.assert_close(
        triton.gated_rms_norm(o, z, weight, 1e-6), naive.gated_rms_norm(o, z.contiguous(), weight, 1e-6)
    )

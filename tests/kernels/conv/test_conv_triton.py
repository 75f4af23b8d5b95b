"""The Triton convolution computes the definition, rows and windows."""

from __future__ import annotations

import pytest
import torch

from rekindle.kernels.conv import naive, triton


@pytest.mark.parametrize("lengths", [(1,), (1, 1, 1), (2,), (70,), (1, 3, 33, 2), (64, 65)])
def test_convolutions_agree_in_rows_and_windows(make_ragged, lengths):
    torch.manual_seed(sum(lengths))
    channels = 70
    ragged = make_ragged([(2 * i, 5, length) for i, length in enumerate(lengths)])
    u, weight = torch.randn(sum(lengths), channels + 2)[:, :channels], torch.randn(channels, 4)
    windows = torch.randn(2 * len(lengths), 3, channels)
    expected_windows = windows.clone()
    out = triton.conv_silu(u, weight, windows, ragged)
    expected = naive.conv_silu(u, weight, expected_windows, ragged)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(windows, expected_windows)

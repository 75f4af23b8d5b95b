"""Laws of the short convolution, on the definition."""

from __future__ import annotations

import torch
from torch.nn.functional import conv1d, silu

from rekindle.kernels import conv


def test_convolution_equals_the_library_on_a_cold_start(make_ragged):
    torch.manual_seed(0)
    u, weight = torch.randn(9, 6), torch.randn(6, 4)
    windows = torch.zeros(1, 3, 6)
    out = conv.conv_silu(u, weight, windows, make_ragged([(0, 0, 9)]))
    expected = silu(conv1d(u.T[None], weight[:, None], padding=3, groups=6)[0, :, :9]).T
    torch.testing.assert_close(out, expected)
    assert torch.equal(windows[0], u[-3:])


def test_cutting_a_segment_anywhere_changes_nothing(make_ragged):
    torch.manual_seed(1)
    u, weight = torch.randn(9, 6), torch.randn(6, 4)
    start = torch.randn(2, 3, 6)
    whole_windows = start.clone()
    whole = conv.conv_silu(u, weight, whole_windows, make_ragged([(1, 0, 9)]))
    for cut in range(1, 9):
        windows = start.clone()
        parts = [
            conv.conv_silu(u[:cut], weight, windows, make_ragged([(1, 0, cut)])),
            conv.conv_silu(u[cut:], weight, windows, make_ragged([(1, cut, 9 - cut)])),
        ]
        torch.testing.assert_close(torch.cat(parts), whole, atol=1e-6, rtol=1e-6)
        assert torch.equal(windows, whole_windows)
    assert torch.equal(whole_windows[0], start[0])


def test_segments_use_their_own_slots(make_ragged):
    torch.manual_seed(2)
    u, weight = torch.randn(8, 6), torch.randn(6, 4)
    windows = torch.randn(3, 3, 6)
    before = windows.clone()
    together = conv.conv_silu(u, weight, windows, make_ragged([(2, 0, 1), (0, 4, 5), (1, 7, 2)]))
    for slot, rows in ((2, slice(0, 1)), (0, slice(1, 6)), (1, slice(6, 8))):
        alone_windows = before.clone()
        alone = conv.conv_silu(u[rows], weight, alone_windows, make_ragged([(slot, 0, rows.stop - rows.start)]))
        assert torch.equal(together[rows], alone)
        assert torch.equal(windows[slot], alone_windows[slot])

"""The Triton rotation computes the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from rekindle.kernels import rope
from rekindle.kernels.attention import naive as attention
from rekindle.kernels.rope import naive, triton
from rekindle.spec import PAGE, AttentionSpec


@pytest.mark.parametrize("rope_dim", [8, 24, 12])
@pytest.mark.parametrize("normed", [True, False])
def test_rotations_agree(make_ragged, rope_dim, normed):
    torch.manual_seed(rope_dim)
    spec = AttentionSpec(3, 2, 24, rope_dim, 1e4)
    both = torch.randn(6, 3, 48)  # [q | gate] per head
    q, k, v = both[..., :24], torch.randn(6, 2, 24), torch.randn(6, 2, 24)
    weights = (torch.randn(24), torch.randn(24)) if normed else (None, None)
    frequencies = rope.rope_frequencies(spec, "cpu")
    ragged = make_ragged([(0, 62, 4), (1, 7, 2)], [[3, 1], [0]])
    ragged = replace(ragged, row_places=ragged.row_places - 1)  # rows turn by their positions, and lie at their places
    got = triton.norm_rope(q, k, *weights, 1e-6, ragged.row_positions, frequencies)
    expected = naive.norm_rope(q, k, *weights, 1e-6, ragged.row_positions, frequencies)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    kv, expected_kv = torch.full((4, 2, PAGE, 2, 24), 7.0), torch.full((4, 2, PAGE, 2, 24), 7.0)
    turned = triton.norm_rope_store(q, k, v, *weights, 1e-6, frequencies, kv, ragged)
    attention.store_kv(expected_kv, expected[1], v, ragged)
    torch.testing.assert_close(turned, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(kv, expected_kv, atol=1e-5, rtol=1e-5)

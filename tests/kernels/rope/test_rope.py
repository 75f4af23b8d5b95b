"""Laws of rotary positions, on the definition."""

from __future__ import annotations

import math

import torch

from rekindle.kernels import attention, rope
from rekindle.spec import PAGE, AttentionSpec

SPEC = AttentionSpec(heads=4, kv_heads=2, head_dim=16, rope_dim=8, rope_theta=1e4)


def _turned(x, position):
    at = torch.tensor([position], dtype=torch.int32)
    return rope.norm_rope(x, x, None, None, 1e-6, at, rope.rope_frequencies(SPEC, "cpu"))[0]


def test_only_the_first_dims_turn_and_in_half_pairs():
    x = torch.zeros(1, 1, 16)
    x[..., 1], x[..., 8:] = 1.0, 3.0
    out = _turned(x, 5)[0, 0]
    angle = 5 * 1e4 ** (-2 / 8)
    assert math.isclose(out[1], math.cos(angle), abs_tol=1e-6)
    assert math.isclose(out[5], math.sin(angle), abs_tol=1e-6)
    assert torch.equal(out[8:], x[0, 0, 8:])


def test_products_depend_on_the_distance_alone_even_at_a_million():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    near = (_turned(q, 9) * _turned(k, 2)).sum()
    far = (_turned(q, 1_000_007) * _turned(k, 1_000_000)).sum()
    torch.testing.assert_close(near, far, atol=1e-5, rtol=1e-5)


def test_factors_divide_the_frequencies():
    spec = AttentionSpec(4, 2, 16, 8, 1e4, rope_factors=(1.0, 2.0, 4.0, 8.0))
    divided = rope.rope_frequencies(spec, "cpu") * torch.tensor(spec.rope_factors)
    torch.testing.assert_close(divided, rope.rope_frequencies(SPEC, "cpu"))


def test_norm_rope_store_is_norm_rope_then_store(make_ragged):
    torch.manual_seed(1)
    ragged = make_ragged([(0, 62, 5)])
    both = torch.randn(5, 4, 32)  # [q | gate] per head
    q, k, v = both[..., :16], torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    weights, frequencies = (torch.randn(16), torch.randn(16)), rope.rope_frequencies(SPEC, "cpu")
    kv, expected_kv = torch.zeros(2, 2, PAGE, 2, 16), torch.zeros(2, 2, PAGE, 2, 16)
    out = rope.norm_rope_store(q, k, v, *weights, 1e-6, frequencies, kv, ragged)
    expected, k = rope.norm_rope(q, k, *weights, 1e-6, ragged.row_positions, frequencies)
    attention.store_kv(expected_kv, k, v, ragged)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(kv, expected_kv)
    assert out.is_contiguous()

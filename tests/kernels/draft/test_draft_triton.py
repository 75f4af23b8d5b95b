"""The Triton kernels of a drafter's pass compute the definitions."""

from __future__ import annotations

import pytest
import torch

from rekindle.kernels.draft import naive, triton


def _ring(slots, places, kv_heads=2, dim=16):
    return torch.randn(slots, 2, places, kv_heads, dim)


@pytest.mark.parametrize(("window", "causal"), [(None, False), (None, True), (5, False), (40, True)])
@pytest.mark.parametrize(("places", "stops"), [(7, [0, 3, 20]), (300, [299, 300, 1000])])
def test_blocks_attend_the_ring_and_themselves(places, stops, window, causal):
    torch.manual_seed(places)
    rows, ring = 6, _ring(4, places)
    query, k, v = torch.randn(3 * rows, 4, 16), torch.randn(3 * rows, 2, 16), torch.randn(3 * rows, 2, 16)
    stop = torch.tensor(stops)
    where = torch.tensor([2, 0, 3]), torch.maximum(stop - torch.tensor([9, 200, 5]), torch.tensor(0)), stop
    got, expected = (form.attend_ring(query, k, v, ring, *where, window, causal) for form in (triton, naive))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


def test_what_a_ring_does_not_hold_is_not_read():
    """Places that were never written hold no numbers."""
    ring = torch.full((2, 2, 70, 2, 16), torch.nan)
    ring[1, :, 3:9] = torch.randn(2, 6, 2, 16)
    query, k, v = torch.randn(4, 4, 16), torch.randn(4, 2, 16), torch.randn(4, 2, 16)
    where = torch.tensor([1]), torch.tensor([3]), torch.tensor([9])
    got, expected = (form.attend_ring(query, k, v, ring, *where, None, False) for form in (triton, naive))
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("places", [4, 6, 33])
def test_rows_go_into_their_places_and_no_others(places):
    torch.manual_seed(places)
    k, v = torch.randn(3 * 6, 2, 16), torch.randn(3 * 6, 2, 16)
    where = torch.tensor([2, 0, 3]), torch.tensor([5, 31, 0]), torch.tensor([6, 3, 0])
    start = _ring(4, places)
    rings = [start.clone(), start.clone()]
    for form, ring in zip((triton, naive), rings, strict=True):
        form.store_ring(ring, k, v, *where)
    assert torch.equal(*rings)
    assert torch.equal(rings[0][[1, 3]], start[[1, 3]])
    assert not torch.equal(rings[0], start)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("taps", [1, 2, 3])
def test_convolutions_stay_inside_their_block(side, taps):
    torch.manual_seed(taps)
    x, base, computed = torch.randn(10, 48), torch.randn(2, taps, 48), torch.randn(10, 2 * taps * 3)
    got, expected = (form.convolve(x, base, computed, side, 5) for form in (triton, naive))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(("rows", "candidates"), [(1, 4), (7, 16), (5, 3)])
def test_the_path_is_the_greedy_one(rows, candidates):
    torch.manual_seed(rows)
    shapes = (2, rows, candidates), (2, candidates), (2, rows - 1, candidates, candidates)
    given = [torch.randn(shape) for shape in shapes]
    assert torch.equal(triton.walk(*given), naive.walk(*given))

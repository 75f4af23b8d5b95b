"""What pages are compared by, and how well they answer a query: the definition, and the GPU's kernels against it."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from rekindle.kernels.attention.rows import from_rows, to_rows
from rekindle.kernels.paging import naive, triton
from rekindle.spec import PAGE

both = pytest.mark.parametrize("kernels", [naive, triton])


@both
def test_a_score_is_the_best_heads_cosine_averaged_over_layers(kernels: ModuleType) -> None:
    keys = torch.nn.functional.normalize(torch.randn(19, 3, 2, 8), dim=-1)  # more pages than a program scores
    query = torch.randn(3, 6, 8)
    scores = kernels.score_pages(keys.half(), query)
    assert scores.shape == (19,)
    for page, score in enumerate(scores):
        by_layer = [
            max(
                float(torch.cosine_similarity(keys[page, layer, head // 3], query[layer, head], dim=0))
                for head in range(6)
            )
            for layer in range(3)
        ]
        assert abs(float(score) - sum(by_layer) / 3) < 2e-3


@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.uint8])
def test_key_directions_are_of_the_mean_key(kernels: ModuleType, dtype: torch.dtype) -> None:
    keys = to_rows(torch.randn(3, 5, PAGE, 2, 32), dtype)  # of 5 pages in 3 layers
    means = torch.nn.functional.normalize(from_rows(keys).mean(2), dim=-1)
    directions = kernels.key_directions(keys)
    assert directions.dtype == torch.float16
    torch.testing.assert_close(directions.float(), means.transpose(0, 1), atol=1e-3, rtol=0)


@both
def test_a_page_has_the_same_direction_and_score_whoever_is_beside_it(kernels: ModuleType) -> None:
    keys, query = torch.randn(3, 18, PAGE, 2, 32), torch.randn(3, 4, 32)
    together = kernels.key_directions(keys)
    scores = kernels.score_pages(together, query)
    for page in (0, 7, 17):
        alone = kernels.key_directions(keys[:, page : page + 1].contiguous())
        assert torch.equal(alone[0], together[page])
        if kernels is triton:  # the definition's products are other ones for other numbers of pages
            assert torch.equal(kernels.score_pages(alone, query)[0], scores[page])


@both
def test_keys_that_cancel_out_have_no_direction_and_no_page_no_score(kernels: ModuleType) -> None:
    keys = torch.randn(1, 1, PAGE // 2, 1, 8).repeat(1, 1, 2, 1, 1)
    keys[:, :, PAGE // 2 :] *= -1
    directions = kernels.key_directions(keys)
    assert directions.isfinite().all()
    assert kernels.score_pages(directions[:0], torch.randn(1, 2, 8)).shape == (0,)

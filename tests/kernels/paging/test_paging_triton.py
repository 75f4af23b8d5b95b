"""Fetching pages by address against the definition."""

from __future__ import annotations

import pytest
import torch

from rekindle.kernels.paging import fetch_pages


@pytest.mark.parametrize(("dtype", "shape"), [(torch.bfloat16, (2, 64, 2, 32)), (torch.uint8, (2, 64, 3, 34))])
def test_pages_arrive_as_they_were_and_nothing_else_is_written(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    pages = [torch.randint(0, 255, shape, dtype=torch.uint8).to(dtype) for _ in range(5)]
    by_copy, by_address = (torch.full((8, *shape), 7, dtype=dtype) for _ in range(2))
    places = torch.tensor([6, 0, 3, 7, 2])
    fetch_pages(by_copy, pages, places, None)
    fetch_pages(by_address, pages, places, torch.tensor([page.data_ptr() for page in pages]))
    assert torch.equal(by_copy[places], torch.stack(pages))
    assert torch.equal(by_copy[[1, 4, 5]], torch.full((3, *shape), 7, dtype=dtype))
    assert torch.equal(by_address, by_copy)

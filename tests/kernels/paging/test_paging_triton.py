"""Fetching pages by address against the definition."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from rekindle.kernels.paging import naive, triton


@pytest.mark.parametrize(("dtype", "shape"), [(torch.bfloat16, (2, 64, 2, 32)), (torch.uint8, (2, 64, 3, 34))])
def test_pages_arrive_as_they_were_and_nothing_else_is_written(
    dtype: torch.dtype, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, places = 3, [6, 0, 3, 7, 2]
    pages = [[torch.randint(0, 255, shape, dtype=torch.uint8).to(dtype) for _ in places] for _ in range(layers)]
    sources = torch.tensor([[page.data_ptr() for page in layer] for layer in pages])
    wanted = torch.full((layers, 8, *shape), 7, dtype=dtype)
    wanted[:, places] = torch.stack([torch.stack(layer) for layer in pages])
    monkeypatch.setattr(triton, "BLOCK", 256)
    for fetch in (naive.fetch_pages, triton.fetch_pages):
        to = torch.full((layers, 8, *shape), 7, dtype=dtype)
        targets = torch.tensor([[layer[place].data_ptr() for place in places] for layer in to])
        fetch(targets, sources, to[0, 0].nbytes)
        assert torch.equal(to, wanted)


@pytest.mark.parametrize("kernels", [naive, triton])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_listed_pages_are_copied_in_their_layer_alone(
    kernels: ModuleType, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "QUIET", 4)
    monkeypatch.setattr(triton, "BLOCK", 256)
    pages = torch.randint(
        0, 255, (3, 13, 2, 64, 3, 34), dtype=torch.uint8
    )  # three layers of eight places, five sources
    page_addresses = torch.tensor([[page.data_ptr() for page in layer] for layer in pages])
    moves, places, sources = torch.zeros(2, 9, dtype=torch.int32), [6, 0, 3, 7, 2], [8, 12, 9, 11, 10]
    moves[:, 1:6] = torch.tensor([places, sources])
    moves[0, 0] = count
    wanted = pages.clone()
    wanted[1, places[:count]] = pages[1, sources[:count]]
    kernels.fetch_listed(page_addresses, moves, 1, pages[0, 0].nbytes)
    assert torch.equal(pages, wanted)


def test_half_a_page_can_be_fetched_and_sources_may_be_a_view() -> None:
    pages, to = torch.randn(4, 2, 8), torch.zeros(3, 8)
    addresses = torch.tensor([[page.data_ptr() for page in pages], [0] * 4])
    triton.fetch_pages(torch.tensor([[row.data_ptr() for row in to]]), addresses[:1, 1:], pages[0, 0].nbytes)
    assert torch.equal(to, pages[1:, 0])

"""Pages as a whole: copied from address to address, in host memory or on the device, and compared with a query."""

from __future__ import annotations

from torch import Tensor

from rekindle.kernels.paging import naive


def fetch_pages(targets: Tensor, sources: Tensor, nbytes: int) -> None:
    """`nbytes` from every sources[layer, i] to targets[layer, i], on the current stream.

    Both int64 [layers, pages], addresses on 16-byte edges. A GPU reads pinned host memory itself: one launch at the
    speed of the link for all pages of all layers, where a copy for each would be several times slower.
    """
    if targets.is_cuda:
        from rekindle.kernels.paging import triton

        triton.fetch_pages(targets, sources, nbytes)
    else:
        naive.fetch_pages(targets, sources, nbytes)


def fetch_listed(page_addresses: Tensor, moves: Tensor, layer: int, nbytes: int) -> None:
    """Copies pages of one layer. The device reads how many and which from `moves`, so the launch can be recorded.

    page_addresses int64 [layers, page ids]. moves int32 [2, 1 + most]: in the first row the count, then the ids of the
    target pages; in the second row, from its second value on, those of the source pages. Few programs copy: they fill
    the link, and layers that run meanwhile keep their speed.
    """
    if page_addresses.is_cuda:
        from rekindle.kernels.paging import triton

        triton.fetch_listed(page_addresses, moves, layer, nbytes)
    else:
        naive.fetch_listed(page_addresses, moves, layer, nbytes)


def key_directions(keys: Tensor) -> Tensor:
    """The mean keys of sealed pages as directions, from their keys [layers, pages, PAGE, kv_heads, row].

    float16 [pages, layers, kv_heads, dim]. Keys are stored turned by their position, so the mean is of turned keys.
    The bits of a page do not depend on the pages beside it.
    """
    if keys.is_cuda:
        from rekindle.kernels.paging import triton

        return triton.key_directions(keys)
    return naive.key_directions(keys)


def score_pages(keys: Tensor, query: Tensor) -> Tensor:
    """How well pages answer a query: the best head's cosine, averaged over the layers. float32 [pages].

    keys [pages, layers, kv_heads, dim] directions; query [layers, heads, dim] float32, turned by its position.
    """
    if keys.is_cuda:
        from rekindle.kernels.paging import triton

        return triton.score_pages(keys, query)
    return naive.score_pages(keys, query)


__all__ = ["fetch_listed", "fetch_pages", "key_directions", "score_pages"]

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


def fetch_listed(homes: Tensor, ways: Tensor, layer: int, nbytes: int) -> None:
    """Pages of one layer from home to home, as many as are listed when the device gets there: it can be recorded.

    homes int64 [layers, numbers]: the address of every number. ways int32 [2, 1 + most]: how many, then the numbers
    that they come to; in the second row those that they come from. By so few programs that layers which run meanwhile
    keep their speed; the link is busy all the same.
    """
    if homes.is_cuda:
        from rekindle.kernels.paging import triton

        triton.fetch_listed(homes, ways, layer, nbytes)
    else:
        naive.fetch_listed(homes, ways, layer, nbytes)


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

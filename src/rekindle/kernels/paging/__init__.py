"""Copy pages between addresses: from pinned host memory to the device, or from anywhere on it."""

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


__all__ = ["fetch_pages"]

"""Fetch pages that lie scattered in host memory into a buffer on the device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rekindle.kernels.paging import naive


def fetch_pages(to: Tensor, pages: Sequence[Tensor], places: Tensor, addresses: Tensor | None) -> None:
    """to[places[i]] = pages[i], on the current stream; places: integers on the device of `to`.

    addresses: int64 on the device of `to`, where the pages lie in pinned memory; None where some are not pinned. With
    them a GPU reads the pages itself, in one launch at the speed of the link; a copy for each would be several times
    slower.
    """
    if addresses is None:
        naive.fetch_pages(to, pages, places)
    else:
        from rekindle.kernels.paging import triton

        triton.fetch_pages(to, places, addresses)


__all__ = ["fetch_pages"]

"""Fetching pages, by definition."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def fetch_pages(to: Tensor, pages: Sequence[Tensor], places: Tensor) -> None:
    for place, page in zip(places.tolist(), pages, strict=True):
        to[place].copy_(page, non_blocking=True)

"""Fetching pages, by definition."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def fetch_pages(to: Tensor, pages: Sequence[Tensor]) -> None:
    for i, page in enumerate(pages):
        to[i].copy_(page, non_blocking=True)

"""Fetching pages, by definition."""

from __future__ import annotations

import ctypes

from torch import Tensor


def fetch_pages(targets: Tensor, sources: Tensor, nbytes: int) -> None:
    for target, source in zip(targets.flatten().tolist(), sources.flatten().tolist(), strict=True):
        ctypes.memmove(target, source, nbytes)

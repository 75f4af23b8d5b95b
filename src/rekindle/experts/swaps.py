"""Which experts should change places: decided from counts alone."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

GAIN = 1.5  # a cold expert must be used this many times as much as the hot one it replaces …
LEAST = 4.0  # … and by this many choices more, or noise would move weights about
MOST = 2  # swaps per layer and round: each moves two experts over PCIe


def choose_swaps(
    counts: np.ndarray, hot: Iterable[int], gain: float = GAIN, least: float = LEAST, most: int = MOST
) -> list[tuple[int, int]]:
    """(hot expert that goes, cold expert that comes), best gain first; the weakest hot against the strongest cold."""
    here = np.zeros(len(counts), dtype=bool)
    here[list(hot)] = True
    by_use = np.argsort(counts, kind="stable")[::-1]  # most used first; of equals the later one
    weakest = by_use[here[by_use]][::-1][:most]
    strongest = by_use[~here[by_use]][:most]
    return [
        (int(goes), int(comes))
        for goes, comes in zip(weakest, strongest, strict=False)
        if counts[comes] >= gain * counts[goes] and counts[comes] - counts[goes] >= least
    ]

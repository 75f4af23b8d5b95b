"""Rows that are read into memory of the reader's own."""

from __future__ import annotations

import numpy as np

from rekindle.weights.stored import UnreadRows


def read_in_pieces(rows: np.ndarray | UnreadRows, piece: int = 100) -> np.ndarray:
    """As threads read them, a piece at a time; the last one first."""
    if isinstance(rows, np.ndarray):
        return rows
    target = np.full(rows.shape[0] * rows.shape[1], 255, np.uint8)
    for start in reversed(range(0, target.size, piece)):
        rows.read_into(target[start : start + piece], start)
    return target.reshape(rows.shape)

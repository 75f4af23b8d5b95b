"""The identity of a model's weights, from their content.

Hashed: the hyperparameters, and for every stored tensor its name, shape, type and three samples of its bytes. Not
hashed: path, time, the model's display name, chat template. So a copy is the same model, a re-quantisation is not, and
20 GB are identified by reading some 40 MB.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from rekindle.spec import ModelSpec
from rekindle.weights.stored import Stored

SAMPLE = 16 * 1024  # bytes


def fingerprint(spec: ModelSpec, tensors: Iterable[Stored]) -> str:
    from blake3 import blake3  # here, so that reading weights works where only numpy and gguf are installed

    digest = blake3(repr(replace(spec, name="")).encode())
    for stored in sorted(tensors, key=lambda stored: stored.info.name):
        digest.update(repr(stored.info).encode())
        for sample in _samples(stored.data.reshape(-1)):
            digest.update(sample.tobytes())
    return digest.hexdigest()


def _samples(data: np.ndarray) -> list[np.ndarray]:
    """Start, middle and end; all of a small tensor."""
    if data.size <= 3 * SAMPLE:
        return [data]
    middle = (data.size - SAMPLE) // 2
    return [data[:SAMPLE], data[middle : middle + SAMPLE], data[-SAMPLE:]]

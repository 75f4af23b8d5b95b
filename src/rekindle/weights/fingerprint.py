"""The identity of a model's weights, from their content.

Hashed: the hyperparameters, and for every stored tensor its name, shape, type and three samples of its bytes. Not
hashed: path, time, the model's display name, chat template. So a copy is the same model, a re-quantisation is not, and
20 GB are identified by reading some 40 MB.
"""

from __future__ import annotations

from collections.abc import Iterable

from rekindle.spec import ModelSpec
from rekindle.weights.stored import Stored

SAMPLE = 16 * 1024  # bytes


def fingerprint(spec: ModelSpec, tensors: Iterable[Stored]) -> str:
    return fingerprint_of(spec.identity, tensors)


def fingerprint_of(identity: str, tensors: Iterable[Stored]) -> str:
    """identity: the hyperparameters, in words."""
    from blake3 import blake3  # here, so that reading weights works where only numpy and gguf are installed

    digest = blake3(identity.encode())
    for stored in sorted(tensors, key=lambda stored: stored.info.name):
        digest.update(repr(stored.info).encode())
        for start, stop in _samples(stored.info.nbytes):
            digest.update(stored.bytes(start, stop).data)
    return digest.hexdigest()


def _samples(size: int) -> list[tuple[int, int]]:
    """Start, middle and end; all of a small tensor."""
    if size <= 3 * SAMPLE:
        return [(0, size)]
    middle = (size - SAMPLE) // 2
    return [(0, SAMPLE), (middle, middle + SAMPLE), (size - SAMPLE, size)]

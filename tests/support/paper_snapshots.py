"""A model made of paper: its state is a function of its tokens, so what a snapshot must hold is known in advance."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from rekindle.snapshots.types import TAIL, Page, Part, Snapshot, Stretch
from rekindle.spec import PAGE

FINGERPRINT = "0123456789abcdef0123456789abcdef"


@dataclass
class PaperModel:
    dtype: torch.dtype = torch.float32
    attention: tuple[int, ...] = (1, 3)
    delta: tuple[int, ...] = (0, 2)
    row: int = 4
    state: int = 8  # the recurrent matrix is [2, state, state]
    vocab: int = 16
    share: bool = True
    pages: dict[tuple[bytes, int], Page] = field(default_factory=dict)

    def snapshot(self, tokens: list[int], logits: bool = True) -> Snapshot:
        ids = np.asarray(tokens, dtype=np.int32)
        parts: list[Part] = []
        for layer in sorted((*self.attention, *self.delta)):
            parts.append(self._kv(layer, ids) if layer in self.attention else self._delta(layer, ids))
        return Snapshot(
            tokens=ids,
            parts=tuple(parts),
            logits=self._values(ids, 99, (self.vocab,)) if logits else None,
            grid=512,
            stretches=(Stretch(len(ids), "prefill", (7,)),),
        )

    def _kv(self, layer: int, ids: np.ndarray) -> Part:
        sealed = len(ids) // PAGE
        pages = tuple(self._page(layer, ids[: (i + 1) * PAGE]) for i in range(sealed))
        return Part(layer, {TAIL: self._rows(ids, layer, len(ids) - sealed * PAGE)}, pages)

    def _page(self, layer: int, ids: np.ndarray) -> Page:
        key = (ids.tobytes(), layer)
        if not self.share:
            return Page(self._rows(ids, layer, PAGE))
        if key not in self.pages:
            self.pages[key] = Page(self._rows(ids, layer, PAGE))
        return self.pages[key]

    def _rows(self, ids: np.ndarray, layer: int, rows: int) -> torch.Tensor:
        shape = (2, rows, 1, self.row)
        if self.dtype == torch.uint8:
            return torch.from_numpy(_generator(ids, layer).integers(0, 256, shape, dtype=np.uint8))
        return self._values(ids, layer, shape).to(self.dtype)

    def _delta(self, layer: int, ids: np.ndarray) -> Part:
        shapes = {"state": (2, self.state, self.state), "window": (3, 5)}
        return Part(layer, {name: self._values(ids, layer, shape) for name, shape in shapes.items()})

    def _values(self, ids: np.ndarray, salt: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.from_numpy(_generator(ids, salt).standard_normal(shape, dtype=np.float32))


def _generator(ids: np.ndarray, salt: int) -> np.random.Generator:
    return np.random.default_rng([salt, len(ids), *ids[-8:].tolist(), int(ids.sum())])


def same(a: Snapshot, b: Snapshot) -> bool:
    """Bit for bit."""
    tensors = list(zip(_tensors(a), _tensors(b), strict=True))
    return (
        np.array_equal(a.tokens, b.tokens)
        and a.grid == b.grid
        and a.stretches == b.stretches
        and [(p.layer, *p.tensors) for p in a.parts] == [(p.layer, *p.tensors) for p in b.parts]
        and all(x.dtype == y.dtype and x.shape == y.shape and _bits(x) == _bits(y) for x, y in tensors)
    )


def _tensors(snapshot: Snapshot) -> list[torch.Tensor]:
    tensors = []
    for part in snapshot.parts:
        tensors += [*(page.data for page in part.pages), *part.tensors.values()]
    return [*tensors, *([] if snapshot.logits is None else [snapshot.logits])]


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

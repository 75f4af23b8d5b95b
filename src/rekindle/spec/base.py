"""The measures that every model shares, and what a kind of mixer says about itself without torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

PAGE = 64  # tokens of KV in one page, everywhere: pool, snapshots, disk
F16, F32 = 2, 4  # bytes of a value

Shapes = dict[str, tuple[int, ...]]  # tensor names inside a layer; row-major, a matrix is [out, in]
Bytes = dict[str, int]  # by the name under which a plan shows them


@dataclass(frozen=True, slots=True)
class Span:
    """Contiguous layers, half-open."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        assert 0 <= self.start <= self.stop, f"span [{self.start}, {self.stop}) runs backwards"

    def __contains__(self, layer: object) -> bool:
        return isinstance(layer, int) and self.start <= layer < self.stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"

    @property
    def layers(self) -> range:
        return range(self.start, self.stop)


class MixerSpec(ABC):
    """How one layer mixes positions: sizes, tensors and bytes. Its block and state, which need torch, are registered in
    `layers/` under the same `kind`.

    A kind holds its state in one or both of two ways: pages of the stage's pool, which grow with the position
    (`page_bytes`), and tensors of a fixed size per slot (`slot_bytes`).
    """

    __slots__ = ()
    kind: ClassVar[str]

    @abstractmethod
    def tensors(self, hidden: int) -> Shapes:
        """What a model file holds for one such layer."""

    @property
    @abstractmethod
    def row_values(self) -> int:
        """Values of one row of activations at the widest point of the mixer."""

    @property
    def head_sizes(self) -> frozenset[int]:
        """Sizes that kernels are compiled for."""
        return frozenset()

    def page_bytes(self, kv_type: str) -> int:
        """One page of one layer; 0 where the kind keeps none."""
        return 0

    def page_key_bytes(self) -> int:
        """The mean key of one page of one layer, by which sparse mode scores the page; 0 where the kind keeps none."""
        return 0

    def slot_bytes(self) -> Bytes:
        """State of a fixed size, of one layer and slot."""
        return {}

    def rewind_bytes(self, rows: int, value_bytes: int = F32) -> int:
        """What one layer and slot keeps of a block of `rows` rows under verify until it is known how many of them stay,
        everything included; value_bytes: of an activation."""
        return 0

    def work_bytes(self, rows: int, decode_rows: int) -> Bytes:
        """What a device needs beside the activations while one such layer runs `rows` rows, of which up to
        `decode_rows` are single rows of long sequences. Layers take turns, so a stage needs the most of its layers."""
        return {}

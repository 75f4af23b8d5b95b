"""A weight on a device: dense, or quantised in planes that a GPU reads in whole 16-byte pieces."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Packed:
    """Quantised rows, taken apart into planes. A block is 32 consecutive weights of a row; the planes, by block:

    codes   int32 [rows, blocks, words]   4 words with 8 nibbles each, nibble j of word i is weight 4·j + i;
                                          for 8-bit codes 8 words with 4 bytes each, byte j of word i is weight 8·j + i
    high    int32 [rows, blocks]          5-bit codes: bit 4·j + i is the fifth bit of weight 4·j + i
    scales  one entry per block, supers   one entry per 8 blocks, as `packing` lists per type

    Grouped types (`packing.GROUPED`) interleave four blocks i = 0 … 3: thread t of the four that share a row in a
    matrix instruction then finds its weights of all four in one piece. Weight 16·s + 4·t + 2·u + h of a block
    (s, u, h < 2) is

    codes   the nibble at bit 16·h + 4·f, with f = 2·s + u, of word 4·t + i of the group's 16
    high    5-bit codes, int32: bit 16·h + 4·i + f of the group's entry t
            6-bit codes, int64: bits 32·(i // 2) + 16·h + 8·(i % 2) + 2·f and the next of the group's entry t
    """

    type: str
    rows: int
    columns: int
    codes: Tensor
    high: Tensor | None
    scales: Tensor
    supers: Tensor | None

    @property
    def planes(self) -> tuple[Tensor, ...]:
        return tuple(plane for plane in (self.codes, self.high, self.scales, self.supers) if plane is not None)

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [out, in] on a device; exactly one of `dense` and `packed` is there."""

    shape: tuple[int, int]
    dense: Tensor | None = None
    packed: Packed | None = None

    def __post_init__(self) -> None:
        assert (self.dense is None) != (self.packed is None), "a matrix is either dense or packed"

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return self.shape[1]

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes if self.packed is not None else self.values.nbytes

    @property
    def values(self) -> Tensor:
        """The dense values."""
        assert self.dense is not None, f"a packed {self.shape} matrix has no dense values"
        return self.dense

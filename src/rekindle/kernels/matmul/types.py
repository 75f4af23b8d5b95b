"""A weight on a device: dense, in planes that a GPU reads in whole 16-byte pieces, or in lanes for a CPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

FEW_ROWS = 32  # up to here the tensor core kernels beat expanding the matrix first


@dataclass(frozen=True, slots=True)
class Packed:
    """Quantised rows, taken apart into planes. A block is 32 consecutive weights of a row; the planes, by block:

    codes   int32 [rows, blocks, words]   4 words with 8 nibbles each, nibble j of word i is weight 4·j + i;
                                          for 8-bit codes 8 words with 4 bytes each, byte j of word i is weight 8·j + i
    high_bits    int32 [rows, blocks]          5-bit codes: bit 4·j + i is the fifth bit of weight 4·j + i
    scales  one entry per block, super_scales   one entry per 8 blocks, as `packing` lists per type

    Grouped types (`packing.GROUPED`) interleave four blocks i = 0 … 3: thread t of the four that share a row in a
    matrix instruction then finds its weights of all four in one piece. Weight 16·s + 4·t + 2·u + h of a block
    (s, u, h < 2) is

    codes   the nibble at bit 16·h + 4·f, with f = 2·s + u, of word 4·t + i of the group's 16
    high_bits    5-bit codes, int32: bit 16·h + 4·i + f of the group's entry t
            6-bit codes, int64: bits 32·(i // 2) + 16·h + 8·(i % 2) + 2·f and the next of the group's entry t
    """

    type: str
    rows: int
    columns: int
    codes: Tensor
    high_bits: Tensor | None
    scales: Tensor
    super_scales: Tensor | None

    @property
    def planes(self) -> tuple[Tensor, ...]:
        return tuple(
            plane for plane in (self.codes, self.high_bits, self.scales, self.super_scales) if plane is not None
        )

    @property
    def nbytes(self) -> int:
        return sum(plane.nbytes for plane in self.planes)


def planes_of(weight: Packed | Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four planes for a launch; the codes stand in for a plane that the type does not have."""
    if isinstance(weight, Tensor):
        return weight, weight, weight, weight
    codes = weight.codes
    return (
        codes,
        codes if weight.high_bits is None else weight.high_bits,
        weight.scales,
        (codes if weight.super_scales is None else weight.super_scales),
    )


def row_slab(weight: Packed, start: int, stop: int) -> Packed:
    """Rows [start, stop), the planes shared."""
    return Packed(
        weight.type, stop - start, weight.columns, weight.codes[start:stop],
        None if weight.high_bits is None else weight.high_bits[start:stop], weight.scales[start:stop],
        None if weight.super_scales is None else weight.super_scales[start:stop],
    )  # fmt: skip


class LaneMatrix(ctypes.Structure):
    """How the kernels in C know a matrix."""

    _fields_ = (
        ("type", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("data", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Lanes:
    """Rows for a CPU, sixteen side by side (`native/blocks.h`), the experts concatenated."""

    type: str
    rows: int  # of one expert
    columns: int
    data: Tensor  # uint8
    struct: LaneMatrix  # which the kernels are given the address of
    library: Any  # whose kernels read it
    experts: int = 1
    address: int = field(init=False)  # of the struct

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", ctypes.addressof(self.struct))

    def expert(self, number: int) -> Lanes:
        """One of them; the memory is the same."""
        data = self.data.view(self.experts, -1)[number]
        struct = LaneMatrix(self.struct.type, self.rows, self.columns, data.data_ptr())
        return Lanes(self.type, self.rows, self.columns, data, struct, self.library)

    def repeated(self, slots: Tensor) -> Lanes:
        """Lanes of the same type and shape for several experts, in memory [experts, …] that is not yet filled."""
        experts, data = slots.shape[0], slots.view(-1)
        struct = LaneMatrix(self.struct.type, self.rows, self.columns, data.data_ptr())
        return Lanes(self.type, self.rows, self.columns, data, struct, self.library, experts)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight [out, in] on a device; exactly one of `dense`, `packed` and `lanes` is there."""

    shape: tuple[int, int]
    dense: Tensor | None = None
    packed: Packed | None = None
    lanes: Lanes | None = None

    def __post_init__(self) -> None:
        forms = (self.dense, self.packed, self.lanes)
        assert sum(form is not None for form in forms) == 1, "a matrix is dense, packed or in lanes"

    @property
    def rows(self) -> int:
        return self.shape[0]

    @property
    def columns(self) -> int:
        return self.shape[1]

    @property
    def nbytes(self) -> int:
        stored = self.packed or self.lanes
        return self.values.nbytes if stored is None else stored.nbytes

    @property
    def values(self) -> Tensor:
        """The dense values."""
        assert self.dense is not None, f"a {self.shape} matrix that is kept as it is stored has no dense values"
        return self.dense

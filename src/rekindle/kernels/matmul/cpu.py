"""Products on a CPU, by the kernels in C: weights as they are stored, activations in 16 bits, 32 columns to a scale.

With weights of 16 or 32 bits activations stay float32. A row's result does not depend on the rows beside it, nor on the
threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import gguf
import numpy as np
import torch
from torch import Tensor

from rekindle.kernels import native
from rekindle.kernels.matmul.dense import PLAIN
from rekindle.kernels.matmul.types import LaneMatrix, Lanes

SIDE = 16  # rows side by side
QUANTISED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")
TYPES = (*QUANTISED, *PLAIN)
_Addresses = ctypes.c_void_p * 8  # of the matrices that one call takes at most


def can_multiply() -> bool:
    return native.library() is not None


def lay(raw: np.ndarray, type: str, rows: int, columns: int, experts: int = 1) -> Lanes:
    """raw uint8 [experts · rows, bytes of a row], its rows at any distance from one another."""
    lanes = empty_lanes(type, rows, columns, experts)
    if rows % SIDE == 0:  # experts follow one another without a gap, as rows of one matrix do
        _pack(raw, lanes, experts * rows)
    else:
        for expert in range(experts):
            _pack(raw[expert * rows :], lanes.expert(expert), rows)
    return lanes


def empty_lanes(type: str, rows: int, columns: int, experts: int) -> Lanes:
    library, number = native.library(), int(gguf.GGMLQuantizationType[type])
    size = experts * -(-rows // SIDE) * library.packed_group_bytes(number, columns)
    data = torch.empty(size, dtype=torch.uint8)
    return Lanes(type, rows, columns, data, LaneMatrix(number, rows, columns, data.data_ptr()), library, experts)


def _pack(raw: np.ndarray, lanes: Lanes, rows: int) -> None:
    assert raw.strides[1] == 1 or raw.shape[1] == 1, "the bytes of a row lie behind one another"
    place = raw.ctypes.data, raw.strides[0]
    lanes.library.pack_matrix(lanes.struct.type, *place, rows, lanes.columns, lanes.struct.data)


def nbytes(type: str, rows: int, columns: int) -> int:
    """What `lay` takes for one matrix, without the library: placement counts it where there may be no compiler."""
    block, stored = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    more = {"Q4_K": 4, "Q5_K": 4, "IQ4_XS": 2}.get(type, 0)  # scales of 6 bits take 8
    return -(-rows // SIDE) * SIDE * (columns // block) * (stored + more)


def multiply_all(x: Tensor, lanes: Sequence[Lanes]) -> list[Tensor]:
    """x [rows, in] -> [rows, out] in x.dtype through each of them."""
    wide, rows, count = as_rows(x), x.shape[0], len(lanes)
    outs = [torch.empty(rows, weight.rows) for weight in lanes]
    addresses = _Addresses(*[weight.address for weight in lanes])
    targets = _Addresses(*[out.data_ptr() for out in outs])
    lanes[0].library.multiply_all(addresses, count, wide.data_ptr(), wide.stride(0), rows, targets)
    return outs if x.dtype is torch.float32 else [out.to(x.dtype) for out in outs]


def swiglu(x: Tensor, gate: Lanes, up: Lanes) -> Tensor:
    """silu(gate x) · (up x)."""
    wide = as_rows(x)
    out = torch.empty(x.shape[0], gate.rows)
    gate.library.multiply_gated(gate.address, up.address, wide.data_ptr(), wide.stride(0), x.shape[0], out.data_ptr())
    return out if x.dtype is torch.float32 else out.to(x.dtype)


def stored_rows(raw: np.ndarray, type: str, columns: int, ids: Tensor) -> Tensor:
    """Rows of a table uint8 [rows, bytes of a row] that stays where it is, as values float32 [len(ids), columns]."""
    assert raw.strides[1] == 1 or raw.shape[1] == 1, "the bytes of a row lie behind one another"
    number, ids, out = int(gguf.GGMLQuantizationType[type]), ids.int().contiguous(), torch.empty(len(ids), columns)
    table = raw.ctypes.data, raw.strides[0], raw.shape[0]
    native.library().stored_values(number, *table, columns, ids.data_ptr(), len(ids), out.data_ptr())
    return out


def values(lanes: Lanes, ids: Tensor) -> Tensor:
    """The rows with these numbers, float32; of one that is not there, nothing is a number."""
    numbers, out = ids.int().contiguous(), torch.empty(len(ids), lanes.columns)
    lanes.library.packed_values(lanes.address, numbers.data_ptr(), len(ids), out.data_ptr())
    return out


def as_rows(x: Tensor) -> Tensor:
    """float32, every row in one piece."""
    wide = x if x.dtype is torch.float32 else x.float()
    return wide if wide.stride(-1) == 1 else wide.contiguous()

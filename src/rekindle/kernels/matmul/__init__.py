"""Products with a weight matrix. This file alone decides whether a weight stays quantised or is expanded."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from rekindle.kernels.matmul import naive
from rekindle.kernels.matmul.dense import PLAIN, kept_dtype, product
from rekindle.kernels.matmul.packing import FORMATS, join, pack
from rekindle.kernels.matmul.types import Matrix, Packed
from rekindle.kernels.matmul.upload import upload

SLAB = 1 << 24  # weights expanded at a time on the CPU


def make_matrix(raw: np.ndarray, type: str, shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> Matrix:
    """raw uint8 [out, bytes of a row] of a GGUF type -> a weight on the device.

    On a GPU the types of `packing` stay quantised, in planes; everything else is kept as values.
    """
    if stays_quantised(type, device):
        return Matrix(shape, packed=pack(upload(raw, device), type, shape[1]))
    return Matrix(shape, dense=expanded(raw, type, shape[1], device, dtype).view(shape))


def stays_quantised(type: str, device: torch.device) -> bool:
    return device.type == "cuda" and type in FORMATS


def expanded(raw: np.ndarray, type: str, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Stored rows as values [rows, columns] of `kept_dtype`, slab by slab so that float32 never exists in whole."""
    dtype = kept_dtype(type, device, dtype)
    if type in PLAIN:
        return upload(raw, device).view(PLAIN[type]).view(raw.shape[0], columns).to(dtype)
    values = torch.empty(raw.shape[0], columns, dtype=dtype, device=device)
    step = max(1, SLAB // columns)
    for at in range(0, raw.shape[0], step):
        values[at : at + step] = naive.stored_values(raw[at : at + step], type, columns)
    return values


def dense_matrix(values: Tensor) -> Matrix:
    """A weight [out, in] that is already there as values."""
    out, columns = values.shape
    return Matrix((out, columns), dense=values)


def join_matrices(matrices: list[Matrix]) -> Matrix | None:
    """The matrices one below the other as one, or nothing where their types differ."""
    if len({_like(matrix) for matrix in matrices}) > 1:
        return None
    shape = (sum(matrix.rows for matrix in matrices), matrices[0].columns)
    packed = [matrix.packed for matrix in matrices if matrix.packed is not None]
    if packed:
        return Matrix(shape, packed=join(packed))
    return Matrix(shape, dense=torch.cat([matrix.values for matrix in matrices]))


def multiply(x: Tensor, matrix: Matrix, then: Matrix | None = None) -> Tensor:
    """x [rows, in] -> [rows, out] in x.dtype.

    `then`: the matrix that will be read next. A GPU may fetch its beginning meanwhile.
    """
    if matrix.packed is None:
        return product(x, matrix.values)
    return _gpu().multiply(x, matrix.packed, then=then)


def multiply_in_parts(x: Tensor, matrix: Matrix, then: Matrix | None = None) -> Tensor:
    """The same, for `norm.add_rms_norm`: on a GPU perhaps [parts, rows, out], whose sum is the product."""
    if matrix.packed is None:
        return product(x, matrix.values)
    return _gpu().multiply_in_parts(x, matrix.packed, then)


def multiply_add(x: Tensor, matrix: Matrix, residual: Tensor) -> Tensor:
    """residual [rows, out] + x matrixᵀ, in residual's type."""
    if matrix.packed is None:
        return residual + product(x, matrix.values)
    return _gpu().multiply(x, matrix.packed, residual)


def multiply_all(x: Tensor, matrices: list[Matrix], then: Matrix | None = None) -> list[Tensor]:
    """The same x through several matrices; on a GPU a few rows take one launch for up to four of them. `then`: as in
    `multiply`."""
    if x.is_cuda and _gpu().few(x.shape[0]):
        return _gpu().multiply_by_all(x, matrices, then)
    return [multiply(x, matrix) for matrix in matrices]


def gather_rows(matrix: Matrix, ids: Tensor) -> Tensor:
    """The rows with these numbers, as values [len(ids), in]: how a table that lies on the device is read."""
    if matrix.packed is None:
        return matrix.values.index_select(0, ids.long())
    return _gpu().gather_rows(matrix.packed, ids)


def swiglu(x: Tensor, gate: Matrix, up: Matrix, then: Matrix | None = None) -> Tensor:
    """silu(gate x) · (up x): [rows, in] -> [rows, width]. `then`: as in `multiply`."""
    if gate.packed is not None and up.packed is not None:
        return _gpu().swiglu(x, gate.packed, up.packed, then)
    g, u = multiply_all(x, [gate, up])
    return _gpu().silu_mul(g, u) if x.is_cuda else silu(g) * u


def _like(matrix: Matrix) -> tuple[object, ...]:
    if matrix.packed is not None:
        return matrix.packed.type, matrix.columns
    return matrix.values.dtype, matrix.columns


def _gpu():  # type: ignore[no-untyped-def]
    """The Triton forms; imported at first use, since a machine without a GPU may have no Triton."""
    from rekindle.kernels.matmul import triton

    return triton


__all__ = [
    "Matrix",
    "Packed",
    "dense_matrix",
    "expanded",
    "gather_rows",
    "join_matrices",
    "kept_dtype",
    "make_matrix",
    "multiply",
    "multiply_add",
    "multiply_all",
    "multiply_in_parts",
    "product",
    "stays_quantised",
    "swiglu",
]

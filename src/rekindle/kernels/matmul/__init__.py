"""Products with a weight matrix. This file alone decides whether a weight stays quantised or is expanded.

On a CPU the kernels in C (`native/products.c`) multiply weights as they are stored, by way of `cpu`; without a compiler
torch multiplies expanded values. On a GPU the types of `packing` stay quantised, in planes, and `triton.choose` picks
a kernel, here by the file that holds it. "Tensor cores": bfloat16 rows through Q4_K, Q5_K or Q6_K on NVIDIA's cards
from Ampere on, 16 outputs or more (`triton.uses_tensor_cores`). Sizes are outputs × columns of a launch. "Gated":
silu(gate x) · (up x), in one launch.

    weight                            rows of x   kernel
    tensor cores, 4096 × 4096         1           gemv
    tensor cores, 4096 × 4096         2-8         skinny
    tensor cores, 4096 × 4096         9-32        fragments
    tensor cores, 4096 × 4096         33-         expand
    tensor cores, 8192 × 2048         1           gemv
    tensor cores, 8192 × 2048         2-16        skinny
    tensor cores, 8192 × 2048         17-32       fragments
    tensor cores, 8192 × 2048         33-         expand
    tensor cores, 16384 × 4096        1           gemv
    tensor cores, 16384 × 4096        2-16        skinny
    tensor cores, 16384 × 4096        17-32       stream_k
    tensor cores, 16384 × 4096        33-         expand
    tensor cores, 151936 × 2048       1           gemv
    tensor cores, 151936 × 2048       2-16        skinny
    tensor cores, 151936 × 2048       17-32       stream_k
    tensor cores, 151936 × 2048       33-         expand
    otherwise                         1           scalar_gemv
    otherwise                         2-127       tiled
    otherwise                         128-        expand
    gated, tensor cores, 8192 × 2048  1           gemv
    gated, tensor cores, 8192 × 2048  2-8         skinny
    gated, tensor cores, 8192 × 2048  9-32        stream_k
    gated, tensor cores, 8192 × 2048  33-         two products
    gated, tensor cores, 16384 × 4096 1           gemv
    gated, tensor cores, 16384 × 4096 2-8         skinny
    gated, tensor cores, 16384 × 4096 9-32        stream_k
    gated, tensor cores, 16384 × 4096 33-         two products
    gated, otherwise                  1           scalar_gemv
    gated, otherwise                  2-127       tiled
    gated, otherwise                  128-        two products

Weights kept as values on a GPU go through the vendor's library (`dense`); float32 rows through 16-bit values take
`scalar_gemv` for one row and `split_fp32` for more.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu

from rekindle.kernels.matmul import cpu, naive
from rekindle.kernels.matmul.dense import PLAIN, kept_dtype, product
from rekindle.kernels.matmul.packing import FORMATS, pack
from rekindle.kernels.matmul.types import FEW_ROWS, Lanes, Matrix, Packed
from rekindle.kernels.upload import Raw, as_array, upload

SLAB = 1 << 24  # weights expanded at a time on the CPU


def make_matrix(raw: Raw, type: str, shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> Matrix:
    """raw uint8 [out, bytes of a row] of a GGUF type -> a weight on the device.

    On a GPU the types of `packing` stay quantised, in planes, and on a CPU those of `cpu`, in lanes; everything else is
    kept as values, which on a CPU are in lanes too.
    """
    if stays_quantised(type, device):
        return Matrix(shape, packed=pack(upload(raw, device), type, shape[1]))
    if device.type == "cpu" and cpu.can_multiply():
        return Matrix(shape, lanes=lay_rows(as_array(raw), type, shape, dtype))
    return Matrix(shape, dense=expanded(raw, type, shape[1], device, dtype).view(shape))


def lay_rows(raw: np.ndarray, type: str, shape: tuple[int, ...], dtype: torch.dtype) -> Lanes:
    """Stored rows of a matrix [out, in], or of experts [experts, out, in], in lanes; as values where no kernel in C
    reads their type."""
    if type not in cpu.TYPES:
        values = expanded(raw, type, shape[-1], torch.device("cpu"), dtype)
        type = {dtype: name for name, dtype in PLAIN.items()}[values.dtype]
        raw = values.view(torch.uint8).numpy()
    return cpu.lay(raw, type, shape[-2], shape[-1], experts=raw.shape[0] // shape[-2])


def stays_quantised(type: str, device: torch.device) -> bool:
    return device.type == "cuda" and type in FORMATS


def expanded(raw: Raw, type: str, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Stored rows as values [rows, columns] of `kept_dtype`, slab by slab so that float32 never exists in whole."""
    dtype = kept_dtype(type, device, dtype)
    if type in PLAIN:
        return upload(raw, device).view(PLAIN[type]).view(raw.shape[0], columns).to(dtype)
    rows = as_array(raw)
    values = torch.empty(rows.shape[0], columns, dtype=dtype, device=device)
    step = max(1, SLAB // columns)
    for at in range(0, rows.shape[0], step):
        values[at : at + step] = naive.stored_values(rows[at : at + step], type, columns)
    return values


def multiply(x: Tensor, matrix: Matrix, prefetch: Matrix | None = None) -> Tensor:
    """x [rows, in] -> [rows, out] in x.dtype.

    `prefetch`: the matrix that will be read next. A GPU may fetch its beginning meanwhile.
    """
    if matrix.lanes is not None:
        return cpu.multiply_all(x, [matrix.lanes])[0]
    if matrix.packed is None:
        return product(x, matrix.values)
    return _gpu().multiply(x, matrix.packed, prefetch=prefetch)


def multiply_in_parts(x: Tensor, matrix: Matrix, prefetch: Matrix | None = None) -> Tensor:
    """The same, for `norm.add_rms_norm`: on a GPU perhaps [parts, rows, out], whose sum is the product."""
    if matrix.packed is None:
        return multiply(x, matrix)
    return _gpu().multiply_in_parts(x, matrix.packed, prefetch)


def multiply_all(x: Tensor, matrices: list[Matrix], prefetch: Matrix | None = None) -> list[Tensor]:
    """The same x through several matrices; on a GPU a few rows take one launch for up to four of them, on a CPU all of
    them one call. `prefetch`: as in `multiply`."""
    lanes = [matrix.lanes for matrix in matrices if matrix.lanes is not None]
    if len(lanes) == len(matrices):
        return cpu.multiply_all(x, lanes)
    if x.is_cuda and _gpu().few(x.shape[0]):
        return _gpu().multiply_by_all(x, matrices, prefetch)
    return [multiply(x, matrix) for matrix in matrices]


def gather_rows(matrix: Matrix, ids: Tensor) -> Tensor:
    """The rows with these numbers, as values [len(ids), in]: how a table that lies on the device is read."""
    if matrix.lanes is not None:
        return cpu.values(matrix.lanes, ids)
    if matrix.packed is None:
        return matrix.values.index_select(0, ids.long())
    from rekindle.kernels.matmul import expand

    return expand.gather_rows(matrix.packed, ids)


def swiglu(x: Tensor, gate: Matrix, up: Matrix, prefetch: Matrix | None = None) -> Tensor:
    """silu(gate x) · (up x): [rows, in] -> [rows, width]. `prefetch`: as in `multiply`."""
    if gate.packed is not None and up.packed is not None:
        return _gpu().swiglu(x, gate.packed, up.packed, prefetch)
    if gate.lanes is not None and up.lanes is not None:
        return cpu.swiglu(x, gate.lanes, up.lanes)
    g, u = multiply_all(x, [gate, up])
    return _gpu().silu_mul(g, u) if x.is_cuda else silu(g) * u


def _gpu():  # type: ignore[no-untyped-def]
    """The Triton forms; imported at first use, since a machine without a GPU may have no Triton."""
    from rekindle.kernels.matmul import triton

    return triton


__all__ = [
    "FEW_ROWS",
    "Lanes",
    "Matrix",
    "Packed",
    "expanded",
    "gather_rows",
    "kept_dtype",
    "lay_rows",
    "make_matrix",
    "multiply",
    "multiply_all",
    "multiply_in_parts",
    "product",
    "stays_quantised",
    "swiglu",
]

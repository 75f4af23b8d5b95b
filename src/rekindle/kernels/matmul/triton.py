"""Products with packed weights on a GPU: which kernel takes them, and the launches that several matrices share."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels.device import pdl_arguments
from rekindle.kernels.matmul import fragments, mma, scalar_gemv, skinny, stream_k, tensor_core, tiled
from rekindle.kernels.matmul.dense import product
from rekindle.kernels.matmul.expand import many_rows
from rekindle.kernels.matmul.tensor_core import SEGMENTS
from rekindle.kernels.matmul.types import FEW_ROWS, Matrix, Packed

T = TypeVar("T")

MANY_ROWS = 128  # from here on a matrix is expanded whole
JOINING_ROWS = 256  # of a dense matrix that goes in the launch of quantised ones


class Kernel(StrEnum):
    """What multiplies packed weights, by the file that holds it."""

    GEMV = "gemv"
    SKINNY = "skinny"
    TENSOR_CORE = "tensor_core"
    FRAGMENTS = "fragments"
    STREAM_K = "stream_k"
    SCALAR_GEMV = "scalar_gemv"
    TILED = "tiled"
    EXPAND = "expand"


def choose(rows: int, width: int, columns: int, tensor_cores: bool) -> Kernel:
    """For rows through a launch of `width` outputs; tensor_cores: `uses_tensor_cores` of its matrices."""
    if not tensor_cores:
        return Kernel.SCALAR_GEMV if rows == 1 else Kernel.TILED if rows < MANY_ROWS else Kernel.EXPAND
    if rows == 1:
        return Kernel.GEMV
    if skinny.pays(rows, width):
        return Kernel.SKINNY
    if not few(rows):
        return Kernel.EXPAND
    if stream_k.pays(rows, width * columns):
        return Kernel.STREAM_K
    return Kernel.FRAGMENTS if fragments.pays(rows, width) else Kernel.TENSOR_CORE


def choose_swiglu(rows: int, width: int, columns: int, alike: bool, tensor_cores: bool) -> Kernel | None:
    """For silu(gate x) · (up x), `width` outputs of both together, in one launch; None: two products, then `silu_mul`.
    alike: both are of one type."""
    if not alike:
        return None
    if not tensor_cores:
        return Kernel.SCALAR_GEMV if rows == 1 else Kernel.TILED if rows < MANY_ROWS else None
    if rows == 1:
        return Kernel.GEMV
    if rows <= skinny.SKINNY_ROWS:
        return Kernel.SKINNY
    if not few(rows):
        return None
    return Kernel.STREAM_K if rows > 8 or stream_k.pays(rows, width * columns) else Kernel.TENSOR_CORE


def multiply(x: Tensor, weight: Packed, prefetch: Matrix | None = None) -> Tensor:
    """x [rows, in] -> [rows, out] in x.dtype."""
    kernel = choose(x.shape[0], weight.rows, weight.columns, uses_tensor_cores(x, weight))
    if kernel is Kernel.EXPAND:
        return many_rows(x, weight)
    if kernel is Kernel.TILED:
        return tiled.few_rows(x, weight)
    if kernel is Kernel.SCALAR_GEMV:
        return scalar_gemv.launch_row(x, [weight])[0]
    return _products(x, [weight], prefetch)[0]


def multiply_in_parts(x: Tensor, weight: Packed, prefetch: Matrix | None = None) -> Tensor:
    rows, behind = x.shape[0], _planes_to_come(x, prefetch)
    if rows <= skinny.SKINNY_ROWS and uses_tensor_cores(x, weight):
        if rows == 1 and (config := tensor_core.parts_config(weight)) is not None:
            return tensor_core.multiply(x, [weight], config=config, prefetch=behind)[0]
        if rows > 1 and (form := skinny.parts_config(weight)) is not None:
            return skinny.multiply(x, [weight], form, behind)[0]
    return multiply(x, weight, prefetch=prefetch)


def multiply_by_all(x: Tensor, matrices: list[Matrix], prefetch: Matrix | None = None) -> list[Tensor]:
    """A few rows through several matrices, in as few launches as may be."""
    outs: dict[int, Tensor] = {}
    quantised = {i: m.packed for i, m in enumerate(matrices) if m.packed is not None and uses_tensor_cores(x, m.packed)}
    small = {i: m.values for i, m in enumerate(matrices) if m.packed is None and joins_launch(m.values)}
    launched: dict[int, Packed | Tensor] = {**small, **quantised} if quantised else {}
    for some in _by_fours(list(launched)):
        outs |= zip(some, _products(x, [launched[i] for i in some], prefetch=prefetch), strict=True)
    rest = [i for i in range(len(matrices)) if i not in launched]
    if x.shape[0] == 1:
        outs |= zip(rest, multiply_row_by_all(x, [matrices[i] for i in rest]), strict=True)
    else:
        outs |= {i: _multiply_any(x, matrices[i]) for i in rest}
    return [outs[i] for i in range(len(matrices))]


def _products(x: Tensor, weights: list[Packed | Tensor], prefetch: Matrix | None = None) -> list[Tensor]:
    """A few rows through several matrices in one launch of the tensor cores."""
    rows, columns = x.shape
    width = sum(weight.shape[0] if isinstance(weight, Tensor) else weight.rows for weight in weights)
    kernel = choose(rows, width, columns, tensor_cores=True)
    if kernel is Kernel.SKINNY:
        return skinny.multiply(x, weights, prefetch=_planes_to_come(x, prefetch))
    if kernel is Kernel.STREAM_K:
        return stream_k.multiply(x, weights)
    if kernel is Kernel.FRAGMENTS:
        return fragments.multiply(x, weights)
    return tensor_core.multiply(x, weights, prefetch=_planes_to_come(x, prefetch) if rows == 1 else None)


def joins_launch(values: Tensor) -> bool:
    """A dense matrix can go in the launch of quantised ones: of the right type, and small beside them."""
    return values.dtype == torch.bfloat16 and values.is_contiguous() and values.shape[0] <= JOINING_ROWS


def multiply_row_by_all(x: Tensor, matrices: list[Matrix]) -> list[Tensor]:
    """One row through several matrices, SEGMENTS of them in a launch, without the tensor cores."""
    weights = [matrix.values if matrix.packed is None else matrix.packed for matrix in matrices]
    return [out for part in _by_fours(weights) for out in scalar_gemv.launch_row(x, part)]


def _planes_to_come(x: Tensor, prefetch: Matrix | None) -> Packed | None:
    """Of the matrix that will be read next, if it goes through the tensor cores."""
    return (
        prefetch.packed
        if prefetch is not None and prefetch.packed is not None and uses_tensor_cores(x, prefetch.packed)
        else None
    )


def swiglu(x: Tensor, gate: Packed, up: Packed, prefetch: Matrix | None = None) -> Tensor:
    """silu(gate x) · (up x), [rows, width] in x.dtype."""
    width, alike = gate.rows + up.rows, gate.type == up.type
    kernel = choose_swiglu(x.shape[0], width, gate.columns, alike, uses_tensor_cores(x, gate))
    if kernel is Kernel.GEMV:
        return tensor_core.swiglu(x, gate, up, prefetch=_planes_to_come(x, prefetch))
    if kernel is Kernel.SKINNY:
        return skinny.swiglu(x, gate, up, prefetch=_planes_to_come(x, prefetch))
    if kernel is Kernel.TENSOR_CORE:
        return tensor_core.swiglu(x, gate, up)
    if kernel is Kernel.STREAM_K:
        return stream_k.swiglu(x, gate, up)
    if kernel is Kernel.SCALAR_GEMV:
        return scalar_gemv.swiglu_row(x, gate, up)
    if kernel is Kernel.TILED:
        return tiled.few_rows(x, gate, up)
    return silu_mul(multiply(x, gate), multiply(x, up))


def uses_tensor_cores(x: Tensor, *weights: Packed) -> bool:
    """All of these can be multiplied by x in NVIDIA's tensor cores."""
    return mma.available(x) and all(mma.takes(weight) for weight in weights)


def few(rows: int) -> bool:
    return rows <= FEW_ROWS


def _multiply_any(x: Tensor, matrix: Matrix) -> Tensor:
    return product(x, matrix.values) if matrix.packed is None else multiply(x, matrix.packed)


def _by_fours(items: list[T]) -> list[list[T]]:
    return [items[at : at + SEGMENTS] for at in range(0, len(items), SEGMENTS)]


@triton.jit
def _silu_mul_kernel(gate, up, out, size, B: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    o = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    g = tl.load(gate + o, o < size, other=0.0).to(tl.float32)
    u = tl.load(up + o, o < size, other=0.0).to(tl.float32)
    tl.store(out + o, g * tl.sigmoid(g) * u, o < size)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, both contiguous and of one shape; into gate."""
    _silu_mul_kernel[(triton.cdiv(gate.numel(), 4096),)](
        gate, up, gate, gate.numel(), B=4096, num_warps=8, **pdl_arguments(gate.device)
    )  # fmt: skip
    return gate

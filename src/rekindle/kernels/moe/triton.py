"""Routed experts on a GPU: which kernels take them, and how the results of the pairs are combined.

A pair is a row and one of its experts.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from enum import StrEnum
from typing import TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rekindle.kernels import matmul
from rekindle.kernels.device import pdl_arguments
from rekindle.kernels.matmul.triton import uses_tensor_cores
from rekindle.kernels.matmul.types import Packed
from rekindle.kernels.moe import along_outputs, groups, integers, pairs, tensor_core
from rekindle.kernels.moe.cold import Missing
from rekindle.kernels.moe.grouping import group
from rekindle.kernels.moe.types import ExpertStack, SharedExpert

Three = tuple[Packed, Packed, Packed]

FEW_ROWS = 4  # up to here every pair reads its own weights
TENSOR_CORE_PAIR_ROWS = 8  # the same, on tensor cores
INTEGER_ROWS = 32  # up to here most experts have a pair or two
ALONG_ROWS = 1280  # from INTEGER_ROWS up to here warps stand along the outputs …
ALONG_BESIDE_ROWS = 256  # … and up to here the shared expert runs in the launches of the others
MANY_ROWS = 3072  # from here on experts are expanded


class ExpertKernel(StrEnum):
    """What computes routed experts, by file and function."""

    TENSOR_CORE_PAIRS = "tensor_core.by_pair"
    PAIRS = "pairs.by_pair"
    INTEGERS = "integers.run_experts"
    ALONG_OUTPUTS = "along_outputs.grouped_shares"
    GROUPS = "groups.run_grouped"
    EXPANDED_GROUPS = "groups.run_grouped, expanded"


class Shared(StrEnum):
    """How the shared expert can run where every pair reads its own weights."""

    NONE = "no shared expert"
    TENSOR_CORES = "one more pair, on tensor cores"
    PAIR = "one more pair"
    APART = "by products of its own"


def choose(rows: int, alike: bool, tensor_cores: bool, shared: Shared) -> ExpertKernel:
    """alike: gate and up are of one type; tensor_cores: `uses_tensor_cores` of the three stacks."""
    on_tensor_cores = alike and tensor_cores
    by_pair = alike and rows <= (TENSOR_CORE_PAIR_ROWS if on_tensor_cores else FEW_ROWS)
    if by_pair and shared is not Shared.APART:
        return ExpertKernel.TENSOR_CORE_PAIRS if on_tensor_cores and shared is not Shared.PAIR else ExpertKernel.PAIRS
    if on_tensor_cores and rows <= INTEGER_ROWS:
        return ExpertKernel.INTEGERS
    if on_tensor_cores and rows <= ALONG_ROWS:
        return ExpertKernel.ALONG_OUTPUTS
    return ExpertKernel.EXPANDED_GROUPS if rows >= MANY_ROWS else ExpertKernel.GROUPS


def takes_missing(h: Tensor, gate: ExpertStack, up: ExpertStack, down: ExpertStack, shared: SharedExpert) -> bool:
    """One row may go to `moe_missing`."""
    packed = shared.gate.packed, shared.up.packed, shared.down.packed
    if h.shape[0] != 1 or gate.planes.type != up.planes.type or not _fits_pairs(packed, gate.rows):
        return False
    return uses_tensor_cores(h, gate.planes, up.planes, down.planes) and uses_tensor_cores(h, *packed)


def moe_missing(
    h: Tensor, slots: Tensor, weights: Tensor, gate: ExpertStack, up: ExpertStack, down: ExpertStack,
    shared: SharedExpert, missing: Missing,
) -> Tensor:  # fmt: skip
    """The chosen experts of one row, some of which are brought to their slots first, and the shared one."""
    packed = shared.gate.packed, shared.up.packed, shared.down.packed
    assert _fits_pairs(packed, gate.rows), "asked of takes_missing before"
    planes = gate.planes, up.planes, down.planes
    beside = (*packed, shared.scale)
    return tensor_core.by_pair(h, slots, weights, *planes, gate.rows, beside, missing=missing)


def moe(
    h: Tensor, ids: Tensor, weights: Tensor, gate: ExpertStack, up: ExpertStack, down: ExpertStack,
    shared: SharedExpert | None = None,
) -> Tensor:  # fmt: skip
    """The chosen experts, weighted, and the shared one: [rows, hidden]."""
    planes = gate.planes, up.planes, down.planes
    alike, tensor_cores = gate.planes.type == up.planes.type, uses_tensor_cores(h, *planes)
    kernel = choose(h.shape[0], alike, tensor_cores, _kind_of(h, shared, gate.rows))
    if kernel in (ExpertKernel.PAIRS, ExpertKernel.TENSOR_CORE_PAIRS):
        run = tensor_core.by_pair if kernel is ExpertKernel.TENSOR_CORE_PAIRS else pairs.by_pair
        return run(h, ids, weights, *planes, gate.rows, _as_pair(shared, gate.rows))
    if kernel is ExpertKernel.INTEGERS:
        return by_integers(h, ids, weights, gate, up, down, shared)
    if kernel is ExpertKernel.ALONG_OUTPUTS:
        return by_group_along_outputs(h, ids, weights, gate, up, down, shared)
    return by_group(h, ids, weights, gate, up, down, shared, expanding=kernel is ExpertKernel.EXPANDED_GROUPS)


def _kind_of(h: Tensor, shared: SharedExpert | None, width: int) -> Shared:
    if shared is None:
        return Shared.NONE
    packed = shared.gate.packed, shared.up.packed, shared.down.packed
    if not _fits_pairs(packed, width):
        return Shared.APART
    return Shared.TENSOR_CORES if uses_tensor_cores(h, *packed) else Shared.PAIR


def _as_pair(shared: SharedExpert | None, width: int) -> tuple[Packed, Packed, Packed, Tensor] | None:
    if shared is None:
        return None
    packed = shared.gate.packed, shared.up.packed, shared.down.packed
    assert _fits_pairs(packed, width), "choose has asked"
    return *packed, shared.scale


def _fits_pairs(packed: tuple[Packed | None, Packed | None, Packed | None], width: int) -> TypeGuard[Three]:
    """The shared expert can run as one more pair: quantised, gate and up alike, as wide as the others."""
    gate, up, down = packed
    if gate is None or up is None or down is None:
        return False
    return gate.type == up.type and gate.rows == width


def by_group(
    h: Tensor, ids: Tensor, weights: Tensor, gate: ExpertStack, up: ExpertStack, down: ExpertStack,
    shared: SharedExpert | None, expanding: bool,
) -> Tensor:  # fmt: skip
    """Each expert's weights are read once per tile of its pairs; `expanding` turns them into values beforehand."""
    hidden = h.shape[1]
    used, pairs = ids.shape[1], ids.numel()
    h = h.contiguous()
    density = triton.cdiv(2 * pairs, gate.experts)
    order, starts = group(ids, gate.experts)
    inner = torch.empty(pairs, gate.rows, dtype=h.dtype, device=h.device)
    shares = torch.empty(pairs, hidden, dtype=torch.float32, device=h.device)
    tile = groups.group_config(h.device, density, expanding)
    groups.run_grouped(h, order, starts, weights, inner, [gate, up], used, tile, expanding)
    groups.run_grouped(inner, order, starts, weights, shares, [down], used, tile, expanding)
    return _combined(h, shares, used, shared)


def by_integers(
    h: Tensor, ids: Tensor, weights: Tensor, gate: ExpertStack, up: ExpertStack, down: ExpertStack,
    shared: SharedExpert | None,
) -> Tensor:  # fmt: skip
    """The same through `integers`, for rows so few that most experts have a pair or two."""
    h = h.contiguous()
    beside = _beside(h, shared, gate.rows)
    planes = gate.planes, up.planes, down.planes
    shares = integers.run_experts(h, ids, weights, *planes, gate.experts, beside)
    extra = shares[ids.numel() :] if beside is not None else None
    return _combined(h, shares, ids.shape[1], shared, extra)


def by_group_along_outputs(
    h: Tensor, ids: Tensor, weights: Tensor, gate: ExpertStack, up: ExpertStack, down: ExpertStack,
    shared: SharedExpert | None,
    config: along_outputs.AlongConfig | None = None,
) -> Tensor:  # fmt: skip
    """The same through `along_outputs`, for an expert with a few to some dozen pairs."""
    h = h.contiguous()
    rows, used = ids.shape
    beside = _alike(h, shared, gate, up, down) if rows <= ALONG_BESIDE_ROWS else None
    shares = along_outputs.grouped_shares(
        h, ids, weights, gate.planes, up.planes, down.planes, gate.experts, beside,
        config or along_outputs.along_config(rows * used / gate.experts),
    )  # fmt: skip
    extra = shares[ids.numel() :] if beside is not None else None
    return _combined(h, shares, used, shared, extra)


def _beside(h: Tensor, shared: SharedExpert | None, width: int) -> Three | None:
    """The shared expert's planes, where it can run in the launches of the others."""
    if shared is None:
        return None
    packed = shared.gate.packed, shared.up.packed, shared.down.packed
    return packed if _fits_pairs(packed, width) and uses_tensor_cores(h, *packed) else None


def _alike(
    h: Tensor, shared: SharedExpert | None, gate: ExpertStack, up: ExpertStack, down: ExpertStack
) -> Three | None:  # fmt: skip
    """As `_beside`, where the shared expert is of the others' types, too."""
    beside = _beside(h, shared, gate.rows)
    types = gate.planes.type, up.planes.type, down.planes.type
    return beside if beside is not None and tuple(part.type for part in beside) == types else None


def _combined(
    h: Tensor, shares: Tensor, used: int, shared: SharedExpert | None,
    extra: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The pairs' shares [pairs, hidden] added up by row, with the shared expert. `extra`: what the
    shared expert gives, if it is known."""
    rows, hidden = h.shape
    if shared is not None and extra is None:
        extra = matmul.multiply(matmul.swiglu(h, shared.gate, shared.up), shared.down)
    out = torch.empty(rows, hidden, dtype=h.dtype, device=h.device)
    whole = triton.next_power_of_2(hidden)
    block = min(512, whole)
    _combine_kernel[(rows, triton.cdiv(hidden, block))](
        shares, h, h if shared is None else shared.scale, h if extra is None else extra,
        out, hidden,
        USED=used, SHARED=shared is not None, B=block, H=whole, num_warps=4,
        **pdl_arguments(h.device),
    )  # fmt: skip
    return out


@triton.jit
def _combine_kernel(
    shares, h, scale, shared, out, hidden,
    USED: tl.constexpr, SHARED: tl.constexpr, B: tl.constexpr, H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[row] = Σ over places of shares[row, place], plus the shared expert by its share.

    Everything is asked for at once: H, a power of two, is at least hidden."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * B + tl.arange(0, B)
    mask = n < hidden
    total = tl.zeros([B], tl.float32)
    for place in tl.static_range(USED):
        total += tl.load(shares + (row * USED + place) * hidden + n, mask, other=0.0)
    if SHARED:
        k = tl.arange(0, H)
        x = tl.load(h + row * hidden + k, k < hidden, other=0.0).to(tl.float32)
        share = tl.sigmoid(tl.sum(x * tl.load(scale + k, k < hidden, other=0.0).to(tl.float32), 0))
        total += share * tl.load(shared + row * hidden + n, mask, other=0.0).to(tl.float32)
    tl.store(out + row * hidden + n, total, mask)

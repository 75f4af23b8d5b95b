"""Routed experts on a CPU, by the kernels in C: one call chooses, one computes, for any number of rows."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from rekindle.kernels import native
from rekindle.kernels.matmul.cpu import as_rows
from rekindle.kernels.matmul.types import LaneMatrix, Lanes
from rekindle.kernels.moe.types import SharedExpert


class _Stack(ctypes.Structure):
    _fields_ = (("gate", LaneMatrix), ("up", LaneMatrix), ("down", LaneMatrix), ("experts", ctypes.c_int64))


def route(h: Tensor, router: Lanes, used: int) -> tuple[Tensor, Tensor]:
    """`moe.route`."""
    h = as_rows(h).contiguous()
    ids, weights = torch.empty(h.shape[0], used, dtype=torch.int32), torch.empty(h.shape[0], used)
    router.library.route(router.address, h.data_ptr(), h.shape[0], used, ids.data_ptr(), weights.data_ptr())
    return ids, weights


def moe(
    h: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate: Lanes,
    up: Lanes,
    down: Lanes,
    shared: SharedExpert | None,
) -> Tensor:
    """`moe.moe`."""
    wide, ids, weights = as_rows(h).contiguous(), ids.int().contiguous(), weights.contiguous()
    out, (rows, used) = torch.empty_like(wide), ids.shape
    routed = _Stack(gate.struct, up.struct, down.struct, gate.experts)
    with_shared = None if shared is None else _shared_stack(shared)
    gate.library.moe(
        ctypes.byref(routed), None if with_shared is None else ctypes.byref(with_shared),
        None if shared is None else shared.scale.data_ptr(), wide.data_ptr(), ids.data_ptr(), weights.data_ptr(),
        rows, used, out.data_ptr(),
    )  # fmt: skip
    return out if h.dtype is torch.float32 else out.to(h.dtype)


def _shared_stack(shared: SharedExpert) -> _Stack:
    gate, up, down = shared.gate.lanes, shared.up.lanes, shared.down.lanes
    assert gate is not None and up is not None and down is not None, "experts in lanes have a shared one in lanes"
    return _Stack(gate.struct, up.struct, down.struct, 1)


def sum_shares(shares: Tensor, weights: Tensor) -> Tensor:
    """`moe.sum_shares`."""
    (rows, used, hidden), weights = shares.shape, weights.contiguous()
    out = torch.empty(rows, hidden)
    native.library().sum_shares(shares.data_ptr(), weights.data_ptr(), rows, used, hidden, out.data_ptr())
    return out


def add_shared(total: Tensor, extra: Tensor, h: Tensor, shared: SharedExpert) -> Tensor:
    """`moe.add_shared`."""
    out, wide = total.clone(), as_rows(h).contiguous()
    native.library().add_shared(
        extra.data_ptr(), shared.scale.data_ptr(), wide.data_ptr(), *total.shape, out.data_ptr()
    )
    return out

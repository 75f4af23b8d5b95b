"""RMS norms: plain, after adding to the residual stream, and gated."""

from __future__ import annotations

from torch import Tensor

from rekindle.kernels.norm import cpu, naive


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [rows, n], weight [n] -> [rows, n]; statistics in float32, result in x.dtype."""
    if x.is_cuda:
        from rekindle.kernels.norm import triton

        return triton.rms_norm(x, weight, eps)
    return cpu.rms_norm(x, weight, eps) if cpu.reads(x) else naive.rms_norm(x, weight, eps)


def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y in x.dtype; y as in `add_rms_norm`."""
    return cpu.add(x, y) if cpu.reads(x) and cpu.reads(y) else naive.add(x, y)


def add_rms_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + y, rms_norm(x + y)), both in x.dtype. y [rows, n], or [parts, rows, n] that add up to it."""
    if x.is_cuda:
        from rekindle.kernels.norm import triton

        return triton.add_rms_norm(x, y, weight, eps)
    return cpu.add_rms_norm(x, y, weight, eps) if cpu.reads(x) else naive.add_rms_norm(x, y, weight, eps)


def gated_rms_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(o [rows, heads, dim]) · weight [dim] · silu(z [rows, heads · dim]) -> like z."""
    if o.is_cuda:
        from rekindle.kernels.norm import triton

        return triton.gated_rms_norm(o, z, weight, eps)
    return naive.gated_rms_norm(o, z, weight, eps)


__all__ = ["add", "add_rms_norm", "gated_rms_norm", "rms_norm"]

"""Bytes that the tensors of a file take once they are loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from math import prod

import torch

from rekindle.kernels.matmul import cpu, kept_dtype
from rekindle.kernels.matmul.dense import PLAIN
from rekindle.kernels.matmul.packing import packed_bytes
from rekindle.placement import Sizes, sizes_from_tensors
from rekindle.weights import TensorInfo, WeightFile


def loaded_sizes(file: WeightFile, dtype: torch.dtype) -> Sizes:
    """On a GPU in planes, on a CPU in lanes; as values where no kernel reads a tensor's type so."""
    stored = file.tensors["token_embd.weight"].nbytes  # a CPU expands the rows it needs
    of_cpu = _on_cpu if cpu_expands() else _in_lanes
    in_head = file.spec.tied and not cpu_expands()  # lanes are read row by row too
    on_cpu = replace(_sizes(file, lambda info: of_cpu(info, dtype)), embedding=stored, widest=0, head_embeds=in_head)
    return replace(_sizes(file, lambda info: _on_gpu(info, dtype)), on_cpu=on_cpu)


def matrix_bytes(tensors: Iterable[TensorInfo], on_cpu: bool, dtype: torch.dtype) -> int:
    """Of these tensors once they are loaded; what is neither a matrix nor a stack of experts stays as it is."""
    size = (_on_cpu if cpu_expands() else _in_lanes) if on_cpu else _on_gpu
    multiplied = [(info, len(info.shape) == 2 or info.name.endswith("_exps.weight")) for info in tensors]
    return sum(size(info, dtype) if is_matrix else info.nbytes for info, is_matrix in multiplied)


def cpu_expands() -> bool:
    """Without kernels in C a CPU multiplies with values."""
    return not cpu.can_multiply()


def _sizes(file: WeightFile, size: Callable[[TensorInfo], int]) -> Sizes:
    """Vectors stay as they are."""
    loaded = {
        name: (info.shape, info.nbytes if len(info.shape) == 1 else size(info)) for name, info in file.tensors.items()
    }
    return sizes_from_tensors(file.spec, loaded)


def _on_gpu(info: TensorInfo, dtype: torch.dtype) -> int:
    planes = packed_bytes(info.type, prod(info.shape))
    return _values(info, torch.device("cuda"), dtype) if planes is None else planes


def _on_cpu(info: TensorInfo, dtype: torch.dtype) -> int:
    return _values(info, torch.device("cpu"), dtype)


def _in_lanes(info: TensorInfo, dtype: torch.dtype) -> int:
    names = {kept: name for name, kept in PLAIN.items()}
    type = info.type if info.type in cpu.TYPES else names[dtype]
    return prod(info.shape[:-2]) * cpu.nbytes(type, *info.shape[-2:])


def _values(info: TensorInfo, device: torch.device, dtype: torch.dtype) -> int:
    return max(info.nbytes, prod(info.shape) * kept_dtype(info.type, device, dtype).itemsize)

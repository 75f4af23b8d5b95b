"""What the tensors of a file take once they are loaded."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from rekindle.kernels.matmul import kept_dtype
from rekindle.kernels.matmul.packing import packed_bytes
from rekindle.placement import Sizes, sizes_from_tensors
from rekindle.weights import TensorInfo, WeightFile


def loaded_sizes(file: WeightFile, dtype: torch.dtype) -> Sizes:
    """In planes, or as values where no kernel reads a tensor's type so, as on any CPU."""
    on_gpu, on_cpu = (_sizes(file, dtype, expanded) for expanded in (False, True))
    mapped = file.tensors["token_embd.weight"].nbytes  # a CPU expands the rows it needs
    return replace(on_gpu, expanded=replace(on_cpu, embedding=mapped))


def _sizes(file: WeightFile, dtype: torch.dtype, expanded: bool) -> Sizes:
    loaded = {name: (info.shape, _size(info, dtype, expanded)) for name, info in file.tensors.items()}
    return sizes_from_tensors(file.spec, loaded)


def _size(info: TensorInfo, dtype: torch.dtype, expanded: bool) -> int:
    if len(info.shape) == 1:
        return info.nbytes
    planes = None if expanded else packed_bytes(info.type, prod(info.shape))
    kept = kept_dtype(info.type, torch.device("cpu" if expanded else "cuda"), dtype)
    return max(info.nbytes, prod(info.shape) * kept.itemsize) if planes is None else planes

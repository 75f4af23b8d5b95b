"""Types of activations and KV pages, and whether the kernels of a device can compute with a model's heads."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from rekindle.build.machine import device_of
from rekindle.errors import BadConfig, BadModelFile
from rekindle.weights import WeightFile

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LEAST_HEAD = 16  # values; the kernels of a GPU multiply tiles no narrower


def choose_types(
    file: WeightFile, devices: Sequence[str], dtype: str | None = None, kv_type: str | None = None
) -> tuple[str, str]:
    """Types of the activations and of KV pages on these devices, where the user has named none.

    A CPU computes in float32, a GPU in bfloat16; but in float32 too where the weights have more bits than bfloat16.
    Such weights stay in 16 bits, and so does KV, whose rounding costs far less than that of activations (docs/LOG.md).
    """
    on_cpu = all(device_of(name) == "cpu" for name in devices)
    dtype = dtype or ("float32" if on_cpu or _has_wide_weights(file) else "bfloat16")
    check_dtype(dtype)
    if dtype == "float32":
        return dtype, kv_type or ("f32" if on_cpu else "f16")
    return dtype, kv_type or "bf16"


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise BadConfig(f"--dtype is '{dtype}'; known are {', '.join(DTYPES)}")


def _has_wide_weights(file: WeightFile) -> bool:
    """Most values of its matrices are float16 or float32, which bfloat16 would cut short."""
    matrices = [info for info in file.tensors.values() if len(info.shape) > 1]
    wide = sum(prod(info.shape) for info in matrices if info.type in ("F16", "F32"))
    return 2 * wide > sum(prod(info.shape) for info in matrices)


def check_heads(file: WeightFile, devices: Sequence[str], kv_type: str) -> None:
    """Refuses heads of a size that the kernels cannot lay out: those of a GPU take powers of two."""
    mixers = file.spec.distinct_mixers
    try:
        for mixer in mixers:
            mixer.page_bytes(kv_type)
    except BadConfig as error:
        raise BadConfig(f"{error} ({file.path})") from None
    sizes = frozenset[int]().union(*(mixer.head_sizes for mixer in mixers))
    odd = sorted(size for size in sizes if size < LEAST_HEAD or size & (size - 1))
    gpus = [name for name in devices if device_of(name) != "cpu"]
    if odd and gpus:
        raise BadModelFile(
            f"{file.path} has heads of {' and '.join(map(str, odd))} values, "
            f"the kernels of {gpus[0]} take powers of two from {LEAST_HEAD} on; a CPU runs it (--devices cpu)"
        )

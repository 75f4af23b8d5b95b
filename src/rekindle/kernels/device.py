"""What the launch shape of a kernel depends on: properties of the device, read here and nowhere else."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import torch
from triton import knobs

log = logging.getLogger(__name__)

CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
SHARED_PART = 10  # per cent of a multiprocessor's memory; the rest is its L1
# Bytes of shared memory that a program may have; launch shapes are made for these classes of cards:
ROOMY = 200_000  # 227 KiB: NVIDIA's data-centre cards from Hopper on
ORDINARY = 99_000  # 99 KiB: NVIDIA's other cards; 163 KiB: the A100
LEAST = 0  # 64 KiB: AMD's

T = TypeVar("T", bound=Any)  # a kernel, compiled or interpreted
F = TypeVar("F")  # a launch shape


def fitting(device: torch.device, forms: Mapping[int, F]) -> F:
    """The most demanding launch shape that fits, of shapes by the shared memory that they are made for (ROOMY …)."""
    room = shared_memory(device)
    return forms[max(need for need in forms if need <= room)]


def is_roomy(device: torch.device) -> bool:
    """Deep pipelines of large tiles fit."""
    return shared_memory(device) >= ROOMY


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes that one program may have. The CPU, where kernels only run in the interpreter, has room for every form."""
    if device.type != "cuda":
        return sys.maxsize
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU. The interpreter runs one program after the other: three are enough to see a mistake."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def filling(device: torch.device, each: int) -> int:
    """Programs, warps or tiles that keep a GPU busy: `each` for every multiprocessor, down to a power of two."""
    return 1 << (each * processors(device)).bit_length() - 1


def dot_precision(device: torch.device, dtype: torch.dtype) -> str:
    """Of `tl.dot`: NVIDIA's tensor cores take float32 in three products of tf32, AMD's matrix cores as it is."""
    if device.type == "cuda" and torch.version.hip is not None:
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"


def stream_of(device: torch.device) -> int:
    """The stream that this thread launches on; a CPU has but one."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def pdl_arguments(device: torch.device) -> dict[str, bool]:
    """Launch arguments for programmatic dependent launch (PDL), which NVIDIA's cards have from Hopper on: the programs
    of a kernel become resident while the launch before it still runs. A kernel with PDL triggers its dependent launch
    (gdc_launch_dependents: `gemv` and `stream_k` when a program has its sums, others at once), and waits (gdc_wait)
    before it touches anything that an earlier launch writes or reads. Weights it may read before the wait; not those of
    cold experts in a staging area, which a launch beside it has copied there (`moe.groups` waits first).

    Exceptions: gated_delta_step and gated_delta_rows read the state of their slot before they wait, replay_rows reads
    that state and the rewind log, attention reads positions and tables. An earlier step wrote those, or the copy of
    this step's inputs. A forward begins with that copy, a replay with that of its slot and count, one launch without
    PDL: it waits for all earlier launches, and all later ones wait for it. Only after it may kernels read state before
    their wait, so two steps on one state need such a launch between them."""
    return {"PDL": True, "launch_pdl": True} if _has_dependent_launch(device) else {"PDL": False}


_carved = set[str]()  # names of kernels


def shared_memory_carveout(kernel: T) -> T:
    """Decorates the large kernels of a decode step: all prefer the same carveout of L1 as shared memory.

    A kernel without a preference runs with the carveout of the launch before it, and attention leaves hardly any L1.
    Where neighbours prefer different carveouts, the multiprocessors run empty in between (docs/LOG.md).
    """
    _carved.add(kernel.__name__)
    knobs.runtime.kernel_load_end_hook.add(_on_load)
    return kernel


def _on_load(module: object, function: int, name: str, files: dict[str, str], digest: str) -> None:
    if name in _carved and torch.version.hip is None and _is_here_roomy():
        _set_carveout(function)


def _set_carveout(function: int) -> None:
    error = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), CARVEOUT, SHARED_PART)
    if error:  # slower, not wrong
        log.warning("the driver refuses the shared memory carveout: error %d", error)


def _is_here_roomy() -> bool:
    """On smaller cards SHARED_PART might not hold all programs that would fit; not measured."""
    return is_roomy(torch.device("cuda", torch.cuda.current_device()))


@cache
def _has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)

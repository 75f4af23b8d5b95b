"""What the tile sizes of a kernel need to know of the device."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from typing import Any, TypeVar

import torch
from triton import knobs

log = logging.getLogger(__name__)

CARVEOUT = 9  # how the driver calls the share of a multiprocessor's memory that a kernel wants as shared memory
SHARED_PART = 10  # that share, in per cent: what is left is its first cache
ROOMY = 200_000  # bytes of shared memory per program: data-centre cards have 227 KiB, others 64 to 100

T = TypeVar("T", bound=Any)  # a kernel, compiled or interpreted


def is_roomy(device: torch.device) -> bool:
    """Deep pipelines of large tiles fit. The CPU, where kernels only run in the interpreter, takes the same tiles."""
    return device.type != "cuda" or _shared_memory(device) >= ROOMY


@cache
def _shared_memory(device: torch.device) -> int:
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU. The interpreter runs one program after the other: three are enough to see a mistake."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def stream_of(device: torch.device) -> int:
    """Which of the device's streams this thread hands its launches to; a CPU has but one."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def starting_early(device: torch.device) -> dict[str, bool]:
    """Launch arguments of a kernel of the decode step: from Hopper on its programs take their places while the launch
    before still runs. A kernel that takes EARLY lets the launch behind it do the same (products of one row and those
    in shares when they are done with their sums, others at once), and waits (gdc_wait) before it touches anything that
    an earlier launch writes or reads; weights it may read at once.

    Exceptions: gated_delta_step and gated_delta_rows read the state of their slot before they wait (the rows keep it,
    too), going back reads what the block kept, attention reads positions and tables. The step before wrote those, or
    the copy of this one's inputs: a plain launch with which every forward begins, which waits for all that went before
    and for which all behind it wait. So between two steps on one state such a launch must lie, one that does not start
    early."""
    return {"EARLY": True, "launch_pdl": True} if _has_dependent_launch(device) else {"EARLY": False}


_readers = set[str]()  # names of kernels


def reads_much(kernel: T) -> T:
    """Stands above the large kernels of a decode step: they all ask for the same division of a multiprocessor's memory.

    A kernel that says nothing runs with the division that the one before left, and attention leaves hardly any first
    cache. But where neighbours ask for different ones, the multiprocessors run empty in between (docs/LOG.md).
    """
    _readers.add(kernel.__name__)
    knobs.runtime.kernel_load_end_hook.add(_on_load)
    return kernel


def _on_load(module: object, function: int, name: str, files: dict[str, str], digest: str) -> None:
    if name in _readers and torch.version.hip is None and _is_here_roomy():
        _divide(function)


def _divide(function: int) -> None:
    error = ctypes.CDLL("libcuda.so.1").cuFuncSetAttribute(ctypes.c_void_p(function), CARVEOUT, SHARED_PART)
    if error:  # slower, not wrong
        log.warning("the driver refuses to divide the first cache: error %d", error)


def _is_here_roomy() -> bool:
    """On smaller cards so small a share might not hold all programs that would fit; not measured."""
    return is_roomy(torch.device("cuda", torch.cuda.current_device()))


@cache
def _has_dependent_launch(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)

"""Page-locked host memory: registered with the driver, so that every GPU of this process reads and writes it itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

PORTABLE = 1  # cudaHostRegister: for every GPU of this process, at the same address

log = logging.getLogger(__name__)


def pin(device: torch.device, address: int, nbytes: int) -> Callable[[], object] | None:
    """Page-locks [address, address + nbytes); gives what undoes it, or None where the driver refuses.

    On a thread of its own: a refusal is left as the last CUDA error of the thread that called, where the next launch
    would take it for its own.
    """
    with ThreadPoolExecutor(1, "rekindle-pin") as thread:
        return thread.submit(_register, device, address, nbytes).result()


def _register(device: torch.device, address: int, nbytes: int) -> Callable[[], object] | None:
    with torch.cuda.device(device):  # otherwise the driver would create a context on the first GPU
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, PORTABLE))
    if code:
        log.debug("cudaHostRegister of %d bytes: CUDA error %d", nbytes, code)
        return None
    return partial(_unregister, device, address)


def _unregister(device: torch.device, address: int) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)

"""CPU threads (`native/expert_threads.c`) that compute cold experts from their planes; the device asks them through a
mailbox in host memory."""

from __future__ import annotations

import ctypes
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rekindle.kernels import native
from rekindle.kernels.moe.types import ExpertStack

log = logging.getLogger("rekindle.kernels")

MOST = 32  # threads
READS = {"Q4_K": 4, "Q5_K": 5, "Q6_K": 6}  # types that the C has products for, by its numbers
Allocate = Callable[[Sequence[int], torch.dtype], Tensor]


class Mailbox:
    """One request: rows, and pairs of one of them with an expert. Its memory is the host's, open to the device."""

    def __init__(self, rows: int, pairs: int, hidden: int, allocate: Allocate) -> None:
        self.rows, self.pairs, self.hidden = rows, pairs, hidden
        self.asked = allocate((1,), torch.int32)
        self.done = allocate((1,), torch.int32)
        self.head = allocate((3,), torch.int64)  # address of the layer's description, pairs, rows
        self.place = allocate((pairs,), torch.int32)  # of the expert in host memory
        self.row = allocate((pairs,), torch.int32)
        self.weight = allocate((pairs,), torch.float32)
        self.x = allocate((rows, hidden), torch.float32)
        self.out = allocate((rows, hidden), torch.float32)
        self.lost = allocate((1,), torch.int32)  # the device waited in vain
        for tensor in (*self.tensors, self.lost):
            tensor.zero_()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """In the order in which the threads know them."""
        return self.asked, self.done, self.head, self.place, self.row, self.weight, self.x, self.out

    @staticmethod
    def nbytes(rows: int, pairs: int, hidden: int) -> int:
        """Host memory it may take, each piece in lines of its own."""
        return 9 * 256 + 12 * pairs + 8 * rows * hidden


class ExpertThreads:
    """Threads that answer one mailbox, as long as this object lives."""

    def __init__(self, library: Any, box: Mailbox, width: int, threads: int) -> None:
        self.box = box
        addresses = (ctypes.c_int64 * len(box.tensors))(*(tensor.data_ptr() for tensor in box.tensors))
        handle = library.expert_threads_start(addresses, threads, max(box.hidden, width), box.pairs)
        self.threads = int(library.expert_threads_count(handle))
        weakref.finalize(self, library.expert_threads_stop, handle)


def describe(stacks: Sequence[ExpertStack]) -> Tensor | None:
    """What the threads must know of a layer: int64, in host memory. None if they cannot read its types."""
    gate, _, down = stacks
    if any(stack.planes.type not in READS for stack in stacks):
        return None
    numbers = [gate.rows, down.rows]
    for stack in stacks:
        planes = stack.planes
        named = (planes.codes, planes.high_bits, planes.scales, planes.super_scales)
        numbers += [READS[planes.type], *(0 if plane is None else plane.data_ptr() for plane in named)]
    return torch.tensor(numbers, dtype=torch.int64)


def start_expert_threads(box: Mailbox, width: int, threads: int | None = None) -> ExpertThreads | None:
    """None, with the reason in the log, where it cannot be compiled, loaded or started."""
    library = native.library()
    if library is None:  # as it has said
        return None
    started = ExpertThreads(library, box, width, threads or spare_threads())
    if not started.threads:
        log.warning("cold experts are not computed on the CPU: no thread could be started")
        return None
    return started


def spare_threads() -> int:
    """Of one stage. All cores but two (one feeds the device, one serves), or what `--threads` gave torch if that is
    less; divided by the GPUs, each of which may have a stage with threads of its own. More than MOST only wait for
    the memory."""
    cores = min(torch.get_num_threads(), len(os.sched_getaffinity(0)) - 2, _quota() - 2, MOST)
    return max(1, cores // max(1, torch.cuda.device_count()))


def _quota() -> int:
    """Cores that this container may keep busy."""
    try:
        allowed, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):  # no such limit here
        return MOST + 2
    return MOST + 2 if allowed == "max" else int(allowed) // int(period)

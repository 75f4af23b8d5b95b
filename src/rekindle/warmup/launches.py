"""Triton launches that are noted instead of run, and worker processes that compile them.

While a thread is `recording`, a launch that would compile is noted and not run. Workers compile what was noted: they
never touch a GPU and leave the kernels in Triton's cache on disk, where a later launch finds them.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from ctypes.util import find_library
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel for one set of types, constants and hints."""

    module: str
    kernel: str
    data: str  # all that the compiler needs to know, as Triton writes it


_recorded = threading.local()


@contextmanager
def recording() -> Iterator[dict[Launch, None]]:
    """Launches of this thread that would compile, each once, in their order. Other threads compile as ever."""
    assert not hasattr(_recorded, "launches"), "this thread is recording already"
    _recorded.launches = launches = dict[Launch, None]()
    knobs.runtime.jit_cache_hook = _note
    try:
        yield launches
    finally:
        del _recorded.launches


def _note(*, fn: Any, compile: dict[str, Any], **_: object) -> bool:
    """Triton's hook, called before it compiles; True keeps it from compiling."""
    launches: dict[Launch, None] | None = getattr(_recorded, "launches", None)
    if launches is None:
        return False
    launches[Launch(fn.module, fn.name, compile["specialization_data"])] = None
    return True


class CompileWorkers:
    """Processes that compile for `target`. Made while this process is small and has no GPU: they are forked from it."""

    def __init__(self, count: int, target: GPUTarget) -> None:
        self._pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork"), _enter_worker, (target,))
        self._pool.submit(os.getpid).result()  # all of them are forked at the first task

    def compile(self, launch: Launch) -> Future[None]:
        return self._pool.submit(compile_launch, launch)

    def stop(self) -> None:
        self._pool.shutdown()


class _Target:
    """The part of a driver that the compiler uses."""

    def __init__(self, target: GPUTarget) -> None:
        self._target = target

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def _build_launcher(kernel: Any) -> None:
    """The C code that calls the kernel, which Triton would compile at the first launch."""
    if driver.active.get_current_target().backend == "cuda" and find_library("cuda"):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)


def _enter_worker(target: GPUTarget) -> None:
    os.nice(5)  # the process that loads the weights meanwhile goes first
    compile_for(target)


def compile_for(target: GPUTarget) -> None:
    """Compile for this target from now on; the machine need not have such a device."""
    driver.set_active(_Target(target))


def compile_launch(launch: Launch) -> None:
    _build_launcher(compiled(launch))


def compiled(launch: Launch) -> Any:
    """Triton's compiled kernel: `metadata`, and in `asm` the result of every step of the compiler."""
    return getattr(importlib.import_module(launch.module), launch.kernel).preload(launch.data)

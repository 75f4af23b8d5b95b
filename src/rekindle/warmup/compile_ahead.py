"""Kernels are compiled on all cores while the weights load, not one after the other during the first requests.

A process of its own (`compiler.py`) finds out which kernels the stage needs and compiles them into Triton's cache on
disk. Beside them it leaves a stamp, a file named after the stage, our sources and the card: a start that finds its
stamp compiles nothing.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from blake3 import blake3

import rekindle
from rekindle.pool import KvMode, Policy
from rekindle.spec import Span
from rekindle.weights import WeightFile

log = logging.getLogger("rekindle.warmup")

STUCK = 300.0  # seconds without a kernel after which the rest is left to the first launches
MOST_WORKERS = 32  # each of them takes a few hundred megabytes while it compiles

Progress = Callable[[int, int], None]  # kernels compiled, kernels known to be needed so far


@dataclass(frozen=True, slots=True)
class CompileJob:
    """The argument of the process that compiles, passed as JSON."""

    model: str
    layers: tuple[int, int]  # of the span: start, stop
    device: str
    dtype: str
    slots: int
    kv_type: str
    kv_mode: KvMode
    kv_policy: Policy
    target: tuple[str, int | str, int]  # backend, architecture, threads of a warp
    stamp: str  # the file to write when all is compiled
    workers: int
    # Of layers with cold experts: slots of the expert cache that follow the routing, and that can be lent; pairs once.
    cache_slots: tuple[tuple[int, int], ...] = ()

    @property
    def span(self) -> Span:
        return Span(*self.layers)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> CompileJob:
        values: dict[str, Any] = json.loads(text)
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**values)


@contextmanager
def compiling_ahead(make_job: Callable[[], CompileJob], on_progress: Progress | None = None) -> Iterator[None]:
    """Another process compiles the kernels while the block runs; leaving the block waits for it.

    A kernel that could not be compiled ahead is compiled at its first launch; the log says why. make_job: is called on
    a thread, since to import Triton and to read our sources takes half a second.
    """
    with ThreadPoolExecutor(1, "rekindle-kernels") as thread:
        beginning = thread.submit(lambda: _Compiling.begin(make_job(), on_progress))
        try:
            yield
        except BaseException:
            if beginning.exception() is None and (compiling := beginning.result()) is not None:
                compiling.end()
            raise
        if (compiling := beginning.result()) is not None:
            compiling.wait()


class _Compiling:
    """The process at work."""

    @classmethod
    def begin(cls, job: CompileJob, on_progress: Progress | None) -> _Compiling | None:
        """None where a stamp says that all has been compiled."""
        return None if Path(job.stamp).exists() else cls(job, on_progress)

    def __init__(self, job: CompileJob, on_progress: Progress | None) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(  # in a session of its own, so that killpg ends its workers too
            _command(job), stdout=subprocess.PIPE, stderr=self._errors, text=True, start_new_session=True
        )
        self._signs = queue.SimpleQueue[bool]()  # True at every kernel, False at the end
        Thread(target=_follow, args=(self._process, on_progress, self._signs), daemon=True).start()

    def wait(self) -> None:
        try:
            stuck = _is_stuck(self._signs)
        except BaseException:
            self.end()
            raise
        if stuck:
            self.end()
            log.warning("no kernel was compiled for %g s; the rest is compiled when it is first needed", STUCK)
            return
        with self._errors, self._process:
            if self._process.wait():
                self._errors.seek(0)
                why = self._errors.read().strip()[-2000:]
                log.warning("kernels are compiled when they are first needed: %s", why)

    def end(self) -> None:
        with self._errors, self._process:
            os.killpg(self._process.pid, signal.SIGKILL)


def _is_stuck(signs: queue.SimpleQueue[bool]) -> bool:
    """Waits for the end; True if STUCK seconds pass without a kernel."""
    try:
        while signs.get(timeout=STUCK):
            pass
    except queue.Empty:
        return True
    return False


def _command(job: CompileJob) -> list[str]:
    return [sys.executable, "-m", "rekindle.warmup.compiler", job.to_json()]


def _follow(process: subprocess.Popen[str], on_progress: Progress | None, signs: queue.SimpleQueue[bool]) -> None:
    assert process.stdout is not None, "the process was started with a pipe"
    try:
        for line in process.stdout:
            signs.put(True)
            if on_progress is not None:
                done, known = json.loads(line)
                on_progress(done, known)
    finally:
        signs.put(False)


def make_job(
    file: WeightFile,
    span: Span,
    *,
    device: torch.device,
    dtype: str,
    slots: int,
    kv: tuple[str, KvMode, Policy],
    cache_slots: Iterable[tuple[int, int]],
) -> CompileJob:
    """For a stage on `device`, which must be the current one."""
    import triton
    from triton.runtime import driver

    target = driver.active.get_current_target()
    sizes = tuple(sorted({sizes for sizes in cache_slots if any(sizes)}))
    facts = (span, dtype, slots, kv, sizes, target, torch.cuda.get_device_name(), torch.__version__, triton.__version__)
    return CompileJob(
        str(file.path),
        (span.start, span.stop),
        str(device),
        dtype,
        slots,
        *kv,
        target=(target.backend, target.arch, target.warp_size),
        stamp=str(Path(triton.knobs.cache.dir) / stamp_name(file, *facts)),
        workers=min(MOST_WORKERS, len(os.sched_getaffinity(0))),
        cache_slots=sizes,
    )


def stamp_name(file: WeightFile, *facts: object) -> str:
    """Differs for other sources of ours, other shapes or types of weights, and other facts."""
    digest = blake3()
    for source in sorted(Path(rekindle.__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    for info in file.tensors.values():
        digest.update(repr(info).encode())
    digest.update(repr(facts).encode())
    return f"rekindle-{digest.hexdigest(16)}.json"

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
def compiling_ahead(job: CompileJob, on_progress: Progress | None = None) -> Iterator[None]:
    """Another process compiles the kernels while the block runs; leaving the block waits for it.

    A kernel that could not be compiled ahead is compiled at its first launch; the log says why.
    """
    if Path(job.stamp).exists():
        yield
        return
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(  # in a session of its own, so that killpg ends its workers too
            _command(job), stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        ) as process:
            signs = queue.SimpleQueue[bool]()  # True at every kernel, False at the end
            Thread(target=_follow, args=(process, on_progress, signs), daemon=True).start()
            try:
                yield
                stuck = _is_stuck(signs)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
            if stuck:
                os.killpg(process.pid, signal.SIGKILL)
                log.warning("no kernel was compiled for %g s; the rest is compiled when it is first needed", STUCK)
                return
        if process.returncode:
            errors.seek(0)
            log.warning("kernels are compiled when they are first needed: %s", errors.read().strip()[-2000:])


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

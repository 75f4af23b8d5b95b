"""Kernels are compiled while the weights load, all cores at it, and not one after the other in the first requests.

A process of its own (build/paper.py) finds out which kernels the stage needs and compiles them into Triton's cache on
disk. Beside them it leaves a note that says for which stage it did so: the next start sees it and does nothing.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from blake3 import blake3

import rekindle
from rekindle.spec import Span
from rekindle.weights import WeightFile

if TYPE_CHECKING:
    from rekindle.build.shards import StageOrder

log = logging.getLogger("rekindle.build")

STUCK = 300.0  # seconds without a kernel after which the rest is left to the first launches
MOST_WORKERS = 32  # each of them takes a few hundred megabytes while it compiles

Progress = Callable[[int, int], None]  # kernels compiled, kernels known to be needed so far


@dataclass(frozen=True, slots=True)
class WarmOrder:
    """What the process that compiles is told, as JSON."""

    model: str
    layers: tuple[int, int]  # of the span: first, end
    device: str
    dtype: str
    slots: int
    kv: tuple[str, str, str]  # type, mode, policy
    target: tuple[str, int | str, int]  # backend, architecture, threads of a warp
    note: str  # the file to write when all is compiled
    workers: int
    rings: tuple[int, ...] = ()  # spare slots of the layers with cold experts, each number once

    @property
    def span(self) -> Span:
        return Span(*self.layers)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WarmOrder:
        values: dict[str, Any] = json.loads(text)
        values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**values)


@contextmanager
def warming(file: WeightFile, order: StageOrder, on_progress: Progress | None = None) -> Iterator[None]:
    """While the block runs, and on until they are ready, the kernels of the stage are compiled elsewhere.

    What could not be compiled ahead is compiled at its first launch, as ever; the log says why.
    """
    warm = _warm_order(file, order)
    if Path(warm.note).exists():
        yield
        return
    with tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(  # a session of its own, so that its workers can be ended with it
            _command(warm), stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        ) as process:
            going = queue.SimpleQueue[bool]()  # True at every kernel, False at the end
            Thread(target=_follow, args=(process, on_progress, going), daemon=True).start()
            try:
                yield
                stuck = _is_stuck(going)
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


def _is_stuck(going: queue.SimpleQueue[bool]) -> bool:
    """Waits for the end, as long as kernel after kernel is compiled."""
    try:
        while going.get(timeout=STUCK):
            pass
    except queue.Empty:
        return True
    return False


def _command(warm: WarmOrder) -> list[str]:
    return [sys.executable, "-m", "rekindle.build.paper", warm.to_json()]


def _follow(process: subprocess.Popen[str], on_progress: Progress | None, going: queue.SimpleQueue[bool]) -> None:
    assert process.stdout is not None, "the process was started with a pipe"
    try:
        for line in process.stdout:
            going.put(True)
            if on_progress is not None:
                done, known = json.loads(line)
                on_progress(done, known)
    finally:
        going.put(False)


def _warm_order(file: WeightFile, order: StageOrder) -> WarmOrder:
    import triton
    from triton.runtime import driver

    target = driver.active.get_current_target()
    kv = (order.kv_type, order.kv_mode, order.kv_policy)
    rings = () if order.hot is None else tuple(sorted({slots for slots in order.ring if slots}))
    stage = (order.span, order.dtype, order.slots, kv, rings)
    facts = (*stage, target, torch.cuda.get_device_name(), torch.__version__)
    return WarmOrder(
        model=str(file.path),
        layers=(order.span.start, order.span.stop),
        device=order.device,
        dtype=order.dtype,
        slots=order.slots,
        kv=kv,
        target=(target.backend, target.arch, target.warp_size),
        note=str(Path(triton.knobs.cache.dir) / note_name(file, *facts, triton.__version__)),
        workers=min(MOST_WORKERS, len(os.sched_getaffinity(0))),
        rings=rings,
    )


def note_name(file: WeightFile, *facts: object) -> str:
    """Another name for other sources of ours, other shapes or types of weights, or other facts."""
    digest = blake3()
    for source in sorted(Path(rekindle.__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    for info in file.tensors.values():
        digest.update(repr(info).encode())
    digest.update(repr(facts).encode())
    return f"rekindle-{digest.hexdigest(16)}.json"

"""What a server did while a client waited: its calls that took long, by thread, on the client's clock.

`bench_serve.py --timeline` starts servers with `watch` and prints the calls of the start, of the longest gap of each
line and of a usual wait for a first token. Beside the time a call took stands the processor's time of its thread: what
is missing was spent waiting, for the device, the interpreter's lock or the driver's.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import signal
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple

LEAST = 0.0003  # seconds of a call that is told
CALLS = (
    "rekindle.build.engine:_build",
    "rekindle.build.engine:machine_of",
    "rekindle.build.engine:_plans",
    "rekindle.build.engine:_load_stages",
    "rekindle.build.model:Model._read",
    "rekindle.build.model:Model.wait_for_text",
    "rekindle.layers.load:_Loader.load",
    "rekindle.stages.recording:Recording.record_all",
    "rekindle.stages.graphs:GraphRecorder.__call__",
    "rekindle.engine.engine:Engine.make_ready",
    "rekindle.engine.inbox:Inbox.submit",
    "rekindle.engine.inbox:Inbox.receive",
    "rekindle.engine.admission:Admission.admit",
    "rekindle.engine.admission:Admission._collect",
    "rekindle.engine.restore:Restorer.place",
    "rekindle.engine.restore:Restorer._look_up",
    "rekindle.engine.restore:Restorer._draw_first",
    "rekindle.engine.launch:Launcher.launch_next",
    "rekindle.engine.launch:Launcher._draw",
    "rekindle.engine.launch:Launcher._capture_at_boundary",
    "rekindle.engine.flight:_Enqueued.wait",
    "rekindle.engine.results:Collector.collect",
    "rekindle.engine.results:Collector.let_go",
    "rekindle.engine.endings:Endings.finish",
    "rekindle.engine.endings:Endings.capture_answer",
    "rekindle.engine.publisher:Publisher.capture",
    "rekindle.engine.publisher:Publisher.finish",
    "rekindle.engine.publisher:Publisher.publish_ready",
    "rekindle.engine.publisher:_own_row",
    "rekindle.engine.to_host:OnHost.wait",
    "rekindle.prefix.cache:PrefixCache.publish",
    "rekindle.snapshots.loading:Loader._load",
    "rekindle.snapshots.loading:Loader._read_own",
    "rekindle.snapshots.loading:Loader._verify_pages",
    "rekindle.snapshots.slabs:Slab.make",
    "rekindle.snapshots.slabs:Slab._clear",
    "rekindle.snapshots.slabs:Slabs.take",
    "rekindle.stages.local:LocalStage.open",
    "rekindle.stages.local:LocalStage.forward",
    "rekindle.stages.local:LocalStage.begin_capture",
    "rekindle.stages.local:LocalStage.prepare_restore",
    "rekindle.stages.local:LocalStage.commit_restore",
    "rekindle.pool.copies:HostCopies.copy_live",
    "rekindle.pool.copies:HostCopies.take_pages",
    "rekindle.pool.copies:HostCopies._send_stacks",
    "rekindle.pool.copies:HostCopies._copy_stacks",
    "rekindle.pool.copies:HostCopies._make_and_copy",
    "rekindle.pool.copies:HostCopies.send",
    "rekindle.pool.copies:HostCopies.let_go",
)


class Call(NamedTuple):
    began: float  # by `time.perf_counter`, which all processes of a machine share
    seconds: float
    worked: float  # seconds of the processor
    thread: str
    name: str


_calls = list[Call]()


def watch(told: str) -> None:
    """In the server, before it starts: note long calls, and write those since the last time upon SIGUSR2."""
    for call in CALLS:
        module, _, path = call.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, name = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        setattr(owner, name, _timed(getattr(owner, name), path))
    asyncio.Handle._run = _timed(asyncio.Handle._run, "event loop", _callback)  # type: ignore[method-assign]
    began = dict[int, float]()

    def collected(phase: str, info: dict[str, int]) -> None:
        thread = threading.get_ident()
        if phase == "start":
            began[thread] = time.perf_counter()
        else:
            _note(began.pop(thread, time.perf_counter()), 0.0, f"garbage of generation {info['generation']}")

    gc.callbacks.append(collected)

    def write(*_: object) -> None:
        taken, _calls[:] = _calls.copy(), []
        part = Path(told + ".part")
        part.write_text(json.dumps(taken))
        part.rename(told)

    signal.signal(signal.SIGUSR2, write)


def _timed(function: Callable[..., Any], name: str, more: Callable[..., str] = lambda *_: "") -> Callable[..., Any]:
    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        began, worked = time.perf_counter(), time.thread_time()
        try:
            return function(*arguments, **named)
        finally:
            if time.perf_counter() - began >= LEAST:
                _note(began, time.thread_time() - worked, name + more(*arguments))

    return call


def _note(began: float, worked: float, name: str) -> None:
    _calls.append(Call(began, time.perf_counter() - began, worked, threading.current_thread().name, name))


def _callback(handle: asyncio.Handle) -> str:
    return " " + repr(handle)[:90].replace("\n", " ")


def between(told: Path, began: float, ended: float, least: float = LEAST) -> list[str]:
    """For the client: a line for each call of so many seconds that overlaps that time, by its beginning."""
    calls = sorted(Call(*each) for each in json.loads(told.read_text()))
    return [
        f"    {1000 * (call.began - began):8.2f} ms  {1000 * call.seconds:7.2f} ms, {1000 * call.worked:6.2f} of work  "
        f"{call.thread:20.20s} {call.name}"
        for call in calls
        if call.seconds >= least and call.began < ended and call.began + call.seconds > began
    ]

"""The process that compiles ahead: `python -m rekindle.warmup.compiler JOB`.

It runs every step shape of the stage over an outline of the model, which has one layer of every kind and no memory on
the device, and notes the launches instead of running them. It prints a line of JSON per kernel compiled: how many are
compiled, how many are known to be needed so far.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import product
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget

from rekindle.engine.sampler import warm_up_draws
from rekindle.experts import RoutedFfn
from rekindle.layers import load_span
from rekindle.stages import LocalStage
from rekindle.warmup.cold_experts import launch_cold_experts
from rekindle.warmup.compile_ahead import CompileJob
from rekindle.warmup.launches import CompileWorkers, Launch, recording
from rekindle.warmup.outline import DeviceWithoutMemory, OutlineFile
from rekindle.warmup.steps import pages_needed, run_step_shapes
from rekindle.weights import WeightFile, open_weights


def needed_launches(file: WeightFile, job: CompileJob) -> Iterator[Launch]:
    """Every launch of the stage, yielded as soon as it is known to be needed."""
    outline = OutlineFile(file, job.span)
    dtype: torch.dtype = getattr(torch, job.dtype)
    pages, given = pages_needed(job.slots), 0
    with DeviceWithoutMemory(), recording() as launches:
        model = load_span(outline, outline.spec.whole, torch.device(job.device), dtype)
        stage = LocalStage(
            model,
            job.slots,
            pages,
            job.kv_type,
            0,
            job.kv_mode,
            job.kv_policy,
            record=_run_plainly,
            slabs=0,
            table_width=pages,
        )
        for _ in run_step_shapes(stage):
            yield from list(launches)[given:]
            given = len(launches)
        for ffn, (kept, lendable) in product(model.routed, job.cache_slots):
            assert isinstance(ffn, RoutedFfn), "all experts of an outline are hot"
            launch_cold_experts(ffn, kept, lendable, dtype)
        warm_up_draws(torch.empty(1, outline.spec.vocab, device=model.device)[:, : outline.spec.drawable])
    yield from list(launches)[given:]


def _run_plainly(step: Callable[[], None], warm: Callable[[], None] | None = None) -> Callable[[], None]:
    return step


def compile_all(job: CompileJob) -> None:
    # Before anything touches the GPU: workers are forked from this process as it is now.
    workers = CompileWorkers(job.workers, GPUTarget(*job.target))
    submitted: list[Future[None]] = []
    done = 0

    def count(_: Future[None]) -> None:
        nonlocal done
        done += 1
        print(json.dumps([done, len(submitted)]), flush=True)

    with torch.inference_mode():
        for launch in needed_launches(open_weights(job.model), job):
            submitted.append(workers.compile(launch))
            submitted[-1].add_done_callback(count)
    for future in submitted:
        future.result()
    workers.stop()
    Path(job.stamp).write_text(json.dumps({"kernels": len(submitted)}))


if __name__ == "__main__":
    # The address of a tensor without memory is 0 plus its offset; kernels are specialised on its alignment only.
    warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
    compile_all(CompileJob.from_json(sys.argv[1]))

"""Where the time goes: a short run, by operation: torch's profiler says it of torch, and our kernels in C are timed."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from rekindle.bench.speed import measure
from rekindle.build import Built
from rekindle.kernels.native.program import timing_kernels

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler says when it starts and stops, between our tables


@dataclass(frozen=True, slots=True)
class Op:
    name: str
    calls: int
    milliseconds: float
    share: float  # of all that was recorded


def top_ops(built: Built, prompt: int, answer: int, sequences: int, most: int = 12) -> tuple[Op, ...]:
    """The dearest operations of one run: kernels where there is a GPU, else what torch and our own kernels do on the
    CPU."""
    on_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    every_thread = _ExperimentalConfig(profile_all_threads=True)  # the engine has a thread of its own
    with timing_kernels() as times, profile(activities=[activity], experimental_config=every_thread) as recorded:
        measure(built.engine, built.model.spec.drawable, np.random.default_rng(1), prompt, answer, sequences)
    rows = [
        (row.key, row.count, row.self_device_time_total if on_gpu else row.self_cpu_time_total)
        for row in recorded.key_averages()
    ]
    if not on_gpu:
        rows += [(f"native::{name}", len(each), 1e6 * sum(each)) for name, each in times.items()]
    total = sum(micros for _, _, micros in rows) or 1.0
    dearest = sorted(rows, key=lambda row: -row[2])[:most]
    return tuple(Op(name, calls, micros / 1e3, micros / total) for name, calls, micros in dearest)

"""Threads of the kernels in C: as many as were asked for, asleep without work, and never in Python's way.

In a process of its own, whose threads are known.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from rekindle.kernels import native

pytestmark = pytest.mark.skipif(native.library() is None, reason="no compiler")

PROGRAM = """
import os, sys, threading, time
import numpy as np
import torch
from rekindle.kernels.matmul import make_matrix, multiply
from rekindle.kernels.native import set_threads

THREADS = int(sys.argv[1])


def stats():  # of every thread but this one: its state, and the ticks that it ran
    for task in os.listdir("/proc/self/task"):
        if int(task) != threading.get_native_id():
            fields = open(f"/proc/self/task/{task}/stat").read().rsplit(") ", 1)[1].split()
            yield task, fields[0], fields[11], fields[12]


set_threads(THREADS)
values = np.zeros((2048, 1024), np.float32).view(np.uint8)
few, many = torch.ones(40, 1024), torch.ones(3000, 1024)
before = len(os.listdir("/proc/self/task"))  # torch has threads of its own, which sleep while the kernels run
matrix = make_matrix(values, "F32", (2048, 1024), torch.device("cpu"), torch.float32)
for rows in (1, 16, 40):
    multiply(few[:rows], matrix)
print(torch.get_num_threads(), len(os.listdir("/proc/self/task")) - before)

deadline = time.monotonic() + 30
while any(state == "R" for _, state, *_ in stats()) and time.monotonic() < deadline:
    time.sleep(0.01)
first = sorted(stats())
time.sleep(0.3)
print(sorted(stats()) == first, {state for _, state, *_ in first} <= {"S"})

steps, work = 0, threading.Thread(target=multiply, args=(many, matrix))
work.start()
while work.is_alive():
    steps += 1
print(steps > 100)
"""


@pytest.mark.parametrize("threads", [1, 3])
def test_so_many_threads_as_were_asked_for_run_then_sleep_and_python_runs_beside_them(threads: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(threads)], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    counted, asleep, beside = done.stdout.splitlines()
    assert counted == f"{threads} {threads - 1}", "torch's threads and those that the kernels started"
    assert asleep == "True True", "threads without work run nothing"
    assert beside == "True", "a long product lets other Python threads run"

"""CPU threads behind a mailbox: every request is answered by itself, none is waited for without end."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from rekindle.kernels.matmul.naive import packed_values
from rekindle.kernels.matmul.packing import FORMATS, pack
from rekindle.kernels.moe import ExpertStack, expert_threads
from rekindle.kernels.moe.expert_threads import ExpertThreads, Mailbox, describe, spare_threads
from rekindle.kernels.native import build_library, levels, open_library

EXPERTS, SIDE = 4, 256  # one super-block both ways
PAIRS = 16  # so many that a request takes longer than it takes to ask the next
LATE = "-DOVERSLEEP(n)=if (n) nanosleep(&(struct timespec){0, (n) * 200000}, 0)"  # all threads but the first


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def random_stack(seed: int, type: str = "Q4_K") -> ExpertStack:
    random = np.random.default_rng(seed)
    raw = random.integers(0, 256, (EXPERTS * SIDE, FORMATS[type].nbytes), dtype=np.uint8)
    for at in (208,) if type == "Q6_K" else (0, 2):
        raw[:, at : at + 2] = np.array([3e-4], dtype=np.float16).view(np.uint8)
    return ExpertStack((EXPERTS, SIDE, SIDE), packed=pack(torch.from_numpy(raw), type, SIDE))


def test_a_thread_that_overslept_leaves_the_running_request_alone(ask_cpu_threads: Any) -> None:
    """It saw a request, and wakes when others have long been answered: it must not open that one again."""
    stacks = [random_stack(seed) for seed in range(3)]
    layer = describe(stacks)
    assert layer is not None
    late = ExpertThreads(
        open_library(build_library(levels()[0], [LATE])), Mailbox(1, PAIRS, SIDE, zeros), SIDE, threads=4
    )
    alone = ExpertThreads(open_library(build_library(levels()[0])), Mailbox(1, PAIRS, SIDE, zeros), SIDE, threads=1)
    x = torch.randn(SIDE, generator=torch.Generator().manual_seed(0))
    kinds = [([(i + n) % EXPERTS for n in range(PAIRS)], [0.1 * (n + i) for n in range(PAIRS)]) for i in range(8)]
    want = [ask_cpu_threads(alone.box, layer, x * (i + 1), *kind) for i, kind in enumerate(kinds)]
    for turn in range(1500):
        i = turn % len(kinds)
        assert torch.equal(ask_cpu_threads(late.box, layer, x * (i + 1), *kinds[i]), want[i])


def test_a_cpu_with_fewer_instructions_gives_the_same(ask_cpu_threads: Any) -> None:
    x = torch.randn(SIDE, generator=torch.Generator().manual_seed(1))
    for level in levels():
        expert_threads = ExpertThreads(open_library(build_library(level)), Mailbox(1, 1, SIDE, zeros), SIDE, threads=1)
        for type in ("Q4_K", "Q5_K", "Q6_K"):
            stacks = [random_stack(seed, type) for seed in range(3)]
            layer = describe(stacks)
            assert layer is not None
            gate, up, down = (packed_values(stack.planes)[SIDE : 2 * SIDE] for stack in stacks)
            want = down @ (silu(gate @ x) * (up @ x))
            have = ask_cpu_threads(expert_threads.box, layer, x, [1], [1.0])
            assert torch.allclose(have, want, atol=1e-3 * float(want.abs().max()))


WEDGED = """
import time
import torch
from rekindle.kernels.moe.expert_threads import Mailbox, start_expert_threads

box = Mailbox(1, 1, 256, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
layer = torch.tensor([256, 256, *[0] * 15])
box.head.copy_(torch.tensor([layer.data_ptr(), -1, 1]))  # never are -1 pairs done
expert_threads = start_expert_threads(box, 256, threads=2)
box.asked += 1
time.sleep(0.05)  # for as long as that at least they are at it
print(expert_threads.threads, "threads, done", int(box.done))
"""


def test_a_process_ends_beside_a_request_that_never_does() -> None:
    done = subprocess.run([sys.executable, "-c", WEDGED], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2 threads, done 0\n"


@pytest.mark.parametrize(
    ("told", "cores", "gpus", "threads"),
    [(64, 16, 1, 14), (64, 16, 0, 14), (64, 16, 4, 3), (4, 16, 1, 4), (64, 2, 1, 1), (64, 8, 8, 1), (256, 256, 1, 32)],
)
def test_threads_are_what_was_told_or_all_cores_but_two_divided_by_the_gpus(
    monkeypatch: pytest.MonkeyPatch, told: int, cores: int, gpus: int, threads: int
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: told)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(expert_threads, "_quota", lambda: 1000)
    assert spare_threads() == threads

"""CPU threads behind a mailbox: every request is answered by itself, none is waited for without end."""

from __future__ import annotations

import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from rekindle.kernels.matmul.naive import packed_values
from rekindle.kernels.matmul.packing import FORMATS, pack
from rekindle.kernels.moe import ExpertStack, crew
from rekindle.kernels.moe.crew import Crew, Mailbox, build_library, describe, open_library, spare_threads, start_crew

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


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """No library is loaded or built yet."""
    crew._library.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path
    crew._library.cache_clear()


def test_a_thread_that_overslept_leaves_the_running_request_alone(fresh: Path, ask_crew: Any) -> None:
    """It saw a request, and wakes when others have long been answered: it must not open that one again."""
    stacks = [random_stack(seed) for seed in range(3)]
    layer = describe(stacks)
    assert layer is not None
    late = Crew(open_library(build_library([LATE])), Mailbox(1, PAIRS, SIDE, zeros), SIDE, threads=4)
    alone = Crew(open_library(build_library()), Mailbox(1, PAIRS, SIDE, zeros), SIDE, threads=1)
    x = torch.randn(SIDE, generator=torch.Generator().manual_seed(0))
    kinds = [([(i + n) % EXPERTS for n in range(PAIRS)], [0.1 * (n + i) for n in range(PAIRS)]) for i in range(8)]
    want = [ask_crew(alone.box, layer, x * (i + 1), *kind) for i, kind in enumerate(kinds)]
    for turn in range(1500):
        i = turn % len(kinds)
        assert torch.equal(ask_crew(late.box, layer, x * (i + 1), *kinds[i]), want[i])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other CPUs take the plain form anyway")
def test_a_cpu_with_fewer_instructions_gives_the_same(fresh: Path, ask_crew: Any) -> None:
    x = torch.randn(SIDE, generator=torch.Generator().manual_seed(1))
    for flags in (["-mno-avx512f"], ["-march=x86-64"]):
        crew = Crew(open_library(build_library(flags)), Mailbox(1, 1, SIDE, zeros), SIDE, threads=1)
        for type in ("Q4_K", "Q5_K", "Q6_K"):
            stacks = [random_stack(seed, type) for seed in range(3)]
            layer = describe(stacks)
            assert layer is not None
            gate, up, down = (packed_values(stack.planes)[SIDE : 2 * SIDE] for stack in stacks)
            want = down @ (silu(gate @ x) * (up @ x))
            have = ask_crew(crew.box, layer, x, [1], [1.0])
            assert torch.allclose(have, want, atol=1e-3 * float(want.abs().max()))


WEDGED = """
import time
import torch
from rekindle.kernels.moe.crew import Mailbox, start_crew

box = Mailbox(1, 1, 256, lambda shape, dtype: torch.zeros(shape, dtype=dtype))
layer = torch.tensor([256, 256, *[0] * 15])
box.head.copy_(torch.tensor([layer.data_ptr(), -1, 1]))  # never are -1 pairs done
crew = start_crew(box, 256, threads=2)
box.asked += 1
time.sleep(0.05)  # for as long as that at least they are at it
print(crew.threads, "threads, done", int(box.done))
"""


def test_a_process_ends_beside_a_request_that_never_does() -> None:
    done = subprocess.run([sys.executable, "-c", WEDGED], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "2 threads, done 0\n"


def executable(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("compiler", "told"),
    [
        ("/nonexistent/compiler -O2", "No such file"),
        ("'unbalanced", "No closing quotation"),
        ("sh -c 'echo it is broken >&2; exit 1'", "it is broken"),
        ("true", "cannot open shared object|No such file"),  # says it compiled and wrote nothing
        ("FAKE", "invalid ELF header|file too short"),
    ],
)
def test_a_compiler_that_fails_in_any_way_is_said_once_and_the_server_starts(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str, told: str
) -> None:
    if compiler == "FAKE":  # writes what no system loads
        compiler = executable(
            fresh / "cc", 'while [ $# -gt 1 ]; do [ "$1" = -o ] && echo no library > "$2"; shift; done'
        )
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING, "rekindle.kernels"):
        assert start_crew(Mailbox(1, 1, SIDE, zeros), SIDE) is None
        assert start_crew(Mailbox(1, 1, SIDE, zeros), SIDE) is None
    (record,) = caplog.records
    assert re.search(told, record.getMessage())
    assert not list(fresh.rglob(".crew*"))


def test_a_cache_folder_that_cannot_be_made_is_said(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (fresh / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file"))
    assert start_crew(Mailbox(1, 1, SIDE, zeros), SIDE) is None
    assert "not computed on the CPU" in caplog.text


def test_cc_may_carry_flags_and_another_version_or_flag_is_another_library(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = crew._compiler()[0]
    wrapped = fresh / "cc"
    paths = set()
    for version in ("1", "2"):
        command = executable(wrapped, f'[ "$1" = --version ] && echo {version} && exit; exec {real} "$@"')
        monkeypatch.setenv("CC", command)
        paths.add(build_library())
    monkeypatch.setenv("CC", f"{real} -DSOME")
    paths.add(build_library())
    assert len(paths) == 3
    assert all(path.exists() for path in paths)


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
    monkeypatch.setattr(crew, "_quota", lambda: 1000)
    assert spare_threads() == threads

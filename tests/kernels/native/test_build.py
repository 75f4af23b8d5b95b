"""The library of kernels in C is built once per source, compiler and flags; without it torch computes, and says so."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from rekindle.kernels import native
from rekindle.kernels.matmul import make_matrix, multiply
from rekindle.kernels.moe.expert_threads import Mailbox, start_expert_threads
from rekindle.kernels.native import build, build_library
from rekindle.kernels.native.build import _compiler

SIDE = 256


def zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.zeros(*shape, dtype=dtype)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """No library is loaded or built yet."""
    native.library.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path
    native.library.cache_clear()


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
        assert native.library() is None
        assert start_expert_threads(Mailbox(1, 1, SIDE, zeros), SIDE) is None
    (record,) = caplog.records
    assert re.search(told, record.getMessage())
    assert not list(fresh.rglob(".native*"))


def test_a_cache_folder_that_cannot_be_made_is_said(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (fresh / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(fresh / "file"))
    assert native.library() is None
    assert "the CPU computes with torch alone" in caplog.text


def test_cc_may_carry_flags_and_another_version_or_flag_is_another_library(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = _compiler()[0]
    wrapped = fresh / "cc"
    (fresh / "tiny.c").write_text("int one(void) { return 1; }\n")  # the kernels themselves take seconds each time
    monkeypatch.setattr(build, "FOLDER", fresh)
    paths = set()
    for version in ("1", "2"):
        command = executable(wrapped, f'[ "$1" = --version ] && echo {version} && exit; exec {real} "$@"')
        monkeypatch.setenv("CC", command)
        paths.add(build_library("plain"))
    monkeypatch.setenv("CC", f"{real} -DSOME")
    paths.add(build_library("plain"))
    assert len(paths) == 3
    assert all(path.exists() for path in paths)


def test_without_a_library_products_are_those_of_torch(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.SWITCH, "off")
    values = np.random.default_rng(0).standard_normal((5, 32)).astype(np.float32)
    matrix = make_matrix(values.view(np.uint8), "F32", (5, 32), torch.device("cpu"), torch.float32)
    assert matrix.lanes is None
    x = torch.ones(2, 32)
    assert torch.equal(multiply(x, matrix), x @ torch.from_numpy(values).T)


def test_threads_that_a_fork_left_behind_are_not_waited_for() -> None:
    native.set_threads(2)
    values = np.ones((64, 64), np.float32)
    matrix = make_matrix(values.view(np.uint8), "F32", (64, 64), torch.device("cpu"), torch.float32)
    x = torch.ones(3, 64)
    want = multiply(x, matrix)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(multiply(x, matrix), want) else 1)
    _, status = os.waitpid(child, 0)
    native.set_threads(1)
    assert os.waitstatus_to_exitcode(status) == 0

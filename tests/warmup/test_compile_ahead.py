"""Kernels are compiled before they are needed; what a paper GPU cannot show, scripts/gpu/bench_start.py does."""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rekindle.bench.synth import write_synthetic
from rekindle.kernels.moe.groups import pairs_tile
from rekindle.spec import Span
from rekindle.warmup import compile_ahead
from rekindle.warmup.compile_ahead import CompileJob, compiling_ahead, stamp_name
from rekindle.warmup.outline import OutlineFile
from rekindle.weights import WeightFile, open_weights

SCRIPTS = Path(__file__).parents[2] / "scripts"  # where the paper GPU lies
JOB = CompileJob("model", (0, 8), "cuda:0", "bfloat16", 4, "bf16", "exact", "qk", ("cuda", 90, 32), "", 2)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> WeightFile:
    return open_weights(write_synthetic(tmp_path_factory.mktemp("warm") / "tiny-moe.gguf", "tiny-moe"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("driver")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(SCRIPTS), env.get("PYTHONPATH", "")])
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("compile_driver.py")), str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# What is to be compiled


def test_a_stage_names_the_kernels_of_all_its_parts_each_once(found: dict[str, Any]) -> None:
    parts = {"_expand_kernel", "_norm_kernel", "_conv_kernel", "_step_kernel", "_pass_kernel", "_attend_kernel"}
    routed = {"_route_kernel", "_up_pairs_kernel", "_grouped_kernel", "_products_kernel", "_replay_kernel"}
    assert parts | routed <= set(found["kernels"])
    assert found["distinct"] == len(found["kernels"])


def test_numbers_of_rows_that_were_not_run_need_no_other_kernel(found: dict[str, Any]) -> None:
    assert found["more"] == []


def test_no_kernel_is_compiled_again_for_another_number_of_rows(found: dict[str, Any]) -> None:
    assert found["twins"] == []


def test_layers_with_cold_experts_name_theirs_once_for_rings_of_one_kind(found: dict[str, Any]) -> None:
    assert {"_route_row_kernel", "_up_pairs_kernel"} <= set(found["cold"])
    assert {"_admit_kernel", "_fetch_kernel", "_exchange_kernel"} <= set(found["cold"])
    assert {"_ask_kernel", "_collect_kernel"} <= set(found["cold"])
    assert {"_fetch_aside_kernel", "_list_missing_kernel"} <= set(found["cold"])
    assert found["cold twins"] == []


def test_cold_experts_name_every_form_that_rows_of_a_chunk_need(found: dict[str, Any]) -> None:
    """As many pairs of an expert as chunks of any length have, up to those whose experts are expanded."""
    assert set(found["tiles"]) >= {pairs_tile(-(-2 * rows * 8 // 256)) for rows in range(1, 3072)}


def test_the_layers_that_stand_for_the_others_need_every_kernel_that_those_do(found: dict[str, Any]) -> None:
    assert found["missing"] == []


def test_a_launch_finds_what_a_worker_compiled_and_nothing_else(found: dict[str, Any]) -> None:
    assert found["hits"] == [True, False]


def test_an_outline_has_every_kind_of_layer_once(file: WeightFile) -> None:
    def kind(whole: WeightFile, layer: int) -> object:
        prefix = f"blk.{layer}."
        names = sorted(name for name in whole.tensors if name.startswith(prefix))
        parts = ((name.removeprefix(prefix), whole.tensors[name].shape, whole.tensors[name].type) for name in names)
        return layer == whole.spec.layers - 1, *parts

    outline = OutlineFile(file, file.spec.whole)
    kinds = [kind(outline, layer) for layer in range(outline.spec.layers)]
    assert set(kinds) == {kind(file, layer) for layer in range(file.spec.layers)}
    assert len(kinds) == len(set(kinds)) < file.spec.layers


def test_a_tensor_of_an_outline_has_the_shape_of_the_stored_one_and_no_memory(file: WeightFile) -> None:
    outline = OutlineFile(file, Span(0, 4))
    name = "token_embd.weight"
    assert outline.raw(name).shape == file.raw(name).shape
    assert not any(outline.raw(name).strides)


# When


class Elsewhere:
    """The process that compiles, made of outline."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.stamp, self.started = folder / "stamp", folder / "started"
        self._monkeypatch = monkeypatch

    def runs(self, code: str) -> None:
        code = f"import time; open({str(self.started)!r}, 'w').close(); {code}"
        self._monkeypatch.setattr(compile_ahead, "_command", lambda _: [sys.executable, "-c", code])

    def compiling(self, on_progress: compile_ahead.Progress | None = None) -> AbstractContextManager[None]:
        return compiling_ahead(replace(JOB, stamp=str(self.stamp)), on_progress)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Elsewhere:
    return Elsewhere(monkeypatch, tmp_path)


def test_the_start_waits_for_all_kernels_and_hears_of_each(elsewhere: Elsewhere) -> None:
    elsewhere.runs("print([1, 2], flush=True); print([2, 2], flush=True)")
    heard: list[tuple[int, int]] = []
    with elsewhere.compiling(lambda done, known: heard.append((done, known))):
        pass
    assert heard == [(1, 2), (2, 2)]


def test_a_later_start_finds_the_stamp_and_compiles_nothing(elsewhere: Elsewhere) -> None:
    elsewhere.runs("")
    elsewhere.stamp.write_text("")
    with elsewhere.compiling():
        pass
    assert not elsewhere.started.exists()


def test_a_failure_to_compile_ahead_is_said_and_does_not_stop_the_start(
    elsewhere: Elsewhere, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere.runs("raise SystemExit('no such card')")
    with caplog.at_level(logging.WARNING), elsewhere.compiling():
        pass
    assert "no such card" in caplog.text


def test_a_load_that_fails_ends_the_compiling_too(elsewhere: Elsewhere) -> None:
    elsewhere.runs("time.sleep(600)")
    with pytest.raises(OSError, match="the file is gone"), elsewhere.compiling():
        raise OSError("the file is gone")


def test_a_compiler_that_is_stuck_ends_with_its_workers_and_does_not_stop_the_start(
    elsewhere: Elsewhere, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    begin = f"import os; end = os.fork() or open({str(pipe)!r}, 'w'); "
    elsewhere.runs(begin + "isinstance(end, int) or print([1, 2], flush=True); time.sleep(600)")
    monkeypatch.setattr(compile_ahead, "STUCK", 0.5)
    reading, begun = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), threading.Event()
    with caplog.at_level(logging.WARNING), elsewhere.compiling(lambda *_: begun.set()):
        assert begun.wait(60), "the worker has opened the pipe"
    assert "no kernel was compiled for 0.5 s" in caplog.text
    assert select.select([reading], [], [], 60)[0], "the pipe is open as long as the worker lives"
    os.close(reading)


def test_other_weights_or_facts_have_another_stamp(file: WeightFile, tmp_path: Path) -> None:
    other = open_weights(write_synthetic(tmp_path / "tiny.gguf", "tiny"))
    names = [stamp_name(file, 4), stamp_name(file, 8), stamp_name(other, 4)]
    assert len(set(names)) == 3
    assert stamp_name(file, 4) == names[0]


def test_a_job_survives_the_way_to_the_process() -> None:
    assert CompileJob.from_json(JOB.to_json()) == JOB

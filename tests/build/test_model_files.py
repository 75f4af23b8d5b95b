"""What an engine does when the file of its model is not what it loaded any more."""

from __future__ import annotations

import os
import queue
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from rekindle.batch import Batch, Segment, Wanted
from rekindle.build import Built, build_engine
from rekindle.build import stage as stage_module
from rekindle.build.types import check_heads
from rekindle.build.watch import FileWatcher
from rekindle.config import Config
from rekindle.engine.types import CacheReport, Failed, Finished, Request, Sampling
from rekindle.errors import BadConfig, BadModelFile, BadRequest
from rekindle.prompt import Boundary, BoundaryKind, Prompt
from rekindle.weights import open_weights


@pytest.fixture
def model(golden: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(golden / "tiny-qwen35-Q4_K_M.gguf", tmp_path / "model.gguf"))


def build(model: Path, **more: Any) -> Built:
    return build_engine(Config(model=model, devices=("cpu",), context=512, sequences=2, cache_ram=1 << 26, **more))


def touch(model: Path) -> None:
    os.utime(model, ns=(0, model.stat().st_mtime_ns + 1))


def run(built: Built, tokens: list[int]) -> CacheReport:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    prompt = Prompt(tuple(tokens), (Boundary(len(tokens) - 1, BoundaryKind.MESSAGE),))
    built.engine.submit(Request(str(tokens[0]), prompt, Sampling(temperature=0), 2, frozenset(), events.put))
    while True:
        event = events.get(timeout=60)
        assert not isinstance(event, Failed), event
        if isinstance(event, Finished):
            return event.cache


def test_an_engine_whose_file_was_written_to_says_so_and_publishes_nothing_more(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    built = build(model)
    try:
        assert built.entry.status().degraded is None
        assert run(built, list(range(20, 60))).published > 0
        told = threading.Event()
        watcher = FileWatcher(built.model.file.files, lambda reason: told.set(), seconds=0.01)
        touch(model)
        assert told.wait(60)
        watcher.stop()
        built.watcher._thread.join(60)
        assert "was written to" in (built.entry.status().degraded or "")
        assert run(built, list(range(120, 160))).published == 0
        assert run(built, list(range(20, 60))).restored > 0, "what was published before is still good"
        assert [record.levelname for record in caplog.records if "was written to" in record.message] == ["ERROR"]
    finally:
        built.stop()


def test_a_router_says_that_a_replica_is_degraded(model: Path) -> None:
    built = build(model)
    try:
        from rekindle.engine.router import Router

        built.engine.degrade("the file is another")
        assert Router([built.engine]).status().degraded == "the file is another"
    finally:
        built.stop()


def test_a_file_that_changes_while_it_is_loaded_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load_span = stage_module.load_span

    def meddled(*arguments: Any) -> Any:
        touch(model)
        return load_span(*arguments)

    monkeypatch.setattr(stage_module, "load_span", meddled)
    with pytest.raises(BadModelFile, match="must not change while it is loaded"):
        build(model)


def test_ids_without_a_token_are_refused(model: Path) -> None:
    spec = open_weights(model).spec
    assert (spec.vocab, spec.drawable) == (2048, 2033)
    built = build(model)
    try:
        with pytest.raises(BadRequest, match="prompt has the token 2033, the model's tokens end before 2033"):
            run(built, [2033])
        biased = Request("x", Prompt((1,)), Sampling(logit_bias={2040: 9.0}), 1, frozenset(), lambda event: None)
        with pytest.raises(BadRequest, match="logit_bias has the token 2040"):
            built.engine.submit(biased)
    finally:
        built.stop()


@pytest.mark.parametrize("size", [48, 80, 96])
def test_heads_that_gpu_kernels_cannot_take_are_refused_by_the_plan_and_run_on_a_cpu(size: int, make_tiny: Any) -> None:
    tiny = make_tiny("dense", head_dim=size)
    tokens = list(range(10, 30))
    logits = tiny.stage().forward(Batch((Segment(0, 0, tuple(tokens), Wanted.ALL),)), None).logits
    assert logits is not None
    assert (logits - tiny.reference_logits(tokens)).abs().max() < 1e-4
    with pytest.raises(BadModelFile, match=f"heads of {size} values, the kernels of cuda:1 take powers of two"):
        check_heads(tiny.open(), ["cpu", "cuda:1"], "bf16")
    check_heads(tiny.open(), ["cpu"], "f32")


def test_q8_pages_need_heads_of_whole_blocks(make_tiny: Any) -> None:
    with pytest.raises(BadConfig, match="--kv-type q8 packs 32 values at a time"):
        check_heads(make_tiny("dense", head_dim=48).open(), ["cpu"], "q8")

"""A cache folder that was filled under another setting does not look empty."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from rekindle.build import build_engine, open_model, plan_model, prefix_cache
from rekindle.build.model import Model
from rekindle.build.prefix_cache import about, state_identity
from rekindle.config import Config
from rekindle.engine.types import Event, Failed, Finished, Request, Sampling
from rekindle.kernels.native.files import NativeFiles
from rekindle.placement import Device, Machine
from rekindle.prompt import Prompt
from rekindle.spec import Span


def answer_once(model: Path, folder: Path, kv_type: str) -> None:
    built = build_engine(
        Config(model=model, devices=("cpu",), cache_dir=folder, context=256, sequences=1, kv_type=kv_type)
    )
    ended = threading.Event()

    def note(event: Event) -> None:
        if isinstance(event, Finished | Failed):
            ended.set()

    built.entry.submit(Request("one", Prompt(tuple(range(70))), Sampling(), 1, frozenset(), sink=note))
    assert ended.wait(60)
    built.stop()


def test_a_server_reads_its_snapshots_without_the_interpreters_lock(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real = list[int](), NativeFiles.read

    def read(self: NativeFiles, reads: Sequence[tuple[str, int, Sequence[np.ndarray]]]) -> list[int]:
        asked.append(len(reads))
        return real(self, reads)

    monkeypatch.setattr(NativeFiles, "read", read)
    answer_once(golden / "tiny-qwen35-Q4_K_M.gguf", tmp_path, "f32")
    assert not asked, "nothing lay there"
    answer_once(golden / "tiny-qwen35-Q4_K_M.gguf", tmp_path, "f32")
    assert asked


def test_a_start_under_another_setting_says_what_lies_in_the_folder(
    golden: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def hints() -> list[str]:
        found = [record.getMessage() for record in caplog.records if "another model or setting" in record.getMessage()]
        caplog.clear()
        return found

    with caplog.at_level(logging.INFO, "rekindle"):
        answer_once(golden / "tiny-qwen35-Q4_K_M.gguf", tmp_path, "f32")
        assert hints() == [], "nothing lay there"
        answer_once(golden / "tiny-qwen35-Q4_K_M.gguf", tmp_path, "q8")
        (hint,) = hints()
        assert hint.endswith(f"snapshots in {tmp_path} are of another model or setting: KV f32 (here q8)")
        answer_once(golden / "tiny-qwen35-Q4_K_M.gguf", tmp_path, "f32")
        assert hints() == [], "it has its own"
        answer_once(golden / "tiny-qwen35moe-Q4_K_M.gguf", tmp_path, "f32")
        both = hints()
        assert len(both) == 2, "of two settings"
        assert all("model tiny-qwen35-Q4_K_M (here tiny-qwen35moe-Q4_K_M), weights " in hint for hint in both)


def traits_of(model: Model, pages: int = 16, **settings: Any) -> Any:
    machine = Machine((Device("cpu", "cpu", 4 << 30, host=True),), 8 << 30)
    plan = plan_model(Config(sequences=1, context=4096, **settings), model, machine)
    return prefix_cache.traits_of(model, replace(plan, stages=(replace(plan.stage(0), pool_pages=pages),)))


def test_what_decides_over_a_snapshot_is_in_its_key_and_in_the_words_for_it(
    golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sparse = open_model(golden / "tiny-qwen35-Q4_K_M.gguf"), {"kv_mode": "sparse"}
    exact = [{}, {"kv_type": "q8"}, {"dtype": "bfloat16"}]
    found = [
        traits_of(model, **settings)
        for settings in [
            *exact,
            sparse,
            {**sparse, "kv_policy": "lru"},
            {**sparse, "pages": 8},
        ]
    ]
    monkeypatch.setattr("rekindle.build.prefix_cache.LEAD", 9)
    found.append(traits_of(model, **sparse))
    assert len({state_identity(traits) for traits in found}) == len(found)
    assert len({str(about(traits)) for traits in found}) == len(found)
    assert traits_of(model, pages=8) == found[0], "pools and leads decide nothing where all is attended"
    chunks = [traits_of(model, **sparse, grid=grid) for grid in (256, 512)]
    assert chunks[0] == chunks[1], "what a row attends does not depend on chunks"


def test_a_sparse_snapshot_is_found_on_another_split(golden: Path) -> None:
    model = open_model(golden / "tiny-qwen35-Q4_K_M.gguf")
    machine = Machine((Device("cpu", "cpu", 4 << 30, host=True),), 8 << 30)
    plan = plan_model(Config(sequences=1, context=4096, kv_mode="sparse"), model, machine)
    splits = [((Span(0, 8), 16),), ((Span(0, 4), 20), (Span(4, 8), 16))]
    here, there = (
        prefix_cache.traits_of(
            model, replace(plan, stages=tuple(replace(plan.stage(0), span=s, pool_pages=n) for s, n in split))
        )
        for split in splits
    )
    assert state_identity(here) == state_identity(there)
    assert about(here) == about(there)


def test_folders_of_earlier_versions_are_known(golden: Path) -> None:
    model = open_model(golden / "tiny-qwen35-Q4_K_M.gguf")
    key = f"{model.file.fingerprint()} f32 4"
    assert state_identity(traits_of(model)) == blake3(key.encode()).hexdigest()
    assert (
        state_identity(traits_of(model, kv_mode="sparse"))
        == blake3(f"{key} sparse qk 8 16 pages by layer".encode()).hexdigest()
    )

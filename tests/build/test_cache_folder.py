"""A cache folder that was filled under another setting does not look empty."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from rekindle.build import build_engine
from rekindle.config import Config
from rekindle.engine.types import Event, Failed, Finished, Request, Sampling
from rekindle.prompt import Prompt


def answer_once(model: Path, folder: Path, kv_type: str) -> None:
    built = build_engine(
        Config(model=model, devices=("cpu",), cache_dir=folder, context=256, sequences=1, kv_type=kv_type)
    )
    ended = threading.Event()

    def note(event: Event) -> None:
        if isinstance(event, Finished | Failed):
            ended.set()

    built.door.submit(Request("one", Prompt(tuple(range(70))), Sampling(), 1, frozenset(), sink=note))
    assert ended.wait(60)
    built.stop()


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
        assert all("model tiny-qwen35-Q4_K_M (here tiny-qwen35moe-Q4_K_M), weights " in hint for hint in hints())

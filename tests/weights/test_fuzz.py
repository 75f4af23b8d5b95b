"""The script that throws thousands of damaged models, with a few of them."""

from __future__ import annotations

import random
from pathlib import Path

import fuzz_models
import pytest


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe", "llama", "qwen3"])
def test_the_tiny_models_load_before_they_are_damaged(architecture: str, tmp_path: Path) -> None:
    fuzz_models.write_gguf(tmp_path / "tiny.gguf", fuzz_models.tiny(architecture))
    assert fuzz_models.judge(tmp_path / "tiny.gguf") == ("loaded", "")


def test_the_tiny_folder_loads_before_it_is_damaged(tmp_path: Path) -> None:
    fuzz_models.write_folder(tmp_path / "tiny", random.Random(1))
    assert fuzz_models.judge(tmp_path / "tiny") == ("loaded", "")


def test_damaged_models_load_or_are_refused_with_one_sentence() -> None:
    tally = fuzz_models.fuzz(gguf=60, hf=40, seed=7)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.peak < fuzz_models.GOAL
    assert min(outcomes["refused"] for outcomes in tally.outcomes.values()) > 10
    assert min(outcomes["loaded"] for outcomes in tally.outcomes.values()) > 2

"""The four checks of scripts/gpu: on a GPU as they are; elsewhere what they can do on a CPU, which tries the scripts.

Each is a program of its own and is started as one: they hold up streams, and take a GPU's memory for themselves.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from support.scripts import load_script, result_of, run_script
from support.tiny_files import FILES
from support.truth import Truth, rounded_activations, to_8_bits, to_half


def write_cases(golden: Path, folder: Path, names: list[str], lengths: tuple[int, ...]) -> None:
    """exact.json and llamacpp.json over tiny models: transformers, and transformers with rounded activations."""
    exact, peer = dict[str, list[object]](), dict[str, list[object]]()
    for name in names:
        (folder / name).symlink_to(golden / name)
        truth, rng = Truth(golden / name), np.random.default_rng(5)
        cases = [(rng.integers(0, 2000, n).tolist(), rng.integers(0, 2000, 8).tolist()) for n in lengths]
        exact[name] = [told(truth, prompt, answer) for prompt, answer in cases]
        with rounded_activations(truth, to_half if "f16" in name else to_8_bits):
            peer[name] = [told(truth, prompt, answer) for prompt, answer in cases]
    (folder / "exact.json").write_text(json.dumps(exact))
    (folder / "llamacpp.json").write_text(json.dumps(peer))


def told(truth: Truth, prompt: list[int], answer: list[int]) -> dict[str, object]:
    rows = truth.logits(prompt + answer)[len(prompt) - 1 : -1].log_softmax(-1)
    values, ids = rows.topk(10)
    return {"prompt": prompt, "tokens": answer, "top": torch.stack([ids.double(), values.double()], -1).tolist()}


def test_the_scripts_that_check_a_gpu_run_on_a_cpu_too(golden: Path, tmp_path: Path) -> None:
    name = "tiny-qwen35moe-Q4_K_M.gguf"
    write_cases(golden, tmp_path, [name], (7, 40))
    assert name in run_script("gpu/check_truth.py", "--golden", tmp_path, "--device", "cpu")[-1]
    assert run_script("gpu/check_graphs.py", "--device", "cpu", "--only", "alone,together")[-1] == "0 failed"
    assert run_script("gpu/check_pool.py", "--device", "cpu")[0].startswith("ok")
    small = ["--shape", "tiny-moe", "--device", "cpu", "--tokens", "2048"]
    assert result_of("gpu/check_snapshots.py", *small)["ok"]


@pytest.mark.parametrize("mode", ["exact", "sparse"])
def test_whatever_the_pools_script_times_has_as_many_layers_as_it_says(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    script = load_script("gpu/check_pool.py")
    monkeypatch.setattr(script, "CUDA", torch.device("cpu"))
    hands = script.hands_of((4, 8, 2, 64), 4, 8, mode)
    assert sum(hand.layers for hand in hands) == 4
    assert {hand.reader.mode for hand in hands} == {mode}


@pytest.mark.gpu
def test_no_model_is_further_from_the_truth_than_its_peer(gpu: torch.device, golden: Path, tmp_path: Path) -> None:
    write_cases(golden, tmp_path, list(FILES), (1, 7, 64, 65, 200, 700))
    run_script("gpu/check_truth.py", "--golden", tmp_path)


@pytest.mark.gpu
def test_recorded_steps_compute_what_the_same_steps_compute_unrecorded(gpu: torch.device) -> None:
    assert run_script("gpu/check_graphs.py")[-1] == "0 failed"


@pytest.mark.gpu
def test_snapshots_are_what_was_captured(gpu: torch.device) -> None:
    assert result_of("gpu/check_snapshots.py", "--tokens", "8192")["ok"]


@pytest.mark.gpu
def test_a_pool_smaller_than_the_sequence_reads_what_a_large_one_reads(gpu: torch.device) -> None:
    run_script("gpu/check_pool.py")

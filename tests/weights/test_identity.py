"""Fingerprint and description."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rekindle.spec import ModelSpec
from rekindle.weights import TensorInfo, open_weights
from rekindle.weights.describe import describe
from rekindle.weights.fingerprint import SAMPLE, fingerprint
from rekindle.weights.gguf_header import read_part
from rekindle.weights.source import SourceFile
from rekindle.weights.stored import Stored

MakeStored = Callable[..., Stored]


@pytest.fixture
def spec(golden: Path) -> ModelSpec:
    return open_weights(golden / "tiny-qwen35-Q4_K_M.gguf").spec


@pytest.fixture
def stored(tmp_path: Path) -> MakeStored:
    def make(content: np.ndarray, name: str = "a", type: str = "Q8_0") -> Stored:
        path = tmp_path / f"{name} {len(list(tmp_path.iterdir()))}"
        path.write_bytes(content.tobytes())
        return Stored(TensorInfo(name, (1, content.size), type, content.size), SourceFile(path), 0)

    return make


def test_a_copy_under_another_name_is_the_same_model(golden: Path, tmp_path: Path) -> None:
    path = golden / "tiny-qwen35-Q4_K_M.gguf"
    copy = Path(shutil.copyfile(path, tmp_path / "other.gguf"))
    assert open_weights(path).fingerprint() == open_weights(copy).fingerprint()


def test_the_display_name_does_not_count_but_hyperparameters_do(spec: ModelSpec, stored: MakeStored) -> None:
    tensors = [stored(np.zeros(10, np.uint8))]
    assert fingerprint(spec, tensors) == fingerprint(replace(spec, name="other"), tensors)
    assert fingerprint(spec, tensors) != fingerprint(replace(spec, eps=1e-5), tensors)
    assert fingerprint(spec, tensors) == fingerprint(replace(spec, tokens=7), tensors), "which changes no state"


def test_one_changed_byte_of_a_file_changes_it(golden: Path, tmp_path: Path) -> None:
    path = golden / "tiny-qwen35-Q4_K_M.gguf"
    content = bytearray(path.read_bytes())
    content[-100] ^= 1  # inside the last tensor
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(content)
    assert open_weights(path).fingerprint() != open_weights(changed).fingerprint()


@pytest.mark.parametrize("at", [0, SAMPLE - 1, 5 * SAMPLE, 10 * SAMPLE - 1])
def test_start_middle_and_end_of_a_large_tensor_count(at: int, spec: ModelSpec, stored: MakeStored) -> None:
    before = np.zeros(10 * SAMPLE, np.uint8)
    after = before.copy()
    after[at] = 1
    assert fingerprint(spec, [stored(before)]) != fingerprint(spec, [stored(after)])


@pytest.mark.parametrize("at", [0, SAMPLE, 2 * SAMPLE + 7, 3 * SAMPLE - 1])
def test_every_byte_of_a_small_tensor_counts(at: int, spec: ModelSpec, stored: MakeStored) -> None:
    before = np.zeros(3 * SAMPLE, np.uint8)
    after = before.copy()
    after[at] = 1
    assert fingerprint(spec, [stored(before)]) != fingerprint(spec, [stored(after)])


def test_names_types_and_number_of_tensors_count_but_their_order_does_not(spec: ModelSpec, stored: MakeStored) -> None:
    content = np.zeros(10, np.uint8)
    a, b = stored(content, "a"), stored(content, "b")
    assert fingerprint(spec, [a, b]) == fingerprint(spec, [b, a])
    prints = {fingerprint(spec, tensors) for tensors in ([a], [b], [a, b], [stored(content, "a", "I8")])}
    assert len(prints) == 4


def test_the_description_accounts_for_every_byte(golden: Path) -> None:
    for path in sorted(golden.glob("*.gguf")):
        described = describe(open_weights(path))
        stored_bytes = sum(tensor.info.nbytes for tensor in read_part(path).tensors.values())
        assert described.nbytes == stored_bytes
        assert sum(described.bytes_by_part.values()) == stored_bytes
        assert sum(described.bytes_by_type.values()) == stored_bytes
        assert described.layers == {"delta": 6, "attention": 2}


def test_the_description_of_a_routed_model(golden: Path) -> None:
    described = describe(open_weights(golden / "tiny-qwen35moe-Q8_0.gguf"))
    # Q8_0: 34 bytes for 32 values; three stacks of 16 experts, 64 · 256 values each, in 8 layers
    assert described.bytes_by_part["experts"] == 3 * 16 * 64 * 256 * 8 * 34 // 32
    assert described.bytes_by_part["embedding"] == 2048 * 256 * 34 // 32
    assert (described.experts, described.experts_used, described.context) == (16, 4, 4096)
    assert set(described.bytes_by_part) == {"embedding", "mixers", "ffn", "experts", "head"}

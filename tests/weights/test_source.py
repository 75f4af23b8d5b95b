"""A model's files while somebody else changes them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.unread import read_in_pieces

from rekindle.errors import BadModelFile
from rekindle.weights import WeightFile, open_weights
from rekindle.weights.source import PIECE, SourceFile


@pytest.fixture
def model(golden: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(golden / "tiny-qwen35-Q4_K_M.gguf", tmp_path / "model.gguf"))


def zero(path: Path) -> None:
    """Same size, same inode; only contents and time of writing differ."""
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
        os.utime(file.fileno(), ns=(0, path.stat().st_mtime_ns + 1))


def largest(file: WeightFile) -> str:
    return max(file.tensors.values(), key=lambda info: info.nbytes).name


def test_a_file_that_nobody_touches_has_not_changed(model: Path) -> None:
    file = open_weights(model)
    file.fingerprint()
    os.link(model, model.with_suffix(".link"))
    file.files.check()
    assert file.files.changed() is None


def test_a_file_that_is_cut_short_gives_a_sentence_and_no_signal(model: Path) -> None:
    file = open_weights(model)
    os.truncate(model, model.stat().st_size // 8)
    with pytest.raises(BadModelFile, match=r"model\.gguf was cut short while it was read"):
        [file.raw(name) for name in file.tensors]
    assert "bytes when it was opened" in (file.files.changed() or "")


def test_a_file_that_is_rewritten_in_place_is_found_out(model: Path) -> None:
    file = open_weights(model)
    zero(model)
    with pytest.raises(BadModelFile, match="must not change while it is loaded"):
        file.files.check()
    assert "was written to" in (file.files.changed() or "")


def test_a_replaced_file_is_found_out_and_the_old_one_still_read(model: Path) -> None:
    file, other = open_weights(model), model.with_suffix(".new")
    before = file.values(largest(file))
    shutil.copy(model, other)
    zero(other)
    other.replace(model)
    file.files.check()
    np.testing.assert_array_equal(file.values(largest(file)), before)
    assert "replaced by another file" in (file.files.changed() or "")


def test_a_removed_file_is_found_out(model: Path) -> None:
    file = open_weights(model)
    model.unlink()
    file.files.check()
    assert "is gone" in (file.files.changed() or "")


def test_a_fingerprint_is_of_the_bytes_that_were_there_when_it_was_first_asked(model: Path) -> None:
    file = open_weights(model)
    before = file.fingerprint()
    zero(model)
    assert file.fingerprint() == before


def test_every_file_of_a_folder_is_watched(make_tiny: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(make_tiny("dense").folder, tmp_path / "folder")
    file = open_weights(folder)
    zero(max(folder.glob("*.safetensors")))
    with pytest.raises(BadModelFile, match="must not change"):
        file.files.check()


def test_long_stretches_are_read_whole(tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(0, 256, 3 * PIECE + 7, dtype=np.uint8)
    path = tmp_path / "long"
    path.write_bytes(content.tobytes())
    np.testing.assert_array_equal(SourceFile(path).read(5, content.size - 1), content[5:-1])


def test_a_pipe_is_no_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(BadModelFile, match="not a regular file"):
        open_weights(tmp_path / "pipe.gguf")


@pytest.mark.parametrize("name", ["tiny-qwen35-Q4_K_M.gguf", "tiny-qwen35moe-Q4_K_M.gguf"])
def test_bytes_that_are_read_into_anothers_memory_are_the_same(golden: Path, name: str) -> None:
    file = open_weights(golden / name)
    streamed = [tensor for tensor in file.tensors if not isinstance(file.unread(tensor), np.ndarray)]
    assert len(streamed) == len(file.tensors), "the family moves no rows"
    for tensor in file.tensors:
        np.testing.assert_array_equal(read_in_pieces(file.unread(tensor), 1 << 12), file.raw(tensor))


def test_rows_that_a_converter_moved_are_read_and_moved_back(smollm2: Path) -> None:
    file = open_weights(smollm2)
    assert isinstance(file.unread("blk.0.attn_q.weight"), np.ndarray)
    for tensor in ("blk.0.attn_q.weight", "blk.0.attn_v.weight"):
        np.testing.assert_array_equal(read_in_pieces(file.unread(tensor), 1 << 16), file.raw(tensor))


def test_a_file_that_is_cut_short_says_so_to_who_reads_into_memory_of_its_own(model: Path) -> None:
    file = open_weights(model)
    os.truncate(model, model.stat().st_size // 8)
    with pytest.raises(BadModelFile, match=r"model\.gguf was cut short while it was read"):
        [read_in_pieces(file.unread(name)) for name in file.tensors]

"""Synthetic models: valid for us and for the gguf package, and in the sizes they claim."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from gguf.quants import dequantize
from typer.testing import CliRunner

from rekindle.bench import synth
from rekindle.bench.synth import SHAPES, byte_alphabet, shape_totals, write_synthetic
from rekindle.cli.commands import app
from rekindle.config import show_bytes
from rekindle.errors import BadConfig
from rekindle.weights import open_weights

TINY = ("tiny", "tiny-moe")


@pytest.mark.parametrize("shape", TINY)
def test_a_synthetic_file_opens_with_the_spec_it_was_asked_for(shape: str, tmp_path: Path) -> None:
    file = open_weights(write_synthetic(tmp_path / "s.gguf", shape))
    spec, asked = file.spec, SHAPES[shape].spec
    assert spec.eps == pytest.approx(asked.eps)
    for part in ("architecture", "hidden", "vocab", "mixers", "attention", "delta", "ffn", "context", "tied"):
        assert getattr(spec, part) == getattr(asked, part), part


@pytest.mark.parametrize("shape", TINY)
def test_the_gguf_packages_reader_reads_it_too(shape: str, tmp_path: Path) -> None:
    path = write_synthetic(tmp_path / "s.gguf", shape)
    file, reader = open_weights(path), GGUFReader(path)
    assert {tensor.name for tensor in reader.tensors} == set(file.tensors)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).reshape(file.tensors[tensor.name].shape)
        np.testing.assert_array_equal(file.values(tensor.name), values)
    assert reader.fields["tokenizer.ggml.tokens"].contents() == list(file.metadata["tokenizer.ggml.tokens"])
    assert path.stat().st_size >= reader.tensors[-1].data_offset + reader.tensors[-1].n_bytes


@pytest.mark.parametrize("shape", TINY)
def test_matrices_have_the_spread_of_real_weights(shape: str, tmp_path: Path) -> None:
    file = open_weights(write_synthetic(tmp_path / "s.gguf", shape))
    types = set()
    for name, info in file.tensors.items():
        if info.type == "F32":
            continue
        values = file.values(name)
        types.add(info.type)
        assert 0.028 < values.std() < 0.032, name
        assert abs(values.mean()) < 0.003, name
    assert types == {"Q4_K", "Q6_K"}


def test_the_delicate_matrices_of_half_of_the_layers_get_six_bits(tmp_path: Path) -> None:
    tensors = open_weights(write_synthetic(tmp_path / "s.gguf", "tiny")).tensors
    six = {name for name, info in tensors.items() if info.type == "Q6_K"}
    # layers 0, 3, 6 and 7 of 8, as llama.cpp chooses them; 3 and 7 are the attention layers
    downs = {f"blk.{layer}.ffn_down.weight" for layer in (0, 3, 6, 7)}
    mixers = {"blk.0.attn_qkv.weight", "blk.6.attn_qkv.weight", "blk.3.attn_v.weight", "blk.7.attn_v.weight"}
    assert six == {"output.weight"} | downs | mixers


def test_no_row_of_a_tensor_and_no_two_tensors_are_alike(tmp_path: Path) -> None:
    file = open_weights(write_synthetic(tmp_path / "s.gguf", "tiny"))
    rows = file.raw("token_embd.weight")
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert not np.array_equal(file.raw("blk.0.ffn_up.weight"), file.raw("blk.0.ffn_gate.weight"))


def test_a_tensor_longer_than_the_run_goes_on_with_valid_blocks(tmp_path: Path) -> None:
    file = open_weights(write_synthetic(tmp_path / "s.gguf", "tiny-moe"))
    experts = file.raw("blk.1.ffn_up_exps.weight")
    blocks = experts.reshape(-1, 144)
    np.testing.assert_array_equal(blocks[:, :4], np.broadcast_to(blocks[0, :4], (len(blocks), 4)))  # d and dmin


def test_the_same_seed_gives_the_same_file_and_another_does_not(tmp_path: Path) -> None:
    a, b, c = (write_synthetic(tmp_path / str(i), "tiny", seed=seed).read_bytes() for i, seed in enumerate((1, 1, 2)))
    assert a == b
    assert a != c


def test_totals_are_the_bytes_that_are_written(tmp_path: Path) -> None:
    totals = shape_totals("tiny-moe")
    file = open_weights(write_synthetic(tmp_path / "s.gguf", "tiny-moe"))
    assert totals.total == sum(info.nbytes for info in file.tensors.values())
    assert sum(totals.by_type.values()) == totals.total
    experts = sum(info.nbytes for name, info in file.tensors.items() if name.endswith("_exps.weight"))
    embedding = file.tensors["token_embd.weight"].nbytes
    rest = totals.total - experts - embedding
    assert totals.per_token == rest + experts * 2 // 8 + embedding // 512


def test_the_real_shapes_have_the_sizes_of_the_real_files() -> None:
    gib = 2**30
    assert shape_totals("qwen3.6-27b").total / gib == pytest.approx(15.3, abs=0.3)
    assert shape_totals("qwen3.6-35b-a3b").total / gib == pytest.approx(19.7, abs=0.3)
    specials = SHAPES["qwen3.6-27b"].specials
    assert specials == {
        248044: "<|endoftext|>",
        248045: "<|im_start|>",
        248046: "<|im_end|>",
        248068: "<think>",
        248069: "</think>",
    }


def test_the_vocabulary_covers_every_byte_and_every_special_token(tmp_path: Path) -> None:
    metadata = open_weights(write_synthetic(tmp_path / "s.gguf", "tiny")).metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == len(set(tokens)) == 512
    assert tokens[:256] == byte_alphabet()
    assert tokens[metadata["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
    for merge in metadata["tokenizer.ggml.merges"]:
        assert merge.replace(" ", "") in tokens


def test_an_unknown_shape_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadConfig, match=next(iter(SHAPES))):
        shape_totals("qwen9")


def command(path: Path) -> str:
    done = CliRunner().invoke(app, ["bench", "synth", "--shape", "tiny", str(path)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_an_interrupted_file_leaves_nothing_behind_and_the_next_run_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []

    def interrupted(*_: object) -> None:
        seen.append([path.name for path in tmp_path.iterdir()])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(synth, "_write_tensor", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_synthetic(tmp_path / "s.gguf", "tiny")
    assert seen == [["s.gguf.partial"]], "it has its name before it is whole"
    assert list(tmp_path.iterdir()) == []
    command(tmp_path / "s.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["s.gguf"]


def test_the_size_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(synth, "_write_tensor", full)
    done = CliRunner().invoke(app, ["bench", "synth", "--shape", "tiny", str(tmp_path / "s.gguf")])
    assert f"writes {show_bytes(shape_totals('tiny').total)}" in done.output
    assert isinstance(done.exception, BadConfig)
    assert "s.gguf cannot be written: No space left on device" in str(done.exception)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match=r"x\.gguf cannot be written: there is no folder .*nowhere"):
        command(tmp_path / "nowhere" / "x.gguf")

"""What the speed table counts."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from rekindle.bench.speed import decode_speed
from rekindle.bench.synth import write_synthetic
from rekindle.bench.traffic import bytes_per_token, chosen_share, weight_bytes
from rekindle.cli.commands import app
from rekindle.kernels import native
from rekindle.weights import open_weights


def test_decode_counts_only_the_time_in_which_every_sequence_decodes() -> None:
    early, late = [0.0, 1.0, 2.0, 3.0, 4.0], [2.5, 3.5, 4.5, 5.5]
    assert decode_speed([early, late]) == pytest.approx(3 / 1.5)  # at 3.0, 3.5 and 4.0, between 2.5 and 4.0


def test_answers_that_never_decode_together_have_no_speed() -> None:
    assert decode_speed([[0.0, 1.0], [1.5, 2.0]]) == 0.0


def test_one_sequence_counts_every_token_but_the_first() -> None:
    assert decode_speed([[1.0, 1.5, 2.0]]) == pytest.approx(2.0)


def test_a_token_reads_its_chosen_experts_and_not_the_embedding(tmp_path: Path) -> None:
    file = open_weights(write_synthetic(tmp_path / "moe.gguf", "tiny-moe"))
    experts = sum(info.nbytes for name, info in file.tensors.items() if name.endswith("_exps.weight"))
    embedding = file.tensors["token_embd.weight"].nbytes
    whole = sum(info.nbytes for info in file.tensors.values())
    share = file.spec.ffn.used / file.spec.ffn.experts
    assert weight_bytes(file, False, 1) == pytest.approx(whole - embedding - experts * (1 - share))


def test_sequences_share_weights_but_not_their_kv(tmp_path: Path) -> None:
    file = open_weights(write_synthetic(tmp_path / "moe.gguf", "tiny-moe"))
    short, long = (bytes_per_token(file, False, "bf16", context, 4) for context in (0, 1000))
    attention = file.spec.attention
    rows = (
        2 * attention.kv_heads * attention.head_dim * 2 * sum(mixer.kind == "attention" for mixer in file.spec.mixers)
    )
    assert long - short == 1000 * rows
    assert chosen_share(file.spec, 4) < 4 * chosen_share(file.spec, 1), "some choose the same expert"


def test_bench_of_a_model_needs_no_subcommand_and_synth_is_one(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    made = CliRunner().invoke(app, ["bench", "synth", "--shape", "tiny", str(path)])
    assert made.exit_code == 0 and path.exists(), made.output
    run = CliRunner().invoke(app, ["bench", str(path), "--prompt", "16", "--answer", "4", "--repeats", "1", "--ops"])
    assert run.exit_code == 0, run.output
    assert "bytes/token" in run.output
    assert "aten::" in run.output, "the operations are named"
    assert ("native::multiply_all" in run.output) == (native.library() is not None), "our own kernels too"

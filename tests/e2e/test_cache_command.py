"""`rekindle cache` on folders with much in them: short, says what it leaves out, and leaves nothing out when asked."""

from __future__ import annotations

import json
import re
import time
from math import prod
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rekindle.cli import cache
from rekindle.cli.commands import app
from rekindle.snapshots.tools import SnapshotInfo


def run(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, ["cache", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def info(number: int, fingerprint: str) -> SnapshotInfo:
    return SnapshotInfo(f"{number:010}", fingerprint, {}, number, "turn", None, 0, time.time() - number, 1 << 20, 0)


@pytest.mark.parametrize(("count", "left_out"), [(20, 0), (25, 5)])
def test_a_list_shows_the_latest_of_every_model_its_size_and_how_many_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, left_out: int
) -> None:
    found = [info(number, "b" * 64) for number in range(count)] + [info(99, "c" * 64)]
    monkeypatch.setattr(cache, "list_snapshots", lambda folder: found)
    monkeypatch.setattr(cache, "held_bytes", lambda folder, fingerprint: {"b": 9 << 10, "c": 2 << 10}[fingerprint[0]])
    short, whole = run("list", "--cache-dir", tmp_path), run("list", "--cache-dir", tmp_path, "--all")
    assert len(re.findall("^0000", short, re.MULTILINE)) == count - left_out + 1
    assert len(re.findall("^0000", whole, re.MULTILINE)) == count + 1
    assert ("and 5 that were used before these; --all lists them" in short) == bool(left_out)
    assert "--all" not in whole
    assert len(json.loads(run("list", "--cache-dir", tmp_path, "--json"))) == count + 1
    for text in (short, whole):
        for said in (f"{count} snapshots, 9.0 KiB on disk: {count}.0 MiB", "1 snapshots, 2.0 KiB on disk: 1.0 MiB"):
            assert said in text
        assert f"in all {count + 1} snapshots, 11.0 KiB on disk: {count + 1}.0 MiB" in text


def manifest_of_a_large_model() -> dict[str, Any]:
    """64 layers, every fourth of them attention; 900 tokens in 14 pages and a tail of 4."""
    parts = []
    for layer in range(64):
        kinds = {"tail": [2, 4, 4, 256]} if layer % 4 == 3 else {"state": [48, 128, 128], "window": [3, 10_240]}
        parts += [
            {"name": name, "layer": layer, "dtype": "float32", "shape": shape, "offset": 0, "bytes": 4 * prod(shape)}
            for name, shape in kinds.items()
        ]
    parts.append({"name": "logits", "layer": None, "dtype": "float32", "shape": [512], "offset": 0, "bytes": 2048})
    return {
        "id": "ab" * 16,
        "fingerprint": "f" * 64,
        "kind": "end",
        "conversation": None,
        "saved": 0,
        "position": 900,
        "grid": 512,
        "stretches": [
            {"stop": 600, "how": "prefill", "cuts": [600]},
            {"stop": 880, "how": "decode", "cuts": []},
            {"stop": 900, "how": "prefill", "cuts": [890, 900]},
        ],
        "own": "cd" * 16,
        "own_bytes": 1 << 30,
        "parts": parts,
        "page_rows": [{"layer": layer, "dtype": "bfloat16", "shape": [2, 64, 4, 256]} for layer in range(3, 64, 4)],
        "tail_tokens": [1, 2, 3, 4],
        "pages": [f"page {i}" for i in range(14)],
    }


def test_a_snapshot_of_a_large_model_is_shown_on_one_screen_or_with_nothing_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = manifest_of_a_large_model()
    monkeypatch.setattr(cache, "show_snapshot", lambda folder, id: manifest)
    lines = run("show", "ab", "--cache-dir", tmp_path).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    shown = [" ".join(line.split()) for line in lines]
    for line in (
        "tokens 900 (prefill 620, decode 280; grid 512)",
        "pages 14; in one bfloat16 [2, 64, 4, 256] of 16 layers",
        "state float32 [48, 128, 128] of 48 layers, 144.0 MiB",
        "window float32 [3, 10240] of 48 layers, 5.6 MiB",
        "tail float32 [2, 4, 4, 256] of 16 layers, 512.0 KiB",
        "logits float32 [512], 2.0 KiB",
    ):
        assert line in shown
    assert json.loads(run("show", "ab", "--json", "--cache-dir", tmp_path)) == manifest


def test_a_folder_without_snapshots_is_said_to_have_none(tmp_path: Path) -> None:
    assert f"{tmp_path} has no snapshots" in run("list", "--cache-dir", tmp_path)

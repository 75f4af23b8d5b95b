"""`rekindle cache` on folders with much in them: short, says what it leaves out, and leaves nothing out when asked."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rekindle.cli import app, cache
from rekindle.snapshots.tools import SnapshotInfo


def run(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, ["cache", *map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.output


def info(number: int, fingerprint: str) -> SnapshotInfo:
    return SnapshotInfo(f"{number:010}", fingerprint, {}, number, "turn", None, 0, time.time() - number, 1 << 20, 0)


@pytest.mark.parametrize(("count", "left_out"), [(20, 0), (25, 5)])
def test_a_list_shows_the_latest_of_every_model_and_says_how_many_it_leaves_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, left_out: int
) -> None:
    found = [info(number, "big") for number in range(count)] + [info(99, "small")]
    monkeypatch.setattr(cache, "list_snapshots", lambda folder: found)
    short, whole = run("list", tmp_path), run("list", tmp_path, "--all")
    assert len(re.findall("^0000", short, re.MULTILINE)) == count - left_out + 1
    assert len(re.findall("^0000", whole, re.MULTILINE)) == count + 1
    assert ("and 5 that were used before these; --all lists them" in short) == bool(left_out)
    assert "--all" not in whole
    assert len(json.loads(run("list", tmp_path, "--json"))) == count + 1
    assert all(f"{count + 1} snapshots, {count + 1}.0 MiB" in text for text in (short, whole))


def test_a_manifest_shows_the_beginning_of_its_long_lists_or_all_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = {"position": 900, "pages": [f"page {i}" for i in range(14)], "tail_tokens": [1, 2, 3, 4]}
    monkeypatch.setattr(cache, "show_snapshot", lambda folder, id: manifest)
    short = json.loads(run("show", tmp_path, "ab"))
    assert short["position"] == 900
    assert short["tail_tokens"] == [1, 2, 3, 4]
    assert short["pages"] == ["page 0", "page 1", "page 2", "page 3", "and 10 more; --all shows them"]
    assert json.loads(run("show", tmp_path, "ab", "--all")) == manifest

"""Who may use a shard that listens on loopback, where every user of the machine can knock."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rekindle.batch import Batch, Segment
from rekindle.bench.synth import write_synthetic
from rekindle.build.shards import Shards
from rekindle.build.stage import StageConfig
from rekindle.cli.commands import app
from rekindle.config import Config, parse_shards
from rekindle.errors import BadConfig, LinkRefused
from rekindle.shards import ShardProcess, keygen, start_shard
from rekindle.spec import Span
from rekindle.weights import open_weights

ORDER = StageConfig("cpu", Span(0, 2), slots=1, pages=4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic(tmp_path_factory.mktemp("links") / "tiny.gguf", "tiny")


@pytest.fixture
def endpoint() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture
def shard(model: Path, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardProcess]:
    """As its user starts it, with no word about keys."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    stage = f"--span 0:2 --device cpu --pages 4 --slots 1 --threads 1 --dtype float32 --kv-type f32 --listen {endpoint}"
    process = start_shard(
        [sys.executable, "-m", "rekindle.cli", "shard", str(model), *stage.split()], endpoint, deadline=60
    )
    yield process
    process.stop()


def head(endpoint: str) -> Shards:
    return Shards(Config(shards=parse_shards([f"here={endpoint}"], [], []), threads=1))


def test_a_server_of_the_same_user_needs_no_option_and_another_user_gets_nothing(
    model: Path, endpoint: str, shard: ShardProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprint = open_weights(model).fingerprint()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))  # where another user's keys are
    with pytest.raises(LinkRefused, match="is this the shard's key"):
        head(endpoint).connect("cpu@here", ORDER, fingerprint)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    stage = head(endpoint).connect("cpu@here", ORDER, fingerprint)
    stage.open(0)
    assert stage.forward(Batch((Segment(0, 0, (1, 2)),)), None).hidden is not None
    stage.stop()
    key = tmp_path / "user" / "rekindle" / "link.key"
    assert os.stat(key).st_mode & 0o777 == 0o600


@pytest.mark.parametrize("given", ["--key", "--allow"])
def test_a_key_without_the_heads_it_allows_is_refused_before_anything_is_loaded(
    model: Path, tmp_path: Path, given: str
) -> None:
    keygen(tmp_path / "key")
    path = tmp_path / ("key" if given == "--key" else "key.pub")
    stage = ["--span", "0:2", "--device", "cpu", "--pages", "4", "--listen", "tcp://127.0.0.1:9"]
    run = CliRunner().invoke(app, ["shard", str(model), *stage, given, str(path)])
    assert isinstance(run.exception, BadConfig)
    assert f"{given} without " in str(run.exception)
    assert "lets nobody in" in str(run.exception)


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (["--dtype", "int3", "--kv-type", "f32"], "--dtype is 'int3'"),
        (["--experts", "{"], "--experts: '{'"),
        (["--experts", '{"hot": 5}'], "--experts"),
    ],
)
def test_an_order_that_cannot_be_is_refused_in_one_sentence(model: Path, option: list[str], says: str) -> None:
    stage = ["--span", "0:2", "--device", "cpu", "--pages", "4", "--listen", "ipc:///tmp/never-bound"]
    run = CliRunner().invoke(app, ["shard", str(model), *stage, *option])
    assert isinstance(run.exception, BadConfig)
    assert says in str(run.exception)

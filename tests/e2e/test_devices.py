"""`rekindle devices`, and the speeds behind `--split auto`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rekindle.build import probe_device, speeds
from rekindle.build.machine import make_machine
from rekindle.build.probe import Probe
from rekindle.cli.commands import app, command_named
from rekindle.config import Config, parse_shards
from rekindle.errors import BadConfig

GIB = 1 << 30


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rekindle" / "devices.json"


def test_devices_lists_the_machine_and_what_a_model_would_get(golden: Path, cache_folder: Path) -> None:
    result = CliRunner().invoke(app, ["devices", str(golden / "tiny-qwen35-Q4_K_M.gguf")])
    assert result.exit_code == 0, result.output
    assert "cores" in result.output
    assert "GB/s" in result.output
    assert "layers [0, 8)" in result.output
    assert len(json.loads(cache_folder.read_text())) >= 1


def test_a_measurement_is_made_once_and_again_when_asked(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([Probe(1.0, 4.0), Probe(9.0, 4.0)])
    monkeypatch.setattr("rekindle.build.probe.measure", lambda device: next(results))
    assert probe_device("cpu").speed == probe_device("cpu").speed == 2.0
    assert probe_device("cpu", fresh=True).speed == 6.0
    cache_folder.write_text("no json")
    monkeypatch.setattr("rekindle.build.probe.measure", lambda device: Probe(1.0, 1.0))
    assert probe_device("cpu").speed == 1.0


def test_equal_devices_are_not_measured() -> None:
    shards = parse_shards(["a=x", "b=tcp://10.0.0.2:7000"], [], [])
    assert speeds(["cpu", "cpu@a", "cpu@b"], shards) == {}


def test_cpu_stages_share_the_ram_of_their_machine() -> None:
    shards = parse_shards(["a=x", "b=ipc:///b", "far=tcp://10.0.0.2:7000"], ["b=2GiB", "far=64GiB"], [])
    machine = make_machine(["cpu", "cpu@a", "cpu@b", "cpu@far"], None, 10 * GIB, shards)
    assert [device.budget // GIB for device in machine.devices] == [4, 4, 2, 64]
    assert [device.host for device in machine.devices] == [True, True, True, False]
    assert [device.remote for device in machine.devices] == [False, False, False, True]


def test_a_device_of_another_machine_needs_a_budget() -> None:
    with pytest.raises(BadConfig, match="--shard-memory far=16GiB"):
        make_machine(["cpu@far"], None, GIB, parse_shards(["far=tcp://10.0.0.2:7000"], [], []))


def test_a_key_pair_is_made_and_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "head.key"
    assert CliRunner().invoke(app, ["shard", "keygen", str(path)]).exit_code == 0
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.with_name("head.key.pub").exists()
    assert isinstance(CliRunner().invoke(app, ["shard", "keygen", str(path)]).exception, BadConfig)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--device", "cpu", "--pages", "4", "--listen", "ipc:///x"], "--span is missing"),
        (["--span", "2", "--device", "cpu", "--pages", "4", "--listen", "ipc:///x"], "'2' is no span"),
        (["--span", "0:2", "--device", "cpu", "--listen", "ipc:///x"], "give each once per stage"),
        (["--span", "0:2", "--device", "cpu", "--pages", "4"], "--listen is missing"),
        (["--span", "0:99", "--device", "cpu", "--pages", "4", "--listen", "ipc:///x"], "the model, which has 8"),
    ],
)
def test_a_shard_that_makes_no_sense_is_refused(golden: Path, arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(app, ["shard", str(golden / "tiny-qwen35-Q4_K_M.gguf"), *arguments])
    assert isinstance(result.exception, BadConfig)
    assert says in str(result.exception)


def test_every_command_that_plans_assumes_as_many_sequences_as_serve() -> None:
    planning = ("devices", "plan", "serve")
    commands = {name: command_named(name) for name in planning}
    defaults = {name: {p.name: p.default for p in command.params}["sequences"] for name, command in commands.items()}
    assert defaults == dict.fromkeys(planning, Config().sequences)

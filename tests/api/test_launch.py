"""`rekindle launch`: what a client is started with. The clients are of paper: they note their words and variables."""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rekindle.api import ApiKeys
from rekindle.api.settings import ModelFacts
from rekindle.cli.commands import app
from rekindle.errors import BadConfig

NOTES = """#!{python}
import json, os, sys
with open(os.environ["NOTED"], "w") as file:
    json.dump({{"words": sys.argv[1:], "environment": dict(os.environ)}}, file)
sys.exit(7)
"""


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the paper clients on PATH write down how they were started."""
    for name in ("claude", "codex", "opencode"):
        program = tmp_path / name
        program.write_text(NOTES.format(python=sys.executable))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("NOTED", str(tmp_path / "noted.json"))
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of another service")
    monkeypatch.delenv("REKINDLE_API_KEY", raising=False)
    return tmp_path / "noted.json"


def launch(*words: str) -> Any:
    return CliRunner().invoke(app, ["launch", *words])


def started(noted: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    result = launch(*words)
    assert result.exit_code == 7, f"the client's own exit status: {result.exception!r}"
    found = json.loads(noted.read_text())
    return found["words"], found["environment"]


def test_claude_gets_one_model_for_everything(house: Any, noted: Path) -> None:
    words, environment = started(noted, "claude", "--url", house.url, "--", "-p", "fix it")
    assert words == ["-p", "fix it"]
    assert environment["ANTHROPIC_BASE_URL"] == house.url
    assert environment["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] == "1"
    assert environment["CLAUDE_CODE_ATTRIBUTION_HEADER"] == "0"
    assert environment["CLAUDE_CODE_TOTAL_TOKENS_REMINDER"] == "off"
    assert environment["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] == "30000"
    assert environment["ANTHROPIC_AUTH_TOKEN"]
    assert "ANTHROPIC_API_KEY" not in environment, "it would lead the client elsewhere"
    models = {name: value for name, value in environment.items() if name.endswith("_MODEL")}
    assert set(models.values()) == {"paper-9b"}
    assert {"ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"} <= models.keys()


def test_codex_gets_a_provider_on_its_command_line(house: Any, noted: Path) -> None:
    words, environment = started(
        noted, "codex", "--url", f"{house.url}/v1/", "--model", "org/alias", "--", "exec", "hi"
    )
    assert words[-2:] == ["exec", "hi"]
    options = dict(word.split("=", 1) for word in words[1:-2:2])
    assert words[:-2:2] == ["-c"] * len(options)
    assert options["model"] == '"org/alias"'
    assert options["model_context_window"] == "30000"
    assert options["model_providers.rekindle"] == (
        f'{{name="Rekindle", base_url="{house.url}/v1", wire_api="responses"}}'
    )
    assert "CODEX_HOME" not in environment


def test_opencode_gets_its_config_in_a_variable(house: Any, noted: Path) -> None:
    words, environment = started(noted, "opencode", "--url", house.url)
    config = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
    assert words == []
    assert config["model"] == config["small_model"] == "rekindle/paper-9b"
    provider = config["provider"]["rekindle"]
    assert provider["options"]["baseURL"] == f"{house.url}/v1"
    assert provider["models"]["paper-9b"]["limit"] == {"context": 30_000, "output": 15_000}


def test_the_key_of_the_server_goes_along(fresh_house: Any, noted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = fresh_house(keys=ApiKeys.single("sesame-seed"))
    refused = launch("codex", "--url", house.url)
    assert isinstance(refused.exception, BadConfig)
    assert f"the server at {house.url} asks for a key: it is taken from REKINDLE_API_KEY" in str(refused.exception)
    monkeypatch.setenv("REKINDLE_API_KEY", "sesame-oil")
    assert "asks for a key: the one in REKINDLE_API_KEY is not" in str(launch("codex", "--url", house.url).exception)
    monkeypatch.setenv("REKINDLE_API_KEY", "sesame-seed")
    words, environment = started(noted, "codex", "--url", house.url)
    assert 'env_key="REKINDLE_API_KEY"' in " ".join(words)
    assert environment["REKINDLE_API_KEY"] == "sesame-seed"
    assert "sesame-seed" not in " ".join(words), "other users of the machine see a command line"


@pytest.mark.parametrize("template", ["{{ messages }}", "{{ messages }}{{ tools }}"])
def test_who_starts_an_agent_is_told_where_its_model_takes_no_tools(
    fresh_house: Any, noted: Path, template: str
) -> None:
    house = fresh_house(facts=ModelFacts(template=template))
    assert ("takes no tools" in launch("claude", "--url", house.url).stderr) == ("tools" not in template)


def test_print_shows_the_settings_and_starts_nothing(house: Any, noted: Path) -> None:
    result = launch("claude", "--url", house.url, "--print")
    assert result.exit_code == 0
    assert f"export ANTHROPIC_BASE_URL={house.url}\n" in result.output
    assert result.output.endswith("\nclaude\n")
    assert not noted.exists()


def test_what_is_missing_is_said_in_one_line(house: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said = {
        "npm install -g @openai/codex": ("codex", "--url", house.url),
        "rekindle serve MODEL": ("codex", "--url", "http://127.0.0.1:9", "--print"),
        "serves paper-9b, org/alias": ("codex", "--url", house.url, "--model", "other", "--print"),
    }
    for words, given in said.items():
        error = launch(*given).exception
        assert isinstance(error, BadConfig)
        assert words in str(error)
        assert "\n" not in str(error)

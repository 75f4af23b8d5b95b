"""Coding agents as people install them, against a real server whose model answers by a script: a tool is called, a file
is changed, and what was computed once is not computed again, also after a restart.

The agents come from npm, into a folder that the next run finds again; where that is impossible the tests are skipped.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.server import Process, Server
from support.tiny_files import write_tiny_file

from rekindle.bench.replay import Seen

FOLDER = Path(os.environ.get("REKINDLE_AGENTS", Path.home() / ".cache" / "rekindle-test-agents"))
PATIENCE = 400  # seconds for one run of an agent
GOAL = 1.05  # prompt tokens computed ÷ prompt tokens never seen before


@dataclass(frozen=True)
class Agent:
    package: str
    writes: Callable[[Path], str]  # the call that puts hello into a file, as the model writes it
    tool: str  # which that call is of
    first: tuple[str, ...]
    again: tuple[str, ...]  # goes on with the last conversation; the task comes behind these words


def call(tool: str, **arguments: str) -> str:
    lines = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in arguments.items())
    return f"I shall do it.\n</think>\n\n<tool_call>\n<function={tool}>\n{lines}</function>\n</tool_call>"


NO_SANDBOX = ("--skip-git-repo-check", "-s", "danger-full-access")

AGENTS = {
    "claude": Agent(
        "@anthropic-ai/claude-code@2.1.325",
        lambda file: call("Write", file_path=str(file), content="hello"),
        "Write",
        ("--permission-mode", "acceptEdits", "-p"),
        ("--permission-mode", "acceptEdits", "--continue", "-p"),
    ),
    "codex": Agent(
        "@openai/codex@0.166.0",
        lambda file: call("exec_command", cmd=f"echo hello > {file}"),
        "exec_command",
        ("exec", *NO_SANDBOX),
        ("exec", *NO_SANDBOX, "resume", "--last"),
    ),
    "opencode": Agent(
        "opencode-ai@1.18.33",
        lambda file: call("write", filePath=str(file), content="hello"),
        "write",
        ("run",),
        ("run", "--continue"),
    ),
}


class ScriptedServer(Server):
    def start(self, words: list[str], output: int, environment: Mapping[str, str], hang_up: Any) -> Process:
        command = [sys.executable, "-u", str(Path(__file__).parents[1] / "support" / "scripted_server.py"), *words]
        return subprocess.Popen(command, stdout=output, stderr=output, env=environment)


@pytest.fixture(params=AGENTS)
def agent(request: pytest.FixtureRequest) -> str:
    """One that is installed."""
    name = str(request.param)
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _installed(AGENTS[name].package):
            command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(FOLDER), AGENTS[name].package]
            try:
                subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                pytest.skip(f"npm cannot install {AGENTS[name].package}: {error} {error.stderr or ''}"[:400])
    return name


def _installed(package: str) -> bool:
    name, _, version = package.rpartition("@")
    described = FOLDER / "node_modules" / name / "package.json"
    return described.exists() and json.loads(described.read_text())["version"] == version


class Desk:
    """A project, an agent's home and a server, which can be started again."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self.agent = name, AGENTS[name]
        self.project, self.home = folder / "project", folder / "home"
        self.project.mkdir()
        self.home.mkdir()
        subprocess.run(["git", "init", "-q"], cwd=self.project, check=True)
        self._folder = folder
        self._model = write_tiny_file(folder / "tiny-qwen35-Q4_K_M.gguf", context_length=65536, block_count=4)
        self._log = folder / "log.jsonl"
        self._script = folder / "script.json"
        self._script.write_text(json.dumps([*self._rules("TASK-TWO", "two"), *self._rules("TASK-ONE", "one")]))
        self.start()

    def _rules(self, task: str, file: str) -> list[dict[str, str]]:
        writes = self.agent.writes(self.project / file)
        done = {"after": task, "needs": "<tool_response>", "without": "\0", "say": "Done.\n</think>\n\nIt is written."}
        return [{"after": task, "needs": f'"{self.agent.tool}"', "without": "<tool_response>", "say": writes}, done]

    def start(self) -> None:
        words = (self._script, self._log, self._model, "--context", "65536", "--sequences", "2", "--name", "tiny")
        self.server = ScriptedServer(*map(str, words), "--cache-dir", str(self._folder / "snapshots"))

    def run(self, *words: str) -> None:
        """As a user would: `rekindle launch`."""
        command = [sys.executable, "-c", "from rekindle.cli import main; main()", "launch", self.name]
        binaries = FOLDER / "node_modules" / ".bin"
        done = subprocess.run(
            [*command, "--url", self.server.url, "--", *words],
            cwd=self.project,
            env={
                **os.environ,
                "HOME": str(self.home),
                "PWD": str(self.project),
                "PATH": f"{binaries}:{os.environ['PATH']}",
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        said = "".join(self.server.output)[-3000:]
        assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-1500:]}\n{said}"

    def answers(self) -> list[dict[str, Any]]:
        """What was answered so far, with the tokens of each prompt that no earlier prompt or answer began with."""
        seen, found = Seen(), []
        for line in map(json.loads, self._log.read_text().splitlines()):
            if not line["background"]:
                found.append(line | {"unseen": len(line["prompt"]) - seen.length(line["prompt"])})
            seen.add([*line["prompt"], *line["answer"]])
        return found


@pytest.fixture
def desk(agent: str, tmp_path: Path) -> Iterator[Desk]:
    desk = Desk(tmp_path, agent)
    yield desk
    if desk.server.process.poll() is None:
        desk.server.stop()


def test_an_agent_changes_files_and_no_token_is_computed_twice_also_across_a_restart(desk: Desk) -> None:
    desk.run(*desk.agent.first, "TASK-ONE: write hello into the file one.")
    assert (desk.project / "one").read_text().strip() == "hello"
    first = desk.answers()
    desk.server.stop()
    desk.start()
    desk.run(*desk.agent.again, "TASK-TWO: write hello into the file two.")
    assert (desk.project / "two").read_text().strip() == "hello"
    answers = desk.answers()
    for line in answers:
        print(f"{desk.name}: sent {len(line['prompt'])}, restored {line['restored']}, computed {line['computed']}, "
              f"new {line['unseen']}")  # fmt: skip
    main = max(len(line["prompt"]) for line in first)
    goes_on = next(line for line in answers[len(first) :] if len(line["prompt"]) > main)
    assert goes_on["restored"]["disk"] > 0.9 * main, "what was known before the restart is restored"
    assert sum(line["computed"] for line in answers) <= GOAL * sum(line["unseen"] for line in answers)

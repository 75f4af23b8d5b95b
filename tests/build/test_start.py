"""What a command line does before torch is there, which takes seconds to load."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import rekindle
from rekindle.cli.commands import HELP, app, command_named
from rekindle.errors import RekindleError

SOURCE = Path(rekindle.__file__).parents[1]


@pytest.fixture
def paper_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which to import torch takes a minute, and says so."""
    (tmp_path / "torch.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(SOURCE)))}


ASKS = """
import sys
from rekindle.cli import main
try:
    main()
finally:
    print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--version"], f"rekindle {rekindle.__version__}\n"),
        (["--help"], "Host stages for a server"),
        ([], "Host stages for a server"),
        (["no-such-command"], ""),
    ],
)
def test_the_version_and_the_list_of_commands_are_told_without_torch(
    paper_torch: dict[str, str], arguments: list[str], says: str
) -> None:
    command = [sys.executable, "-c", ASKS, *arguments]
    done = subprocess.run(command, env=paper_torch, capture_output=True, text=True, timeout=30)
    assert says in done.stdout + done.stderr
    assert done.stdout.endswith("False\n"), "torch is not among the modules"


def test_the_list_says_of_every_command_what_the_command_says_of_itself() -> None:
    for name, said in HELP.items():
        command = command_named(name)
        assert command.name == name
        assert " ".join((command.help or "").split()).startswith(said)


def test_a_command_behind_two_dashes_is_that_command() -> None:
    """What stands for it in the list does nothing."""
    result = CliRunner().invoke(app, ["--", "inspect", "/no/such/file.gguf"])
    assert isinstance(result.exception, RekindleError), result.output


def test_the_garbage_collector_rests_while_a_command_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import gc\nprint(gc.isenabled(), flush=True)\nraise SystemExit\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(SOURCE)))}
    command = [sys.executable, "-m", "rekindle.cli", "serve"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    assert done.stdout == "False\n", done.stderr


def test_what_a_command_imports_is_exempt_from_collection_in_a_process_of_its_own() -> None:
    frozen = gc.get_freeze_count()
    command_named("cache")
    assert gc.get_freeze_count() == frozen, "this process has others to think of"
    gc.disable()
    try:
        command_named("cache")
        assert gc.isenabled()
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
        gc.enable()


def test_ctrl_c_while_torch_loads_ends_it_without_a_word(paper_torch: dict[str, str]) -> None:
    command = [sys.executable, "-m", "rekindle.cli", "plan"]
    with subprocess.Popen(command, env=paper_torch, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ended:
        assert ended.stdout is not None
        assert ended.stderr is not None
        assert ended.stdout.readline() == "loading\n"
        ended.send_signal(signal.SIGINT)
        assert ended.wait(30) == 130
        assert ended.stderr.read() == ""

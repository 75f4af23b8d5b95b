"""What a command line does before torch is there, which takes seconds to load."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rekindle

SOURCE = Path(rekindle.__file__).parents[1]


@pytest.fixture
def paper_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which to import torch takes a minute, and says so."""
    (tmp_path / "torch.py").write_text("import time\nprint('loading', flush=True)\ntime.sleep(60)\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(SOURCE)))}


def test_the_version_is_said_without_torch(paper_torch: dict[str, str]) -> None:
    command = [sys.executable, "-m", "rekindle.cli", "--version"]
    done = subprocess.run(command, env=paper_torch, capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"rekindle {rekindle.__version__}\n", "")


def test_ctrl_c_while_torch_loads_ends_it_without_a_word(paper_torch: dict[str, str]) -> None:
    command = [sys.executable, "-m", "rekindle.cli", "plan"]
    with subprocess.Popen(command, env=paper_torch, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as ended:
        assert ended.stdout is not None
        assert ended.stderr is not None
        assert ended.stdout.readline() == "loading\n"
        ended.send_signal(signal.SIGINT)
        assert ended.wait(30) == 130
        assert ended.stderr.read() == ""

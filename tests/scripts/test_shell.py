"""scripts/serve, check and test with their setup.sh, over a .venv whose programs only say how they were called."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest
from support.scripts import SCRIPTS

ROOT = SCRIPTS.parent


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Scripts and requirements, and a .venv that is up to date for both scripts."""
    shutil.copytree(SCRIPTS, tmp_path / "scripts")
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    programs = tmp_path / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("python", "rekindle", "ruff", "mypy"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (programs / name).chmod(0o755)
    for name, files in {"serve": ("serve.txt",), "test": ("serve.txt", "test.txt")}.items():
        pins = [tmp_path / "requirements" / file for file in (*files, "model.txt")] + [tmp_path / "pyproject.toml"]
        digest = hashlib.sha256(b"".join(path.read_bytes() for path in pins)).hexdigest()
        (tmp_path / ".venv" / f".rekindle-{name}").write_text(digest)
    return tmp_path


def lines_of(clone: Path, script: str, *arguments: str) -> list[str]:
    command = ["bash", str(clone / "scripts" / script), *arguments]
    done = subprocess.run(command, cwd=clone.parent, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_serve_hands_its_arguments_to_rekindle(clone: Path) -> None:
    assert lines_of(clone, "serve", "--port", "1234") == ["rekindle serve --port 1234"]


def test_check_is_style_and_types(clone: Path) -> None:
    assert lines_of(clone, "check") == ["ruff check .", "ruff format --check .", "mypy"]


def test_test_checks_style_and_types_before_it_runs_the_tests(clone: Path) -> None:
    said = lines_of(clone, "test", "-k", "one")
    assert [line.split()[0] for line in said] == ["ruff", "ruff", "mypy", "python"]
    assert said[-1].startswith("python -m pytest") and said[-1].endswith("-k one")


def test_setup_installs_again_when_the_pins_change(clone: Path) -> None:
    (clone / "requirements" / "serve.txt").write_text("torch==0\n")
    said = lines_of(clone, "serve")
    assert any(line.startswith("python -m pip install") and line.endswith("torch==0") for line in said)
    assert lines_of(clone, "serve") == ["rekindle serve"], "and only once"

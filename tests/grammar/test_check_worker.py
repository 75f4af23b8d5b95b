"""The process that reads grammars first has what the server has, and nothing of its keys."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rekindle.workers import Workers

SCRIPT = """
import json, os, sys
sys.stdin.readline()
try:
    import only_here
    found = only_here.NAME
except ImportError as error:
    found = str(error)
print(json.dumps({"found": found, "keys": [name for name in os.environ if "KEY" in name]}), flush=True)
"""


def test_packages_that_the_server_finds_are_found_there_and_keys_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages may lie in a folder that only PYTHONPATH names, here by a relative path."""
    script, packages = tmp_path / "script.py", tmp_path / "packages"
    packages.mkdir()
    (packages / "only_here.py").write_text("NAME = 'found'")
    script.write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, "packages"])
    monkeypatch.setenv("REKINDLE_API_KEY", "secret")
    assert Workers(script).ask(json.dumps({}).encode()) == {"found": "found", "keys": []}

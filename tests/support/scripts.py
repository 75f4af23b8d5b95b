"""Scripts, started as people start them."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from support.forked import run_forked

SCRIPTS = Path(__file__).parents[2] / "scripts"


def run_script(
    name: str, *arguments: str | Path, paths: tuple[Path, ...] = (), misses_goal: bool = False, **environment: str
) -> list[str]:
    """The lines that it printed. It must end well; a bench that judges itself may miss its goal where that is said.

    `paths` come first in PYTHONPATH.
    """
    env = os.environ | environment
    env["PYTHONPATH"] = os.pathsep.join([*map(str, paths), env.get("PYTHONPATH", "")])
    done = run_forked([str(SCRIPTS / name), *map(str, arguments)], env, timeout=600)
    assert done.returncode in ((0, 1) if misses_goal else (0,)), done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 0 or done.stdout, done.stderr  # it missed no goal, it gave up
    return done.stdout.splitlines()


def load_script(name: str) -> ModuleType:
    """The script as a module, without what it does when it is started."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, SCRIPTS / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result_of(name: str, *arguments: str | Path, **environment: Any) -> dict[str, Any]:
    """Its last line, which is JSON."""
    return dict(json.loads(run_script(name, *arguments, **environment)[-1]))

"""Scripts, started as people start them."""

from __future__ import annotations

import json
import os
from pathlib import Path
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
    return done.stdout.splitlines()


def result_of(name: str, *arguments: str | Path, **environment: Any) -> dict[str, Any]:
    """Its last line, which is JSON."""
    return dict(json.loads(run_script(name, *arguments, **environment)[-1]))

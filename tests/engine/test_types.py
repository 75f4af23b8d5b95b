"""The types of the engine's interface."""

from __future__ import annotations

import subprocess
import sys


def test_the_engines_types_load_no_torch() -> None:
    check = "import sys, rekindle.engine.types; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0

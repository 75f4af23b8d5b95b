"""What must be decided before a kernel is imported, and what processes that tests start inherit.

Kernels run in Triton's interpreter. `--gpu` runs them compiled, on this machine's GPU; only tests marked gpu know how.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
SWITCH = "REKINDLE_TESTS_ON_GPU"

if "--gpu" in sys.argv:
    os.environ[SWITCH] = "1"  # the processes of xdist have other arguments
ON_GPU = SWITCH in os.environ
if ON_GPU:
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's deterministic mode asks for it
else:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton decides when kernels are imported
# Kernels, measurements and snapshots of tests: not in the user's own folder, and found again by the next run.
os.environ["XDG_CACHE_HOME"] = str(TESTS.parent / ".pytest_cache" / "user")
# Such processes find what pytest finds by `pythonpath` in pyproject.toml
PATHS = [str(TESTS), str(TESTS.parent / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]
os.environ["PYTHONPATH"] = os.pathsep.join(PATHS)

"""Files that llama.cpp's tools wrote, where REKINDLE_GOLDEN names their folder; elsewhere there are no such tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

collect_ignore_glob = [] if "REKINDLE_GOLDEN" in os.environ else ["test_*.py"]


@pytest.fixture(scope="session")
def outside() -> Path:
    return Path(os.environ["REKINDLE_GOLDEN"])

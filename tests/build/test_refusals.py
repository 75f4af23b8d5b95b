"""What cannot be is said in one line, before anything is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from rekindle.build import build_engine
from rekindle.cli.serve import _listen
from rekindle.config import Config
from rekindle.errors import BadConfig


def test_a_port_that_no_machine_has_is_refused() -> None:
    with pytest.raises(BadConfig, match="--port 99999: a port is a number up to 65535"):
        _listen("127.0.0.1", 99999)


def test_a_cache_folder_that_cannot_be_made_is_refused_before_the_model_is_opened(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a folder")
    with pytest.raises(BadConfig, match=r"--cache-dir .*notes.txt is no folder and cannot be made"):
        build_engine(Config(model=tmp_path / "absent.gguf", cache_dir=file))

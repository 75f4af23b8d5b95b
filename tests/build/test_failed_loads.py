"""A load that fails late leaves nothing behind, so that the next one finds what the first did."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rekindle.build import Preset, TextOptions, make_sources
from rekindle.config import Config
from rekindle.errors import BadModelFile

CONFIG = Config(devices=("cpu",), context=512, sequences=2, threads=1, ram=128 << 20, cache_ram=32 << 20)


def our_threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.daemon}


@pytest.mark.parametrize(
    "place",
    [
        "rekindle.prefix.cache.PrefixCache.__init__",
        "rekindle.build.engine.FileWatcher",
        "rekindle.build.source.card_of",
    ],
)
def test_a_load_that_fails_late_leaves_no_thread_and_no_lock(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    config = replace(CONFIG, model=golden / "tiny-qwen35-Q4_K_M.gguf", cache_dir=tmp_path)
    (source,) = make_sources([Preset(config)], TextOptions())
    before = our_threads()

    def fail(*_: Any, **__: Any) -> None:
        raise BadModelFile("changed while it was loaded")

    with monkeypatch.context() as patch:
        patch.setattr(place, fail)
        with pytest.raises(BadModelFile, match="changed while"):
            source.load([])
    assert our_threads() == before
    served = source.load([])
    served.engine.stop()
    assert "read-only" not in caplog.text, "the folder's lock was given back"

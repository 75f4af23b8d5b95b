"""A model's text is read while its weights are loaded, and is there when the model is."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rekindle.build import Preset, TextOptions, make_sources, open_model
from rekindle.build import engine as building
from rekindle.build import model as opening
from rekindle.config import Config
from rekindle.errors import BadModelFile
from rekindle.grammar import compiler
from rekindle.weights import gguf_file

PATIENCE = 60  # seconds


@pytest.fixture
def config(golden: Path) -> Config:
    file = golden / "tiny-qwen35-Q4_K_M.gguf"
    return Config(model=file, devices=("cpu",), context=512, sequences=2, threads=1, ram=128 << 20, cache_ram=32 << 20)


def test_weights_are_loaded_while_the_text_is_read(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, read, load = threading.Event(), opening._tokenizer_of, building.load_stage

    def read_late(*given: Any) -> Any:
        assert loaded.wait(PATIENCE), "the weights wait for the text"
        return read(*given)

    def load_and_say(*given: Any) -> Any:
        stage = load(*given)
        loaded.set()
        return stage

    monkeypatch.setattr(opening, "_tokenizer_of", read_late)
    monkeypatch.setattr(building, "load_stage", load_and_say)
    built = building.build_engine(config)
    built.stop()
    assert built.model.tokenizer.vocab_size == built.model.spec.vocab


def test_a_model_is_identified_before_its_text_takes_the_interpreter(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, identify, read = list[str](), gguf_file.fingerprint, opening._tokenizer_of

    def note_identity(*given: Any) -> str:
        order.append("identity")
        return identify(*given)

    def note_text(*given: Any) -> Any:
        order.append("text")
        return read(*given)

    monkeypatch.setattr(gguf_file, "fingerprint", note_identity)
    monkeypatch.setattr(opening, "_tokenizer_of", note_text)
    building.build_engine(config).stop()
    assert order == ["identity", "text"]


def test_a_model_is_served_when_its_table_for_grammars_is_made(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    make, made = compiler.LLTokenizer, list[Any]()

    def make_slowly(*given: Any, **more: Any) -> Any:
        time.sleep(1)
        made.append(make(*given, **more))
        return made[-1]

    monkeypatch.setattr(compiler, "LLTokenizer", make_slowly)
    (source,) = make_sources([Preset(config)], TextOptions())
    served = source.load([])
    at_once = len(made)
    served.engine.stop()
    assert at_once == 1, "the library would keep the interpreter from the first request"
    assert not {thread.name for thread in threading.enumerate()} & {"text", "grammar-table"}


def test_a_text_that_cannot_be_read_ends_the_load_before_all_weights_are_there(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise BadModelFile("no such vocabulary")

    def load_for_minutes(file: Any, config: Any, on_progress: Any, *_: Any) -> None:
        for done in range(10 * PATIENCE):
            on_progress(done, 10 * PATIENCE)
            time.sleep(0.1)
        pytest.fail("all weights were loaded")

    monkeypatch.setattr(opening, "_tokenizer_of", refuse)
    monkeypatch.setattr(building, "load_stage", load_for_minutes)
    with pytest.raises(BadModelFile, match="no such vocabulary"):
        building.build_engine(config)
    with pytest.raises(BadModelFile, match="no such vocabulary"):
        open_model(config.model)


def test_whether_a_model_fits_beside_another_needs_no_text(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = make_sources([Preset(config, "one"), Preset(config, "two")], TextOptions())
    served = first.load([])
    monkeypatch.setattr(opening, "_tokenizer_of", lambda *_: pytest.fail("the text is read"))
    monkeypatch.setattr(opening.Model, "read_ahead", lambda *_: pytest.fail("the text is read"))
    try:
        second.fits_beside([first])
    finally:
        served.engine.stop()

"""Somebody changes the model's file under a running server."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rekindle.bench.conversations import prose

SERVE = ("--context", "2048", "--sequences", "2", "--threads", "1")


def zero(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))


def cut(path: Path) -> None:
    os.truncate(path, 100_000)


def replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(bytes(path.stat().st_size))
    other.replace(path)


@pytest.fixture
def model(golden: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(golden / "tiny-qwen35-Q4_K_M.gguf", tmp_path / "model.gguf"))


def say(server: Any, word: str) -> Any:
    body = {"messages": [{"role": "user", "content": prose(80, word)}], "max_tokens": 8, "temperature": 0}
    answer = server.post("/v1/chat/completions", body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    return answer.json()


def ask(server: Any, word: str) -> list[int]:
    tokens: list[int] = say(server, word)["choices"][0]["token_ids"]
    return tokens


def log_of(server: Any) -> str:
    """Without the breaks of a narrow terminal."""
    return "".join("".join(server.output).split())


def wait_until_said(server: Any, words: str) -> None:
    until = time.monotonic() + 60
    while words.replace(" ", "") not in log_of(server):
        assert time.monotonic() < until, "".join(server.output)
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("change", "said"),
    [(zero, "was written to after it was opened"), (cut, "bytes when it was opened"), (replace, "was replaced")],
)
def test_a_server_whose_model_file_changes_answers_as_before_and_saves_nothing_more(
    change: Callable[[Path], None], said: str, start_server: Any, model: Path, golden: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    server = start_server(model, *SERVE, "--cache-dir", cache)
    truth = {word: ask(server, word) for word in ("before", "meanwhile", "after")}
    server.stop()
    shutil.rmtree(cache)
    server = start_server(model, *SERVE, "--cache-dir", cache)
    assert ask(server, "before") == truth["before"]
    change(model)
    assert ask(server, "meanwhile") == truth["meanwhile"]
    wait_until_said(server, said)
    after = say(server, "after")
    assert after["choices"][0]["token_ids"] == truth["after"]
    assert after["rekindle"]["published"] == 0
    server.stop()
    server.finish_reading()
    assert log_of(server).count("arestartisneeded") == 1
    # With the right file again, whatever was saved gives the right answers.
    shutil.copy(golden / "tiny-qwen35-Q4_K_M.gguf", model)
    server = start_server(model, *SERVE, "--cache-dir", cache)
    assert {word: ask(server, word) for word in truth} == truth
    server.stop()

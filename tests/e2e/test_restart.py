"""A server that is stopped or killed goes on where it was: from disk, with the answers of one that never stopped."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import soak_kill
from typer.testing import CliRunner

from rekindle.bench.conversations import prose
from rekindle.cli.commands import app
from rekindle.kernels.native import SWITCH
from rekindle.snapshots.tools import verify_snapshots

SERVE = ("--context", "2048", "--sequences", "4", "--threads", "1")


@pytest.fixture(scope="module")
def model(golden: Path) -> Path:
    return golden / "tiny-qwen35moe-Q4_K_M.gguf"


def ask(server: Any, messages: list[dict[str, str]]) -> Any:
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def talk(server: Any, messages: list[dict[str, str]], turns: range) -> list[Any]:
    """Some turns of the one conversation of these tests; `messages` grows."""
    answers = []
    for turn in turns:
        messages.append({"role": "user", "content": prose(40, f"turn {turn}")})
        answers.append(ask(server, messages))
        messages.append({"role": "assistant", "content": answers[-1]["choices"][0]["message"]["content"]})
    return answers


def opening() -> list[dict[str, str]]:
    return [{"role": "system", "content": prose(80, "system")}]


@pytest.fixture(scope="module")
def never_stopped(start_server: Any, model: Path) -> list[list[int]]:
    """The answers, as tokens, of a server that lives through the whole conversation."""
    server = start_server(model, *SERVE)
    answers = talk(server, opening(), range(4))
    server.stop()
    return [answer["choices"][0]["token_ids"] for answer in answers]


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_after_a_restart_the_next_turn_is_restored_from_disk_and_answered_alike(
    end: str, start_server: Any, model: Path, never_stopped: list[list[int]], tmp_path: Path
) -> None:
    messages = opening()
    server = start_server(model, *SERVE, "--cache-dir", tmp_path)
    before = talk(server, messages, range(2))
    if end == "stop":
        server.stop()
    else:
        wait_for_saves(server, 2)
        load = [threading.Thread(target=keep_asking, args=(server.url,), daemon=True) for _ in range(2)]
        for thread in load:
            thread.start()
        server.kill()
    assert all(finding.fault is None for finding in verify_snapshots(tmp_path))
    server = start_server(model, *SERVE, "--cache-dir", tmp_path)
    after = talk(server, messages, range(2, 4))
    server.stop()
    tokens = [answer["choices"][0]["token_ids"] for answer in before + after]
    assert tokens == never_stopped
    first = after[0]
    assert first["rekindle"]["restored"]["disk"] > 0
    assert first["rekindle"]["restored"]["ram"] == first["rekindle"]["restored"]["device"] == 0
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == first["rekindle"]["restored"]["disk"]
    if end == "stop":
        # All that was known is known again: only the new turn, and a few tokens of its frame, are computed.
        assert first["rekindle"]["restored"]["disk"] >= before[-1]["usage"]["prompt_tokens"] - 4
    assert sum(after[1]["rekindle"]["restored"].values()) > 0 == after[1]["rekindle"]["restored"]["disk"]


def wait_for_saves(server: Any, count: int) -> None:
    for _ in range(2000):
        saved = [
            line for line in server.get("/metrics").text.splitlines() if line.startswith("rekindle_cache_saves_total ")
        ]
        if float(saved[0].split()[-1]) >= count:
            return
    pytest.fail(f"{count} snapshots were not saved: {saved}")


def keep_asking(url: str) -> None:
    """Load, until the server is gone."""
    for i in range(1000):
        body = {"messages": [{"role": "user", "content": prose(60, f"load {i}")}], "max_tokens": 30}
        try:
            httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
        except httpx.HTTPError:
            return


def test_one_line_in_the_log_tells_what_became_of_each_request(start_server: Any, golden: Path, tmp_path: Path) -> None:
    server = start_server(golden / "tiny-qwen35-Q4_K_M.gguf", *SERVE, "--audit", "1")
    answer = talk(server, opening(), range(2))[1]
    server.stop()
    server.process.wait(60)
    log = " ".join("".join(server.output).split())
    restored = answer["rekindle"]["restored"]
    assert log.count("prompt tokens, restored") == 2
    where = f"{restored['device']} from device, {restored['ram']} from RAM and 0 from disk"
    assert f"restored {where}, computed {answer['rekindle']['computed']}," in log


def test_random_kills_under_load_leave_no_wrong_answer_and_no_unreadable_store(golden: Path) -> None:
    tally = soak_kill.soak(golden / "tiny-qwen35-Q4_K_M.gguf", kills=3, seed=1, patience=1.0)
    assert (tally.kills, tally.wrong, tally.unreadable) == (3, 0, 0), json.dumps(vars(tally))
    assert tally.answers > 0


def test_a_server_that_is_told_nothing_keeps_snapshots_in_the_user_s_folder_and_the_commands_find_them(
    start_server: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path), SWITCH: "off"}  # no kernels to compile anew
    server = start_server(model, *SERVE, environment=environment)
    (answer,) = talk(server, opening(), range(1))
    server.stop()
    server.finish_reading()
    assert "of RAM and" in (said := " ".join("".join(server.output).split())) and "of disk; one takes" in said
    assert answer["rekindle"]["published"] > 0 and "not_published" not in answer["rekindle"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    listed = CliRunner().invoke(app, ["cache", "list", "--json"])
    assert answer["rekindle"]["published"] in {each["position"] for each in json.loads(listed.stdout)}
    assert CliRunner().invoke(app, ["cache", "verify"]).exit_code == 0

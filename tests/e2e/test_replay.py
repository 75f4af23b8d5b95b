"""`rekindle replay` as a user runs it, and `rekindle cache` on what it leaves: no prompt token is computed twice."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from rekindle.bench.replay import (
    Row,
    Seen,
    Sizes,
    Total,
    edited,
    growing,
    own_session,
    prose,
    read_session,
    subagents,
    thinking,
    without_thinking,
)
from rekindle.cli import app
from rekindle.cli.replay import _show, _summary
from rekindle.errors import BadConfig, RekindleError


def rekindle(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from rekindle.cli import main; main()", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def test_the_tables_fit_a_line_of_80(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row("a" * 12, 99, True, 999_999, 999_999, 999_999, 999_999, 999_999, 999_999.0, None)
    _show(row)
    Console(width=80).print(_summary([Total("a" * 12, True, 1.01, [row] * 9, 9_999_999)]))
    said = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in said.splitlines()) <= 80
    assert "…" not in said
    for cell in ("999,999 ms", "8,999,991", "1.000", "1.01", "1.111"):
        assert cell in said


def test_computed_tokens_are_those_never_seen_before_also_across_restarts(golden: Path) -> None:
    done = rekindle(
        "replay",
        "--model",
        golden / "tiny-qwen35-Q4_K_M.gguf",
        "--turns",
        "6",
        "--scale",
        "0.5",
        "--serve",
        "--threads 1",
        "--check",
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    conversations = json.loads(done.stdout.splitlines()[-1])["conversations"]
    assert [c["conversation"] for c in conversations] == 2 * ["growing", "thinking", "subagents", "edited", "recorded"]
    for conversation in conversations:
        assert conversation["ratio"] <= conversation["goal"]
        assert conversation["disk"] > 0 or not conversation["restart"]
        for turn in conversation["turns"]:
            assert turn["ram"] + turn["disk"] + turn["computed"] == turn["sent"]
    after = [turn for c in conversations for turn in c["turns"] if turn["restarted"]]
    assert len(after) == 5
    assert all(turn["disk"] > 0 for turn in after)


def test_a_running_server_is_replayed_without_restarts_and_its_cache_can_be_kept(
    start_server: Any, golden: Path, tmp_path: Path
) -> None:
    model, folder, file, other = (
        golden / "tiny-qwen35-Q4_K_M.gguf",
        tmp_path / "a",
        tmp_path / "chain.tar",
        tmp_path / "b",
    )
    server = start_server(model, "--threads", "1", "--cache-dir", folder)
    done = rekindle("replay", server.url, "--only", "growing", "--turns", "5", "--scale", "0.3")
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout.splitlines()[-1])["conversations"]) == 1
    server.stop()
    listed = json.loads(cache("list", folder, "--json"))
    assert len(listed) >= 8
    longest = max(listed, key=lambda info: info["position"])
    shown = json.loads(cache("show", folder, longest["id"][:20], "--json"))
    assert shown["position"] == longest["position"]
    assert f"{len(listed)} snapshots" in cache("list", folder)
    assert f"{len(listed)} snapshots, 0 faulty" in cache("verify", folder)
    cache("export", folder, longest["id"], file)
    cache("import", other, file)
    assert longest["id"] in {info["id"] for info in json.loads(cache("list", other, "--json"))}
    assert "0 B left" in cache("prune", folder, "--size", "0")
    victim = next(other.glob("*/objects/*"))
    victim.write_bytes(b"x" + victim.read_bytes()[1:])
    assert "has been altered" in cache("verify", other, status=1)
    with pytest.raises(BadConfig, match="there is no folder"):
        cache("list", tmp_path / "nowhere")


def cache(*arguments: str | Path, status: int = 0) -> str:
    """What `rekindle cache …` prints."""
    done = CliRunner().invoke(app, ["cache", *map(str, arguments)])
    if isinstance(done.exception, RekindleError):
        raise done.exception
    assert done.exit_code == status, done.output
    return done.output


# -- the pieces -----------------------------------------------------------------------------------------------------

SMALL = Sizes(system=20, turn=10, turns=6, answer=4)


def requests_of(script: Any, answers: str = "<think>hm</think>well") -> list[list[dict[str, Any]]]:
    script = script(SMALL, "seed")
    sent = [list(next(script))]
    while True:
        try:
            sent.append(list(script.send(answers)))
        except StopIteration:
            return sent


def test_a_position_is_seen_if_the_same_prefix_was_sent_or_generated() -> None:
    seen = Seen()
    assert seen.length([1, 2, 3]) == 0
    seen.add([1, 2, 3, 9])
    seen.add([1, 2, 5])
    assert seen.length([1, 2, 3, 4]) == 3
    assert seen.length([1, 2, 5, 6]) == 3
    assert seen.length([1, 2, 3, 9]) == 4
    assert seen.length([2, 3]) == 0
    assert seen.length([1]) == 1


def test_growing_conversations_only_append() -> None:
    sent = requests_of(growing)
    assert len(sent) == 6
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(sent))


def test_thinking_is_not_sent_back() -> None:
    assert all("<think>" not in message["content"] for message in requests_of(thinking)[-1])
    assert without_thinking("<think>a b</think>\n\nc") == "c"
    assert without_thinking("12345678") == "78"


def test_subagents_share_the_system_prompt_and_nothing_else() -> None:
    sent = requests_of(subagents)
    assert all(messages[0] == sent[0][0] for messages in sent)
    assert sent[3][: len(sent[0])] == sent[0]
    assert sent[0][1] != sent[1][1] != sent[2][1]


def test_an_early_message_is_edited_late() -> None:
    before, after = requests_of(edited)[3:5]
    assert before[:3] == after[:3]
    assert before[3] != after[3]
    assert before[4:] == after[4 : len(before)]


def test_prose_is_the_same_for_the_same_seed() -> None:
    assert prose(50, "a") == prose(50, "a") != prose(50, "b")


def test_a_session_is_read_as_it_was_sent_and_a_bad_line_is_named(tmp_path: Path) -> None:
    requests = read_session(own_session())
    assert len(requests) == 8
    assert requests[0][0]["role"] == "system"
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": [{"role": "user", "content": "x"}]}\n{"prompt": 1}\n')
    with pytest.raises(BadConfig, match=r"bad.jsonl line 2"):
        read_session(bad)

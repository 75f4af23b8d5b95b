"""`rekindle replay` as a user runs it, and `rekindle cache` on what it leaves: no prompt token is computed twice."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.forked import run_rekindle
from typer.testing import CliRunner

from rekindle.bench.conversations import (
    ConversationSizes,
    branching,
    edited,
    growing,
    prose,
    raw,
    stamped,
    subagents,
    thinking,
)
from rekindle.bench.recorded import AGENTS, OWN, read_session, recorded, session_file
from rekindle.bench.replay import ReplayRow, Seen, Total
from rekindle.cli.commands import app
from rekindle.cli.replay import _Printer, _summary
from rekindle.errors import BadConfig, RekindleError
from rekindle.prompt import common_length


def test_the_tables_fit_a_line_of_80(capsys: pytest.CaptureFixture[str]) -> None:
    tiers = dict.fromkeys(("device", "ram", "disk"), 999_999)
    row = ReplayRow("a" * 12, 99, True, 999_999, tiers, 999_999, 999_999, 999_999.0, None)
    _Printer().show(row)
    Console(width=80).print(_summary([Total("a" * 12, True, 1.01, [row] * 9, 9_999_999)]))
    said = capsys.readouterr().out
    assert max(len(line.rstrip()) for line in said.splitlines()) <= 80
    assert "…" not in said
    for cell in ("999,999 ms", "8,999,991", "1.000", "1.01", "1.111"):
        assert cell in said


def test_computed_tokens_are_those_never_seen_before_also_across_restarts(golden: Path) -> None:
    names = ["growing", "thinking", "subagents", "edited", "recorded"]  # those that branch take longer prompts
    done = run_rekindle(
        "replay",
        "--model",
        golden / "tiny-qwen35-Q4_K_M.gguf",
        "--turns",
        "5",
        "--serve",
        "--threads 1",
        "--check",
        *(f"--only={name}" for name in names),
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    conversations = json.loads(done.stdout.splitlines()[-1])["conversations"]
    assert [c["conversation"] for c in conversations] == 2 * names
    for conversation in conversations:
        assert conversation["ratio"] <= conversation["goal"]
        assert conversation["restored"]["disk"] > 0 or not conversation["restart"]
        for turn in conversation["turns"]:
            assert sum(turn["restored"].values()) + turn["computed"] == turn["sent"]
    after = [turn for c in conversations for turn in c["turns"] if turn["restarted"]]
    assert len(after) == len(names)
    assert all(turn["restored"]["disk"] > 0 for turn in after)


def test_recorded_agents_cost_what_is_new_in_their_own_dialects_also_across_restarts(golden: Path) -> None:
    """Nothing is prepared in the background, which would hide what is computed twice."""
    model = golden / "tiny-qwen35-Q4_K_M.gguf"
    only = [f"--only={name}" for name in AGENTS]
    options = ("--serve", "--threads 1 --no-prepare-next", "--check")
    done = run_rekindle("replay", "--model", model, *options, *only, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    conversations = json.loads(done.stdout.splitlines()[-1])["conversations"]
    assert [c["conversation"] for c in conversations] == 2 * list(AGENTS)
    for conversation in conversations:
        assert conversation["ratio"] <= conversation["goal"] == 1.05
        assert all(sum(turn["restored"].values()) > 0 for turn in conversation["turns"][2:])
    assert all(c["restored"]["disk"] > 0 for c in conversations if c["restart"])


def test_a_running_server_is_replayed_without_restarts_and_its_cache_can_be_kept(
    start_server: Any, golden: Path, tmp_path: Path
) -> None:
    model, folder, file, other = (
        golden / "tiny-qwen35-Q4_K_M.gguf",
        tmp_path / "a",
        tmp_path / "chain.tar",
        tmp_path / "b",
    )
    server = start_server(model, "--threads", "1", "--grid", "64", "--cache-dir", folder)
    some = ("--only", "growing", "--only", "raw", "--turns", "5", "--scale", "0.5")
    done = run_rekindle("replay", server.url, *some, "--check", timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    appended, parted = json.loads(done.stdout.splitlines()[-1])["conversations"]
    assert appended["ratio"] <= appended["goal"] and 1 < parted["ratio"] <= parted["goal"] == 1.15
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


def cache(command: str, folder: Path, *arguments: str | Path, status: int = 0) -> str:
    """What `rekindle cache …` prints."""
    done = CliRunner().invoke(app, ["cache", command, "--cache-dir", str(folder), *map(str, arguments)])
    if isinstance(done.exception, RekindleError):
        raise done.exception
    assert done.exit_code == status, done.output
    return done.output


# -- the pieces -----------------------------------------------------------------------------------------------------

SMALL = ConversationSizes(system=20, turn=10, turns=6, answer=4, document=40)


ANSWER = {"role": "assistant", "content": "well", "reasoning_content": "hm"}


def requests_of(script: Any, answers: dict[str, Any] = ANSWER) -> list[list[dict[str, Any]]]:
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
    assert ANSWER in requests_of(growing)[-1]
    assert ANSWER not in requests_of(thinking)[-1]
    assert {"role": "assistant", "content": "well"} in requests_of(thinking)[-1]


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


def test_three_prompts_part_in_the_middle_of_one_message_or_of_a_raw_text() -> None:
    for texts in (
        [messages[0]["content"] for messages in requests_of(branching)],
        [messages[0]["content"] for messages in requests_of(stamped)],
        list(raw(SMALL, "seed")),
    ):
        shared = min(common_length(list(one), list(other)) for one, other in pairwise(texts))
        assert len(set(texts)) == 3
        assert 0.3 * len(texts[0]) < shared < len(texts[0]), "not at the beginning, not at the end"


def test_prose_is_the_same_for_the_same_seed() -> None:
    assert prose(50, "a") == prose(50, "a") != prose(50, "b")


def test_a_session_is_read_as_it_was_sent_and_a_bad_line_is_named(tmp_path: Path) -> None:
    requests = read_session(session_file(OWN))
    assert len(requests) == 8
    assert requests[0].body["messages"][0]["role"] == "system"
    bad_lines = (
        '{"prompt": 1}',
        '{"path": "/nowhere", "body": {}}',
        '{"path": "/v1/messages", "body": {"messages": [1]}}',
        '{"path": "/v1/responses", "as_before": true, "body": {"input": [1]}}',
    )
    for line in bad_lines:
        bad = tmp_path / "bad.jsonl"
        bad.write_text('{"messages": [{"role": "user", "content": "x"}]}\n' + line)
        with pytest.raises(BadConfig, match=r"bad.jsonl line 2"):
            read_session(bad)


def test_a_line_of_a_session_says_what_is_other_than_in_the_line_before(tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    first = {"path": "/v1/messages", "body": {"system": "s", "messages": [{"role": "user", "content": "a"}]}}
    then = {"path": "/v1/messages", "as_before": True, "body": {"messages": [1, {"role": "system", "content": "b"}]}}
    file.write_text("\n".join(map(json.dumps, (first, then))))
    second = read_session(file)[1]
    assert second.body == {"system": "s", "messages": [*first["body"]["messages"], {"role": "system", "content": "b"}]}


def texts_of(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def test_recorded_agents_have_the_habits_that_cost_a_prefix() -> None:
    claude, codex, opencode = (read_session(session_file(name)) for name in AGENTS.values())
    assert {posted.path for posted in (*claude, *codex, *opencode)} == {
        "/v1/messages", "/v1/responses", "/v1/chat/completions"
    }  # fmt: skip
    last = claude[-1].body["messages"]
    late = [texts_of(message) for message in last[2:] if message["role"] == "system"]
    assert any("<total_tokens>" in text for text in late), "a counter, after tool results"
    assert any("2026-11-18" in text for text in late), "the date changes amid the conversation"
    assert "x-anthropic-billing-header" in texts_of(claude[0].body["system"])
    assert "<system-reminder>" in texts_of(last)
    assert len({texts_of(posted.body["messages"][1]) for posted in claude}) > 1, "marks come and go"
    assert any(item.get("encrypted_content") for item in codex[-1].body["input"])
    assert {tool["type"] for tool in codex[0].body["tools"]} > {"function"}, "tools that only a hosted service runs"
    assert opencode[0].body.get("tools") is None, "a title is asked for first"
    systems = {texts_of(posted.body["messages"][0]) for posted in opencode[1:]}
    assert len(systems) == 2, "the date changes in the system prompt"


@pytest.mark.parametrize("name", [OWN, *AGENTS.values()])
def test_a_replay_of_a_session_begins_as_no_other_replay_does(name: str) -> None:
    posted = read_session(session_file(name))
    one, other = (list(recorded(posted)(SMALL, seed)) for seed in ("one", "other"))
    for mine, theirs in zip(one, other, strict=True):
        assert not isinstance(mine, str | list) and not isinstance(theirs, str | list)
        changed = {field for field in mine.body if mine.body[field] != theirs.body[field]}
        assert changed - {"tools"} and ("tools" in changed) == bool(mine.body.get("tools"))
        assert texts_of(mine.body).replace("[one]", "[other]") == texts_of(theirs.body)

"""`rekindle bench serve` as a user runs it, against a real server, and its arithmetic."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from support.forked import run_rekindle
from support.server import Server, StartServer
from support.wire import read_message

from rekindle.bench.client import LoadClient, ServedAnswer
from rekindle.bench.load import Load, rows_of, run_load, share_below
from rekindle.cli.bench import load_table
from rekindle.cli.tables import show_table
from rekindle.errors import BadConfig


@pytest.fixture(scope="module")
def server(start_server: StartServer, golden: Path) -> Server:
    return start_server(golden / "tiny-qwen35-Q4_K_M.gguf", "--context", "2048", "--sequences", "4")


def bench(url: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return run_rekindle("bench", "serve", url, "--vocab", "300", *arguments, timeout=300)


def rows(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    assert done.returncode == 0, done.stdout + done.stderr
    return {row["what"]: row for row in json.loads(done.stdout.splitlines()[-1])["rows"]}


def restored(row: dict[str, Any]) -> dict[str, int]:
    """By tier, where something was."""
    return {tier: tokens for tier, tokens in row["restored"].items() if tokens}


def test_every_prompt_length_is_told_by_itself_and_what_is_sent_again_is_restored(server: Server) -> None:
    found = rows(bench(server.url, "--prompt", 8, "--prompt", 130, "--requests", 2, "--answer", 5, "--again", 1))
    assert list(found) == ["prompt 8", "prompt 130", "prompt 8 again", "prompt 130 again"]
    for length in (8, 130):
        cold, again = found[f"prompt {length}"], found[f"prompt {length} again"]
        assert (cold["sent"], cold["computed"], restored(cold)) == (2 * length, 2 * length, {})
        assert (again["sent"], again["computed"], restored(again)) == (2 * length, 0, {"ram": 2 * length})
        assert cold["answered"] == again["answered"] == 10
        assert 0 < cold["first_p50"] <= cold["first_worst"] <= cold["last_first"]
        assert 0 <= cold["gap_p50"] <= cold["gap_p99"] <= cold["gap_worst"]  # tokens may arrive together


def test_a_conversation_goes_on_from_the_answer_that_came(server: Server) -> None:
    found = rows(bench(server.url, "--prompt", 100, "--requests", 1, "--answer", 6, "--turns", 3, "--turn", 20))
    second, third = found["turn 2 on 100"], found["turn 3 on 100"]
    assert (second["sent"], third["sent"]) == (126, 152)
    known = [{"device": 105}, {"device": 131}]
    assert [restored(second), restored(third)] == known, "all but the last token, which no forward has consumed"


def test_messages_are_sent_with_all_that_was_said(server: Server) -> None:
    words = ("--prompt", 100, "--prefix", 40, "--requests", 1, "--answer", 6, "--turns", 3, "--turn", 20)
    found = rows(bench(server.url, "--chat", *words, "--again", 1))
    first, second, third = (found[name] for name in ("prompt 100", "turn 2 on 100", "turn 3 on 100"))
    assert 100 <= first["sent"] < second["sent"] - 20 < third["sent"] - 40
    for before, after in ((first, second), (second, third)):
        assert sum(after["restored"].values()) > 0.9 * before["sent"]
    assert all(sum(row["restored"].values()) + row["computed"] == row["sent"] for row in found.values())
    assert [found[f"{name} again"]["computed"] for name in ("prompt 100", "turn 2 on 100", "turn 3 on 100")] == [0] * 3
    assert first["answered"] == 6  # which may all have come at once, so that they have no speed


def test_prompts_share_their_beginning_and_come_at_a_rate(server: Server) -> None:
    # This seed and rate leave 1.1 and 0.2 s between them: what the first has computed is published before the third.
    options = ("--prompt", 200, "--prefix", 128, "--requests", 3, "--rate", 2, "--answer", 2, "--seed", 0)
    (row,) = rows(bench(server.url, *options)).values()
    assert row["requests"] == 3
    found = sum(row["restored"].values())
    assert 128 <= found <= 2 * 130, "the second may come before anybody knows that the beginning is shared"
    assert row["computed"] == 3 * 200 - found


def test_an_intruder_comes_in_amid_the_answers_of_others(server: Server) -> None:
    found = rows(
        bench(server.url, "--prompt", 20, "--concurrency", 2, "--requests", 2, "--answer", 60, "--intruder", 900)
    )
    assert found["intruder 900"]["computed"] == 900
    assert found["prompt 20"]["requests"] == 2
    beside = found["beside intruder 900"]
    assert (beside["sent"], beside["computed"]) == (0, 0)
    assert 0 < beside["answered"] < found["prompt 20"]["answered"] == 120


def test_the_same_seed_sends_the_same_prompts_and_another_does_not(server: Server) -> None:
    for seed, known in ((7, 0), (7, 70), (8, 0)):
        (row,) = rows(bench(server.url, "--prompt", 70, "--requests", 1, "--seed", seed)).values()
        assert sum(row["restored"].values()) == known


def test_a_refused_request_is_told_with_its_reason_and_a_status(server: Server) -> None:
    done = bench(server.url, "--prompt", 4000, "--requests", 1)
    assert done.returncode == 1
    assert "1 of 1 failed: status 400" in done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert row["failed"] == 1
    assert {row[name] for name in ("first_p50", "gap_worst", "last_first", "decode")} == {None}, "no time was taken"


def test_a_server_that_hangs_up_and_one_that_is_not_there_are_failures() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def hang_up() -> None:
        connection, _ = listener.accept()
        read_message(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n4\r\ndata")
        connection.close()

    thread = threading.Thread(target=hang_up)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    load = Load(prompts=(4,), requests=1)
    (answer,) = asyncio.run(run_load(LoadClient(url), load))
    assert answer.failure is not None
    thread.join()
    listener.close()
    (answer,) = asyncio.run(run_load(LoadClient(url), load))
    assert answer.failure is not None


def test_a_peer_without_token_ids_and_without_our_report_is_measured_by_its_own_words() -> None:
    events = [
        {"choices": [{"text": "a"}]},
        {"choices": [{"text": "b"}]},
        {
            "choices": [],
            "usage": {
                "prompt_tokens": 4,
                "completion_tokens": 2,
                "prompt_tokens_details": {"cached_tokens": 3},
            },
        },
    ]
    body = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events) + b"data: [DONE]\n\n"
    listener = socket.create_server(("127.0.0.1", 0))

    def answer_once() -> None:
        connection, _ = listener.accept()
        read_message(connection)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        connection.close()

    thread = threading.Thread(target=answer_once)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    (row,) = rows_of(asyncio.run(run_load(LoadClient(url, token_ids=False), Load(prompts=(4,), requests=1))))
    thread.join()
    listener.close()
    assert (row.failed, row.answered, row.restored, row.computed) == (0, 2, {"cache": 3}, 1)


ANSWER = b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("answers", "connections"),
    [
        pytest.param(["whole", "whole", "whole"], 1, id="it is kept"),
        pytest.param(["last", "last", "last"], 3, id="the server says that it was the last"),
        pytest.param(["idle", "idle", "whole"], 3, id="the server ends it as it is used again"),
    ],
)
def test_requests_one_behind_the_other_use_one_connection_as_long_as_it_is_open(
    answers: list[str], connections: int
) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    accepted = list[socket.socket]()

    def answer_all() -> None:
        left = list(answers)
        while left:
            connection, _ = listener.accept()
            accepted.append(connection)
            while left and read_message(connection):
                how = left.pop(0)
                over = b"connection: close\r\n" if how == "last" else b""
                connection.sendall(b"HTTP/1.1 200 OK\r\n%scontent-length: %d\r\n\r\n" % (over, len(ANSWER)) + ANSWER)
                if how == "last":
                    break
                if how == "idle":
                    read_message(connection)  # the next request, which gets no answer
                    break
            connection.close()

    thread = threading.Thread(target=answer_all)
    thread.start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    served = asyncio.run(run_load(LoadClient(url), Load(prompts=(4,), requests=len(answers))))
    thread.join()
    listener.close()
    assert [answer.failure for answer in served] == [None] * len(answers)
    assert [answer.tokens for answer in served] == [1] * len(answers)
    assert len(accepted) == connections


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompts": (100, 64), "prefix": 65}, "--prefix is 65, a --prompt of 64 cannot begin with so many"),
        ({"vocab": 2000, "lowest": 2000}, "--lowest is 2000, it must be less than --vocab, 2000"),
    ],
)
def test_a_load_that_cannot_be_is_refused_by_the_option_that_was_given(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(BadConfig, match=re.escape(message)):
        Load(**{"prompts": (100,), **wrong})


def test_shares_are_counted_from_below() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [share_below(values, share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert share_below([7.0], 0.5) == 7.0
    assert share_below([], 0.5) == 0.0


def test_throughput_is_of_answers_and_that_of_prompts_has_a_name_of_its_own() -> None:
    several = [ServedAnswer("x", 1_000, sent=float(i), arrivals=[i + 1.0, i + 3.0], tokens=20) for i in range(2)]
    (row,) = rows_of(several)
    assert row.as_dict()["output_tokens_per_second"] == 10.0, "40 tokens in the 4 seconds from first to last"
    assert row.as_dict()["prompt_tokens_per_second"] == 500.0


def test_gaps_and_first_tokens_are_taken_from_the_arrivals() -> None:
    answers = [ServedAnswer("x", 10, sent=1.0, arrivals=[1.5, 1.6, 2.0], tokens=3), ServedAnswer("x", 10, failure="no")]
    (row,) = rows_of(answers)
    assert (row.requests, row.failed, row.failure) == (2, 1, "no")
    assert row.first_p50 == row.last_first == pytest.approx(500)
    assert (row.gap_p50, row.gap_worst) == (pytest.approx(100), pytest.approx(400))
    assert row.decode == pytest.approx(4.0)


@pytest.mark.parametrize("columns", [100, 40])
def test_the_table_fits_a_line_of_100_and_no_figure_is_cut_where_there_is_less(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    answers = [
        ServedAnswer("turn 10 on 131072", 140_000, 0, [9.9, 19.8], tokens=2, restored={"ram": 131_072}, computed=9_000)
        for _ in range(9)
    ]
    show_table(load_table(rows_of(answers)))
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 100
    assert said.count("9,900.0…9,900.0") == 2
    assert "1,179,648" in said


def test_a_table_has_no_figures_of_what_never_came(capsys: pytest.CaptureFixture[str]) -> None:
    failed = ServedAnswer("prompt 9", 9, 0, failure="no")
    other = ServedAnswer("prompt 8", 8, 0, [1.0, 2.0, 3.0, 4.0], tokens=4)
    show_table(load_table(rows_of([failed, other, ServedAnswer("intruder 5", 5, 1.5, [3.5], tokens=1)])))
    lines = {line[:18].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert lines["prompt 9"].split()[2:] == ["0", *["–"] * 8]
    assert lines["beside intruder 5"].split()[3:] == ["1", "–", "–", "1,000.0…1,000.0", "1,000.0", "1", "1", "–", "–"]


@pytest.mark.parametrize(
    "options",
    [
        {"requests": 0},
        {"rate": 0.0},
        {"prompts": (0,)},
        {"vocab": 1, "lowest": 1},
        {"vocab": 0},
        {"again": -1},
        {"turns": 0},
    ],
)
def test_a_load_that_makes_no_sense_is_refused_by_the_name_of_its_option(options: dict[str, Any]) -> None:
    with pytest.raises(BadConfig, match="--"):
        Load(**options)


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(BadConfig, match="no address"):
        LoadClient("ftp://host")


@pytest.mark.parametrize(
    ("sent", "failure"),
    [
        (b'{"error": "boom"}', "boom"),
        (b'{"error": {"message": "no"}}', "no"),
        (b"{oops", "no event of an OpenAI-style stream: {oops"),
        (b'{"choices": null}', "the answer has no tokens"),
        (b'{"choices": [{"text": 5}]}', "no event of an OpenAI-style stream"),
        (b'{"a":' + b"[" * 200_000, "no event of an OpenAI-style stream"),
        (b'{"choices": [{"text": "a"}], "usage": {"completion_tokens": "2"}}', "no event of an OpenAI-style stream"),
        (b'{"choices": [{"text": "a"}], "rekindle": {"restored": null}}', "no event of an OpenAI-style stream"),
        (b'{"choices": [{"text": "a", "token_ids": "abc"}]}', "no event of an OpenAI-style stream"),
        (b'{"choices": [{"text": "a"}], "error": null, "usage": {"prompt_tokens": null}}', None),
    ],
)
def test_an_odd_event_fails_its_own_request_with_what_it_was(sent: bytes, failure: str | None) -> None:
    async def asked() -> ServedAnswer:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"}")
            body = b"data: " + sent + b"\n\n"
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            client = LoadClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
            found = await client.ask("odd", client.question([1, 2], 2))
            client.close()
            return found

    found = asyncio.run(asked())
    assert found.prompt == 2
    assert found.failure is None if failure is None else failure in str(found.failure)

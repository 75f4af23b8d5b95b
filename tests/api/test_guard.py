"""No body, header or habit of a client hurts another: each gets an answer or a 4xx, soon and in little memory."""

from __future__ import annotations

import json
import socket
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import openai
import pytest
from support.wire import read_message

from rekindle.api import Guard
from rekindle.api.bodies import SMALL
from rekindle.api.connections import IDLE_SECONDS
from rekindle.api.dialects.openai_chat import ChatBody
from rekindle.api.dialects.openai_completions import CompletionBody
from rekindle.api.keys import ApiKeys, Client
from rekindle.api.limits import Meters
from rekindle.api.parsing import MAX_BRACKETS, MAX_MESSAGES, parse
from rekindle.errors import BadConfig, BadRequest
from rekindle.text.parsing.jsonish import mend_surrogates

JSON = {"content-type": "application/json"}
BIG = (2**31, 2**32, 2**63, 2**64, 10**30)


def post(house: Any, body: bytes | dict[str, Any], path: str = "/v1/completions", **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(house.url + path, content=content, headers={**JSON, **headers}, timeout=20)


def refusal(response: httpx.Response, status: int) -> str:
    assert response.status_code == status, response.text[:300]
    return str(response.json()["error"]["message"])


# Numbers


@pytest.mark.parametrize("number", BIG)
@pytest.mark.parametrize(
    "field", ["top_k", "max_tokens", "best_of", "n", "logprobs", "prompt_logprobs", "stop_token_ids", "prompt"]
)
def test_no_number_is_larger_than_a_tensor_takes(house, field, number):
    value = [number] if field in ("stop_token_ids", "prompt") else number
    assert field in refusal(post(house, {"prompt": "x", field: value}), 400)


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "top_logprobs", "top_k"])
def test_no_number_of_a_chat_is_larger_than_a_tensor_takes(house, field):
    body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, field: 2**63}
    assert field in refusal(post(house, body, "/v1/chat/completions"), 400)


def test_lists_that_every_step_would_walk_are_bounded(house):
    assert "logit_bias" in refusal(post(house, {"prompt": "x", "logit_bias": dict.fromkeys(range(1025), 1)}), 400)
    assert "stop_token_ids" in refusal(post(house, {"prompt": "x", "stop_token_ids": [1] * 1025}), 400)


# JSON


@pytest.mark.parametrize("depth", [65, 480, 100_000])
@pytest.mark.parametrize("field", ["messages", "tools", "chat_template_kwargs", "made_up"])
def test_deep_json_is_refused_in_a_sentence_or_ignored(house, field, depth, caplog):
    deep = b'{"a":' * depth + b"1" + b"}" * depth
    body = b'{"messages": [{"role": "user", "content": "say(x)"}], "%s": [%s]}' % (field.encode(), deep)
    response = post(house, body, "/v1/chat/completions")
    assert response.status_code == (200 if field == "made_up" and depth < 1000 else 400), response.text[:300]
    assert len(response.content) < 2000
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"prompt": "say(x)", "\\ud800": 1}', 200),
        (b'{"prompt": "say(x)", "a\\udfffb": 1}', 200),
        (b'{"prompt": "say(x)", "logit_bias": {"\\ud800": 1}}', 400),
        (b'{"prompt": "say(x)", "\xed\xa0\x80": 1}', 400),  # a surrogate in UTF-8, which UTF-8 forbids
        (b'{"prompt": "say(\\ud800)"}', 200),
        (b'{"prompt": "say(\\\\ud800)"}', 200),  # a backslash and letters, no surrogate
        (b'{"prompt": {"\\ud800": 1}}', 400),
        (b'{"": 1}', 400),
    ],
)
def test_half_a_surrogate_pair_anywhere_is_mended_or_refused(house, body, status):
    response = post(house, body)
    assert response.status_code == status, response.text[:300]
    response.json()


def test_a_backslash_before_letters_is_not_taken_for_half_a_pair(house):
    answer = post(house, b'{"prompt": "say(a\\\\ud800b)"}').json()
    assert answer["choices"][0]["text"] == "a\\ud800b"


def test_a_panic_of_the_tokenizer_is_an_answer_like_any_other(house):
    assert "internal error" in refusal(post(house, {"prompt": "[panic]"}), 500), (
        "one that the text package lets through"
    )
    assert post(house, {"prompt": "say(on)"}).json()["choices"][0]["text"] == "on"


def test_what_nobody_asked_for_costs_no_memory():
    body = b'{"prompt": "x", "junk": [' + b",".join([b"[]"] * 1_000_000) + b"]}"
    tracemalloc.start()
    assert parse(CompletionBody, body).ignored_fields == ["junk"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * len(body), "a million lists would take twenty times the body"


def test_a_field_of_brackets_is_refused_before_it_is_parsed():
    many = b",".join([b"[]"] * (MAX_BRACKETS // 2))
    body = b'{"messages": [' + many + b'], "tools": [' + many + b"]}"
    with pytest.raises(BadRequest, match="brackets"):
        parse(ChatBody, body)


@pytest.mark.parametrize("field", ["messages", "tools", "stop", "stop_token_ids", "logit_bias"])
def test_a_field_of_many_entries_is_refused_before_the_schema_lists_what_is_wrong_with_each(field):
    entries = "{" + ",".join(f'"{i}": 0' for i in range(MAX_MESSAGES + 1)) + "}"
    value = entries if field == "logit_bias" else json.dumps([0] * (MAX_MESSAGES + 1))
    with pytest.raises(BadRequest, match=f"{field}: has 10001 entries"):
        parse(ChatBody, f'{{"messages": [], "{field}": {value}}}'.encode())


def test_numbers_without_end_are_refused_before_they_are_parsed():
    body = b'{"messages": [{"role": "user", "content": "x", "junk": [' + b"0," * 1_600_000 + b"0]}]}"
    with pytest.raises(BadRequest, match="commas"):
        parse(ChatBody, body)
    with pytest.raises(BadRequest, match="prompt: has"):
        parse(CompletionBody, b'{"prompt": [' + b"0," * 2_200_000 + b"0]}")
    assert parse(CompletionBody, b'{"prompt": "' + b"a, " * 2_200_000 + b'"}').prompt, "a text may have commas"


def test_options_of_the_template_are_small(house):
    body = {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"x": "y" * 70_000}}
    assert "chat_template_kwargs" in refusal(post(house, body, "/v1/chat/completions"), 400)


@pytest.mark.parametrize(
    ("given", "mended"),
    [
        (rb"\ud83d\ude42", rb"\ud83d\ude42"),
        (rb"\ud83d", rb"\ufffd"),
        (rb"\ude42\ud83d", rb"\ufffd\ufffd"),
        (rb"\\ud83d", rb"\\ud83d"),
        (rb"\\\ud83d", rb"\\\ufffd"),
        (rb"\\\\ud83d\uD800x", rb"\\\\ud83d\ufffdx"),
        (rb"\n\ud83d\n\ud83d\ude42", rb"\n\ufffd\n\ud83d\ude42"),
    ],
)
def test_only_halves_of_pairs_are_mended(given, mended):
    assert mend_surrogates(given) == mended


# Hosts, origins, types


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example"]
)
@pytest.mark.parametrize("path", ["/", "/health", "/v1/models"])
def test_a_name_that_was_bound_anew_to_our_address_gets_nothing(house, host, path):
    assert "host" in refusal(httpx.get(house.url + path, headers={"Host": host}), 403)


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:99",
        "127.0.0.1",
        "[::1]:8080",
        "192.168.1.7",
        "localhost.",
        "a.localhost",
        "mybox:8080",
        "host.docker.internal",
    ],
)
def test_addresses_and_localhost_are_ourselves(house, host):
    assert httpx.get(house.url + "/v1/models", headers={"Host": host}).status_code == 200


def test_a_host_that_is_named_is_let_in(fresh_house):
    house = fresh_house(hosts=("AI.Example",))
    assert httpx.get(house.url + "/health", headers={"Host": "ai.example:443"}).status_code == 200
    assert httpx.get(fresh_house(hosts=("*",)).url + "/health", headers={"Host": "any"}).status_code == 200


def test_of_two_hosts_or_origins_neither_is_believed(house):
    for name in ("Host", "Origin"):
        headers = [
            ("Host", "localhost"),
            (name, house.url if name == "Origin" else "localhost"),
            (name, "evil.example"),
        ]
        with socket.create_connection(("127.0.0.1", house.port), timeout=20) as connection:
            lines = [f"{key}: {value}" for key, value in (headers if name == "Origin" else headers[1:])]
            connection.sendall("\r\n".join(["GET /v1/models HTTP/1.1", *lines, "", ""]).encode())
            assert read_message(connection).first_line.split()[1] in (b"403", b"400")


def test_a_health_check_of_http_1_0_needs_no_host(house):
    with socket.create_connection(("127.0.0.1", house.port), timeout=20) as connection:
        connection.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert b" 200 " in read_message(connection).first_line


@pytest.mark.parametrize(
    "origin", ["evil://localhost", "https://evil.example", "null", "http://localhost:1", "http://127.0.0.1"]
)
def test_a_page_of_another_origin_drives_nothing(house, origin):
    before = len(house.engine.requests)
    assert "origin" in refusal(post(house, {"prompt": "x"}, Origin=origin), 403).lower() or origin in "null"
    assert len(house.engine.requests) == before


def test_our_own_page_and_the_origins_that_are_named_may_ask(house, fresh_house):
    assert post(house, {"prompt": "say(x)"}, Origin=house.url).status_code == 200
    other = fresh_house(origins=("https://chat.example",))
    assert post(other, {"prompt": "say(x)"}, Origin="https://chat.example").status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_a_body_that_a_form_could_send_is_refused(house, kind):
    before = len(house.engine.requests)
    assert "application/json" in refusal(post(house, {"prompt": "x"}, **{"content-type": kind}), 415)
    assert len(house.engine.requests) == before


def test_json_may_say_its_charset(house):
    assert post(house, {"prompt": "say(x)"}, **{"content-type": "Application/JSON; charset=utf-8"}).status_code == 200


# Sizes, times, numbers of connections


def begin(house: Any, length: int, sent: bytes = b"", **headers: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", house.port), timeout=20)
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", *(f"{k}: {v}" for k, v in {**JSON, **headers}.items())]
    connection.sendall("\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode() + sent)
    return connection


LARGE = 1 << 20


def unfinished(house: Any, count: int, **headers: str) -> list[socket.socket]:
    """Bodies that lack their last byte, all of which the server has read when this returns."""
    made = [begin(house, LARGE, b"x" * (LARGE - 1), **headers) for _ in range(count)]
    for _ in range(500):
        probe = post(house, b'{"prompt": "say(x)' + b"x" * (2 * SMALL) + b'"}', **headers)
        if probe.status_code == 503:
            return made
    pytest.fail("the budget was not filled")


def test_bodies_that_never_end_fill_their_budget_and_small_ones_pass_beside_them(fresh_house):
    house = fresh_house(max_body=LARGE, bodies=1)
    slow = unfinished(house, 1)
    refused = post(house, b'{"prompt": "' + b"x" * (2 * SMALL) + b'"}')
    assert "at once" in refusal(refused, 503)
    assert refused.headers["retry-after"]
    assert post(house, {"prompt": "say(x)"}).status_code == 200
    for connection in slow:
        connection.close()
    for _ in range(500):
        if post(house, b'{"prompt": "say(x)' + b"x" * (2 * SMALL) + b'"}').status_code != 503:
            return
    pytest.fail("what the gone clients held was not given back")


def test_a_body_whose_model_is_being_loaded_leaves_the_budget_to_others(fresh_house, late_model):
    house = fresh_house(max_body=LARGE, bodies=1, others=[late_model])
    half = "x" * (LARGE // 2 + SMALL)
    with ThreadPoolExecutor(1) as clients:
        waits = clients.submit(post, house, {"prompt": half, "model": "late"})
        for _ in range(5000):
            if "rekindle_model_line 1.0" in httpx.get(house.url + "/metrics").text:
                break
        beside = post(house, {"prompt": half, "model": "paper-9b"})
        late_model.may_load.set()
    for answer in (beside, waits.result()):
        assert "maximum context length" in refusal(answer, 400), "it was read, parsed and rendered"


def test_slow_bodies_of_one_key_leave_room_for_another(fresh_house, tmp_path):
    house = fresh_house(max_body=LARGE, bodies=4, keys=ApiKeys.read(keys_file(tmp_path, TWO)))
    bob, alice = ({"Authorization": f"Bearer {name}'s long secret"} for name in ("bob", "alice"))
    slow = unfinished(house, 2, **bob)
    body = b'{"prompt": "say(x)", "suffix": "' + b"x" * (2 * SMALL) + b'"}'
    assert "bob's are being read" in refusal(post(house, body, **bob), 503)
    assert post(house, body, **alice).status_code == 400, "read whole, and refused for its suffix"
    for connection in slow:
        connection.close()


def test_a_body_that_does_not_come_is_not_waited_for(fresh_house):
    house = fresh_house(body_seconds=0.2)
    assert b" 408 " in read_message(begin(house, 1000, b"{")).first_line


def test_a_body_that_says_it_is_far_too_long_is_not_read(fresh_house):
    house = fresh_house(max_body=1000)
    assert b" 413 " in read_message(begin(house, 10**12)).first_line


def test_headers_that_do_not_come_are_not_waited_for(fresh_house):
    house = fresh_house(header_seconds=0.2)
    # (uvicorn's own clock for idle connections stands at a minute here)
    for sent in (b"", b"GET / HTTP/1.1\r\nHost: loc", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea"):
        connection = socket.create_connection(("127.0.0.1", house.port), timeout=20)
        connection.sendall(sent)
        got = b""
        while True:
            try:
                data = connection.recv(65536)
            except ConnectionResetError:
                break
            if not data:
                break
            got += data
        assert got == b"" or got.startswith(b"HTTP/1.1 200"), "closed, after the answers that were asked for"


def test_an_answer_under_way_outlasts_the_time_for_headers(fresh_house):
    house = fresh_house(header_seconds=0.2, heartbeat_seconds=0.1)
    with httpx.stream(
        "POST", house.url + "/v1/completions", json={"prompt": "[drip]say(abcdef)", "stream": True}, timeout=20
    ) as response:
        waits = 0
        for line in response.iter_lines():
            waits += line.startswith(": waiting")
            if waits == 5:  # half a second after the headers
                return
    pytest.fail("the stream was cut")


def test_clients_give_up_an_idle_connection_before_the_server_does():
    kept = [httpx.Limits(), openai.DEFAULT_CONNECTION_LIMITS, anthropic.DEFAULT_CONNECTION_LIMITS]
    assert all(limits.keepalive_expiry < IDLE_SECONDS for limits in kept)


def test_connections_beyond_the_bound_are_told_so_and_closed(fresh_house):
    house = fresh_house(connections=3)
    held = [socket.create_connection(("127.0.0.1", house.port), timeout=20) for _ in range(3)]
    held[2].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert b" 200 " in read_message(held[2]).first_line, "all three are in"
    extra = socket.create_connection(("127.0.0.1", house.port), timeout=20)
    assert b" 503 " in read_message(extra).first_line
    for connection in held:
        connection.close()
    for _ in range(200):
        if httpx.get(house.url + "/health").status_code == 200:
            return
    pytest.fail("places of closed connections were not given back")


def test_a_client_that_never_reads_loses_its_place(fresh_house):
    house = fresh_house(connections=1, unread_seconds=0.3)
    silent = socket.socket()
    silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    silent.connect(("127.0.0.1", house.port))
    silent.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        if httpx.get(house.url + "/health").status_code == 200:
            return
    pytest.fail("the connection was kept")


def test_a_connection_serves_on_when_a_request_was_refused_before_its_body_came(house):
    body = json.dumps({"prompt": "hi", "max_tokens": 1}).encode()
    head = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", house.port), timeout=20) as connection:
        connection.sendall(head.format("/v1/embeddings", len(body)).encode())
        assert b"makes no embeddings" in read_message(connection).body
        connection.sendall(body)
        connection.sendall(head.format("/v1/completions", len(body)).encode() + body)
        assert b" 200 " in read_message(connection).first_line


def test_nobody_reads_the_rest_of_a_body_that_was_answered(fresh_house):
    house = fresh_house(keys=ApiKeys.single("a key"))
    connection = socket.create_connection(("127.0.0.1", house.port), timeout=20)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    connection.sendall(head.encode() + b"1\r\nx\r\n" * 1000)
    assert b" 401 " in read_message(connection).first_line
    until = time.monotonic() + 15
    while time.monotonic() < until:
        try:
            connection.sendall(b"1\r\nx\r\n" * 1000)
        except OSError:
            return
    pytest.fail("what nobody wants was read on")


def test_a_body_in_small_chunks_arrives_whole(house):
    body = json.dumps({"prompt": "say(whole)"}).encode()
    content = iter([body[i : i + 1] for i in range(len(body))])
    answer = httpx.post(house.url + "/v1/completions", content=content, headers=JSON, timeout=20)
    assert answer.json()["choices"][0]["text"] == "whole"
    framed = b"".join(b"1\r\n" + body[i : i + 1] + b"\r\n" for i in range(len(body))) + b"0\r\n\r\n"
    padded = b" " * 5000  # blanks before the object, so that the body takes several slices
    blanks = b"".join(b"1\r\n" + padded[i : i + 1] + b"\r\n" for i in range(len(padded)))
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection(("127.0.0.1", house.port), timeout=20)
    connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + blanks + framed)
    assert b" 200 " in read_message(connection).first_line


# Keys


def keys_file(tmp_path: Any, text: str) -> Any:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    path.chmod(0o600)
    return path


TWO = """
[alice]
key = "alice's long secret"
concurrent = 1
requests_per_minute = 3

[bob]
key = "bob's long secret"
namespace = "team"
tokens_per_minute = 40
"""


def test_each_key_has_its_name_space_and_the_engine_is_told(fresh_house, tmp_path):
    house = fresh_house(keys=ApiKeys.read(keys_file(tmp_path, TWO)))
    chat = {"messages": [{"role": "user", "content": "[dropped] say(x)"}]}
    for secret, namespace in (("alice's long secret", "alice"), ("bob's long secret", "team")):
        house.text.namespaces.clear()
        response = post(house, chat, "/v1/chat/completions", Authorization=f"Bearer {secret}")
        assert response.status_code == 200
        assert house.engine.requests[-1].namespace == namespace
        assert set(house.text.namespaces) == {namespace}
    assert post(house, {"prompt": "x"}, Authorization="Bearer mallory's").status_code == 401


def test_a_client_that_has_used_its_requests_is_told_when_to_come_again(fresh_house, tmp_path):
    house = fresh_house(keys=ApiKeys.read(keys_file(tmp_path, TWO)))
    alice = {"Authorization": "Bearer alice's long secret"}
    assert [post(house, {"prompt": "say(x)"}, **alice).status_code for _ in range(4)] == [200, 200, 200, 429]
    refused = post(house, {"prompt": "say(x)"}, **alice)
    assert 0 < int(refused.headers["retry-after"]) <= 20
    assert post(house, {"prompt": "say(x)"}, Authorization="Bearer bob's long secret").status_code == 200


def test_a_client_that_has_used_its_tokens_waits_while_others_do_not(fresh_house, tmp_path):
    house = fresh_house(keys=ApiKeys.read(keys_file(tmp_path, TWO)))
    bob = {"Authorization": "Bearer bob's long secret"}
    assert post(house, {"prompt": "say(" + "x" * 60 + ")"}, **bob).status_code == 200
    assert "40 tokens a minute" in refusal(post(house, {"prompt": "say(x)"}, **bob), 429)
    assert post(house, {"prompt": "say(x)"}, Authorization="Bearer alice's long secret").status_code == 200


def test_a_client_has_no_more_requests_under_way_than_its_key_allows(fresh_house, tmp_path):
    house = fresh_house(keys=ApiKeys.read(keys_file(tmp_path, TWO)))
    alice = {"Authorization": "Bearer alice's long secret"}
    body = {"prompt": "[drip]say(abcdef)", "stream": True}
    with httpx.stream("POST", house.url + "/v1/completions", json=body, headers=alice, timeout=20) as response:
        lines = response.iter_lines()
        next(lines)
        assert "under way" in refusal(post(house, {"prompt": "say(x)"}, **alice), 429)
    for _ in range(200):
        if post(house, {"prompt": "say(x)"}, **alice).status_code == 200:
            return
    pytest.fail("the place of a client that left was not given back")


def test_each_answer_counts_and_not_each_request(fresh_house, tmp_path):
    house = fresh_house(keys=ApiKeys.read(keys_file(tmp_path, TWO)))
    alice = {"Authorization": "Bearer alice's long secret"}
    assert "its limit is 1" in refusal(post(house, {"prompt": "say(x)", "n": 2}, **alice), 429)
    assert "its limit is 1" in refusal(post(house, {"prompt": ["a", "b"]}, **alice), 429)
    assert house.engine.requests == []


def test_counts_of_all_clients_are_for_the_keys_that_may_see_them(fresh_house, tmp_path):
    house = fresh_house(keys=ApiKeys.read(keys_file(tmp_path, TWO + "metrics = true\n")))
    asked = [
        httpx.get(house.url + "/metrics", headers={"x-api-key": f"{name}'s long secret"}).status_code
        for name in ("alice", "bob", "mallory")
    ]
    assert asked == [403, 200, 401]


def test_how_much_was_known_is_told_to_a_client_alone_in_its_name_space(fresh_house, tmp_path):
    shared = TWO.replace('namespace = "team"', 'namespace = "alice"')
    for text, told in ((TWO, True), (shared, False)):
        house = fresh_house(keys=ApiKeys.read(keys_file(tmp_path, text)))
        answer = post(house, {"prompt": "say(x)"}, Authorization="Bearer alice's long secret").json()["rekindle"]
        assert (answer["divergence"] is not None) == told
        assert ("the prompt leaves what was seen" in answer["miss"]) == told


def test_why_a_server_is_not_ready_names_no_file(fresh_house):
    house = fresh_house()
    status = replace(house.engine.status(), degraded="/home/me/secret.gguf was written to")
    house.engine.status = lambda: status
    answer = httpx.get(house.url + "/ready")
    assert answer.status_code == 503 and "secret" not in answer.text and "file was changed" in answer.text
    assert httpx.get(house.url + "/health").status_code == 200


@pytest.mark.parametrize("host", ["*.lan", "box:8080", "http://box", "a b", "[::1"])
def test_a_host_that_could_never_match_is_refused_at_the_start(host):
    with pytest.raises(BadConfig, match="allow-host"):
        Guard(hosts=(host,))


@pytest.mark.parametrize("origin", ["chat.example.org", "https://chat.example.org/", "ftp://x", "https://*.org"])
def test_an_origin_that_could_never_match_is_refused_at_the_start(origin):
    with pytest.raises(BadConfig, match="allow-origin"):
        Guard(origins=(origin,))


def test_a_bucket_refills_evenly_and_never_overflows():
    now = 0.0
    meter = Meters(clock=lambda: now).of(Client("a", "a", requests_per_minute=6))

    def asks() -> bool:
        try:
            with meter.visit():
                return True
        except Exception:
            return False

    assert [asks() for _ in range(7)] == [True] * 6 + [False]
    now = 10.0
    assert [asks() for _ in range(2)] == [True, False]
    now = 10_000.0
    assert [asks() for _ in range(7)] == [True] * 6 + [False]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "names no key"),
        ("[a\n", "line"),
        ("[a]\nkey = 5", "str"),
        ("[a]\nkey = 'short'", "5 characters"),
        ("[a]\nkey = 'long enough'\nquota = 3", "quota"),
        ("[a]\nkey = 'long enough'\nconcurrent = 0", "at least 1"),
        ("['a b']\nkey = 'long enough'", "a b"),
        ("[a]\nkey = 'long enough'\nnamespace = '../x'", "../x"),
        ("[a]\nkey = 'long enough'\n[b]\nkey = 'long enough'", "same key"),
        ("key = 'long enough'", "Expected `object`"),
    ],
)
def test_a_file_of_keys_that_makes_no_sense_is_refused_in_a_sentence(tmp_path, text, why):
    with pytest.raises(BadConfig, match="(?s)keys.toml.*" + why.replace(".", r"\.")):
        ApiKeys.read(keys_file(tmp_path, text))


def test_an_empty_key_is_no_key():
    with pytest.raises(BadConfig, match="empty"):
        ApiKeys.single("")


def test_a_file_of_keys_that_others_can_read_is_named(tmp_path, caplog):
    path = keys_file(tmp_path, "[a]\nkey = 'long enough'")
    path.chmod(0o644)
    ApiKeys.read(path)
    assert "chmod 600" in caplog.text

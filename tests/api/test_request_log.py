"""One line per request, with names, counts and times, and never a word of what was said."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from rekindle.api import ApiKeys
from rekindle.api.errors import fault_of, reason_of
from rekindle.api.traces import Traces, _is_installed
from rekindle.cli.logs import _JsonLines
from rekindle.errors import BadConfig, BadRequest

PATIENCE = 20.0  # seconds for what must happen
Ask = Callable[..., logging.LogRecord]
KEYS = {"authorization": "Bearer sesame-seed"}


def said(caplog: pytest.LogCaptureFixture) -> list[Any]:
    return [record for record in caplog.records if record.name.startswith("rekindle")]


@pytest.fixture
def ask(fresh_house: Any, caplog: pytest.LogCaptureFixture) -> Ask:
    house = fresh_house(keys=ApiKeys.single("sesame-seed"))

    def post(headers: dict[str, str] = KEYS, path: str = "/v1/completions", **body: Any) -> logging.LogRecord:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            httpx.post(house.url + path, json=body, headers=headers)
            until = time.monotonic() + PATIENCE
            while not (lines := said(caplog)) and time.monotonic() < until:
                time.sleep(0.001)  # the client has its answer before the server has closed the books
        (line,) = lines
        line.house = house
        return line

    return post


def test_a_finished_request_leaves_one_line_with_all_of_its_account(ask: Ask) -> None:
    line: Any = ask(prompt="say(abcd) secret", model="m", stream=True)
    (finished,) = line.house.engine.finished.values()
    told, cache = line.request, finished.cache
    assert told["path"] == "/v1/completions"
    assert (told["model"], told["status"], told["finish"]) == ("paper-9b", 200, "stop")
    assert told["prompt_tokens"] == finished.prompt_tokens
    assert (told["restored"], told["computed"]) == (dict(cache.restored_from), cache.computed)
    assert told["generated"] == finished.completion_tokens
    assert (told["draft_proposed"], told["draft_accepted"]) == (finished.draft.proposed, finished.draft.accepted)
    assert told["queue_ms"] == round(finished.timings.queued * 1000, 1)
    assert 0 <= told["first_token_ms"] <= told["total_ms"]
    text = line.getMessage()
    for part in (
        f"request {told['id'][:8]} stop: {finished.prompt_tokens} prompt tokens",
        f"restored {cache.restored_from['ram']} from RAM and {cache.restored_from['disk']} from disk",
        f"computed {cache.computed}, published {cache.published}, answered {finished.completion_tokens}",
        "/v1/completions, 200, paper-9b",
    ):
        assert part in text
    assert "secret" not in text + json.dumps(told), "nothing of the prompt"
    assert "abcd" not in text + json.dumps(told), "nothing of the answer"


@pytest.mark.parametrize(
    ("changes", "status", "path", "why"),
    [
        ({"headers": {}}, 401, "/v1/completions", "a valid key is needed"),
        ({"max_tokens": -1}, 400, "/v1/completions", "max_tokens: Input should be greater than"),
        ({"prompt": "[full]"}, 429, "/v1/completions", "7 requests are waiting, the queue holds 7"),
        ({"path": "/v1/%1b%5b31mred"}, 404, "other", "there is no such path: POST '…'"),
    ],
)
def test_a_refused_request_leaves_a_line_that_says_why(
    ask: Ask, changes: dict[str, Any], status: int, path: str, why: str
) -> None:
    line: Any = ask(**{"prompt": "x", **changes})
    assert (line.request["status"], line.request["path"], line.request["id"]) == (status, path, None)
    assert line.request["reason"].startswith(why)
    assert line.getMessage().startswith("request refused: ")
    assert line.getMessage().endswith(f"; {line.request['reason']}")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tool_choice": "secret"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tool_choice": "it's \"secret"}),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"grammar": "start: secret"}}),
        ("/api/show", {"model": "secret"}),
        ("/v1/secret", {}),
    ],
)
def test_the_reason_of_a_refusal_has_no_word_of_what_the_client_wrote(
    ask: Ask, path: str, body: dict[str, Any]
) -> None:
    line: Any = ask(path=path, **body)
    assert 400 <= line.request["status"] < 500 and line.request["reason"]
    assert "secret" not in line.getMessage() + json.dumps(line.request)


def test_words_of_a_template_or_a_library_stay_out_of_the_reason() -> None:
    error = BadRequest("the model's chat template refuses these messages: secret", "messages")
    error.__cause__ = ValueError("secr\ue000et")
    assert reason_of(error, fault_of(error)) == "the model's chat template refuses these messages"


def test_several_answers_to_one_prompt_count_its_tokens_once_as_the_usage_does(ask: Ask) -> None:
    line: Any = ask(prompt=["say(ab)", "say(cdef)"], n=2)
    first, _, second, _ = (line.house.engine.finished[request.id] for request in line.house.engine.requests)
    told = line.request
    assert told["restored"] == {
        tier: first.cache.restored_from[tier] + second.cache.restored_from[tier] for tier in ("ram", "disk")
    }
    assert told["computed"] == first.cache.computed + second.cache.computed
    assert sum(told["restored"].values()) + told["computed"] == told["prompt_tokens"]


def test_a_count_of_tokens_is_answered_and_not_refused(ask: Ask) -> None:
    line: Any = ask(path="/tokenize", content="hello")
    assert line.request["status"] == 200
    assert line.getMessage().startswith("request answered: ")


def test_an_answer_that_fails_says_so(ask: Ask) -> None:
    line: Any = ask(prompt="say(abcdef)[lost]", stream=True)
    assert (line.request["status"], line.request["finish"]) == (200, "failed")


def test_requests_for_the_page_and_the_probes_leave_no_line(house: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "rekindle"):
        for path in ("/", "/health", "/ready", "/metrics", "/v1/models"):
            httpx.get(house.url + path)
    assert not said(caplog)


def test_as_json_a_line_is_one_object_with_the_fields_beside_the_message() -> None:
    record = logging.LogRecord("rekindle.requests", logging.INFO, "", 0, "two\n%s", ("lines",), None)
    record.request = {"status": 200, "restored": {"ram": 3}}
    line = _JsonLines().format(record)
    assert "\n" not in line
    told = json.loads(line)
    assert (told["message"], told["level"], told["status"]) == ("two\nlines", "info", 200)
    assert told["restored"] == {"ram": 3}


def test_traces_need_a_url_and_the_package() -> None:
    with pytest.raises(BadConfig, match="must be a URL"):
        Traces("localhost")
    if not _is_installed():
        with pytest.raises(BadConfig, match=r"pip install 'rekindle\[otlp\]'"):
            Traces("http://localhost:4318")

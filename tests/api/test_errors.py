"""Every refusal is OpenAI-shaped and names what is wrong."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import openai
import pytest

from rekindle.api.errors import fault_of
from rekindle.errors import CpuExpertsLost

CHAT = {"messages": [{"role": "user", "content": "x"}]}
TEXT = {"prompt": "x"}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


SHARED = [
    ("model", 5),
    ("n", 0),
    ("n", 129),
    ("n", "2"),
    ("stream", "yes"),
    ("stream", 1),
    ("stream_options", True),
    ("stream_options.include_usage", {"stream_options": {"include_usage": "yes"}}),
    ("max_tokens", -1),
    ("max_tokens", 1.5),
    ("max_tokens", True),
    ("temperature", -0.1),
    ("temperature", 2.1),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_k", -2),
    ("top_k", 1.5),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", 1e-40),
    ("repetition_penalty", 0.009),
    ("repetition_penalty", 10.1),
    ("repetition_penalty", [1]),
    ("frequency_penalty", 2.5),
    ("presence_penalty", -2.5),
    ("seed", 1.5),
    ("seed", 2**64),
    ("stop", 5),
    ("stop", [""]),
    ("stop", ["a", 1]),
    ("stop", ["a"] * 17),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [260]),
    ("ignore_eos", "no"),
    ("logit_bias", [1]),
    ("logit_bias", {"word": 1}),
    ("logit_bias", {"5": 101}),
    ("logit_bias", {"260": 1}),
    ("response_format.type", {"response_format": {"type": "yaml"}}),
    ("response_format.json_schema", {"response_format": {"type": "json_schema"}}),
    ("response_format.json_schema.schema", {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}}),
    ("structured_outputs", {"structured_outputs": {}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a", "choice": ["a"]}}),
    ("structured_outputs", {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}),
    ("structured_outputs.choice", {"structured_outputs": {"choice": []}}),
    ("structured_outputs.regex", {"structured_outputs": {"regex": "(?=a)b"}}),
    ("structured_outputs.grammar", {"structured_outputs": {"grammar": 'start: "a'}}),
    ("structured_outputs.json", {"structured_outputs": {"json": {"type": "integer", "minimum": 2, "maximum": 1}}}),
    ("ignore_eos", {"structured_outputs": {"regex": "a+"}, "ignore_eos": True}),
    ("return_token_ids", 1),
]
CHAT_ONLY = [
    ("messages", []),
    ("messages", "hi"),
    ("messages", None),
    ("messages[0].role", {"messages": [{"role": "robot", "content": "x"}]}),
    ("messages[0].role", {"messages": [{"content": "x"}]}),
    ("messages[1].content", {"messages": [{"role": "user", "content": "x"}, {"role": "user"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 7}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": ["x"]}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    ("max_tokens", 0),
    ("max_completion_tokens", 0),
    ("logprobs", 3),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("tools", {}),
    ("tools[0].type", {"tools": [{"type": "magic", "function": {}}]}),
    ("tools[0].function", {"tools": [{"type": "function"}]}),
    ("tool_choice", 5),
    ("tool_choice", "sometimes"),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "g"}}),
    ("tool_choice", {"type": "function"}),
    ("enable_thinking", "yes"),
    ("add_generation_prompt", 1),
    ("continue_final_message", True),
    ("chat_template_kwargs", []),
    ("chat_template_kwargs", {"messages": []}),
]
TEXT_ONLY = [
    ("prompt", None),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", 5),
    ("prompt", [1, "a"]),
    ("prompt", [[]]),
    ("prompt", [-1]),
    ("prompt", [260]),
    ("prompt", ["x"] * 129),
    ("n", {"prompt": ["x", "y"], "n": 65}),
    ("echo", "yes"),
    ("suffix", "tail"),
    ("best_of", 2),
    ("logprobs", True),
    ("logprobs", 21),
    ("prompt_logprobs", -1),
    ("prompt_logprobs", {"prompt_logprobs": 1, "stream": True}),
    ("add_special_tokens", 1),
]


def cases(route: str, base: dict[str, Any], table: list[tuple[str, Any]]) -> list[Any]:
    """A row is a field and a bad value for it, or a field and the whole change that makes it bad."""
    made = []
    for number, (field, bad) in enumerate(table):
        root = field.partition("[")[0].partition(".")[0]
        change = bad if isinstance(bad, dict) and root in bad else {field: bad}
        made.append(pytest.param(route, {**base, **change}, field, id=f"{route[4:8]}-{number}-{field}"))
    return made


@pytest.mark.parametrize(
    ("route", "body", "field"),
    [
        *cases("/v1/chat/completions", CHAT, SHARED + CHAT_ONLY),
        *cases("/v1/completions", TEXT, SHARED + TEXT_ONLY),
    ],
)
def test_a_bad_field_is_named(house, route, body, field):
    error = error_of(httpx.post(house.url + route, json=body), 400)
    assert error["param"] == field
    assert error["type"] == "invalid_request_error"
    assert field.partition("[")[0].partition(".")[0] in error["message"]


def test_official_client_raises_its_own_errors(house):
    client = house.client()
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=CHAT["messages"], temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.RateLimitError) as busy:
        client.completions.create(model="m", prompt="[full]")
    assert busy.value.response.headers["retry-after"] == "1"
    assert busy.value.code == "queue_full"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.InternalServerError) as lost:
        client.completions.create(model="m", prompt="[lost] say(abcdef)")
    assert (lost.value.status_code, lost.value.code) == (503, "stage_lost")


@pytest.mark.parametrize("prompt", ["[long]", "x" * 30_000])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_too_long_is_refused_before_a_stream_opens(house, prompt, stream):
    response = httpx.post(house.url + "/v1/completions", json={"prompt": prompt, "stream": stream})
    assert error_of(response, 400)["code"] == "context_length_exceeded"


def test_an_unforeseen_error_is_told_by_an_id_that_the_log_explains(house, caplog):
    with caplog.at_level(logging.ERROR, logger="rekindle.api.errors"):
        error = error_of(httpx.post(house.url + "/v1/completions", json={"prompt": "[bug] say(abcdef)"}), 500)
    assert "secret" not in error["message"]
    assert error["code"] in error["message"]
    assert error["code"] in caplog.text
    assert "secret" in caplog.text


@pytest.mark.parametrize(("mark", "code"), [("[lost]", "stage_lost"), ("[ended]", "stopping"), ("[bug]", None)])
def test_an_error_in_an_open_stream_is_an_event_and_then_done(house, mark, code):
    body = {"messages": [{"role": "user", "content": f"{mark} say(abcdef)"}], "stream": True}
    response = httpx.post(house.url + "/v1/chat/completions", json=body)
    blocks = [block.removeprefix("data: ") for block in response.text.split("\n\n") if block]
    assert blocks[-1] == "[DONE]"
    error = json.loads(blocks[-2])["error"]
    assert error["type"] == "server_error"
    assert code is None or error["code"] == code
    shown = [json.loads(block)["choices"][0]["delta"].get("content", "") for block in blocks[:-2]]
    assert "".join(shown) == "abc", "what came before the error is not lost"
    assert all(json.loads(block)["choices"][0]["finish_reason"] is None for block in blocks[:-2])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"prompt": "\xff"}',
        b'{"prompt": NaN}',
        b"[" * 100_000,
        b'{"prompt": "x", "seed": 1' + b"0" * 5000 + b"}",
    ],
)
def test_malformed_json_is_refused(house, body):
    assert (
        "JSON"
        in error_of(
            httpx.post(house.url + "/v1/completions", content=body, headers={"content-type": "application/json"}), 400
        )["message"]
    )


@pytest.mark.parametrize("body", [b"[]", b"null", b'"x"', b"5"])
def test_a_body_that_is_no_object_is_refused(house, body):
    assert (
        "object"
        in error_of(
            httpx.post(house.url + "/v1/completions", content=body, headers={"content-type": "application/json"}), 400
        )["message"]
    )


def test_a_number_beyond_floats_is_refused(house):
    response = httpx.post(
        house.url + "/v1/completions",
        content=b'{"prompt": "x", "temperature": 1e999}',
        headers={"content-type": "application/json"},
    )
    assert error_of(response, 400)["param"] == "temperature"


def test_unknown_path_and_wrong_method(house):
    assert "/v2/chat" in error_of(httpx.post(house.url + "/v2/chat", json={}), 404)["message"]
    response = httpx.get(house.url + "/v1/chat/completions")
    error_of(response, 405)
    assert response.headers["allow"] == "POST"


def test_one_refused_answer_calls_the_others_back(house):
    while not house.engine.cancelled.empty():
        house.engine.cancelled.get()
    before = len(house.engine.requests)
    error_of(httpx.post(house.url + "/v1/completions", json={"prompt": ["[silent]", "[silent]", "[full]"]}), 429)
    submitted = {request.id for request in house.engine.requests[before:]}
    assert {house.engine.cancelled.get(timeout=5) for _ in range(2)} == submitted


def test_lost_cpu_experts_have_an_error_code_of_their_own() -> None:
    fault = fault_of(CpuExpertsLost("the threads did not answer; restart the server"))
    assert (fault.status, fault.code) == (503, "cpu_experts_lost")
    assert fault.message == "the threads did not answer; restart the server"

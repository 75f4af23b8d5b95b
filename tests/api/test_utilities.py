"""Routes beside the dialects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from rekindle.api import ApiKeys


def post(house: Any, path: str, **body: Any) -> httpx.Response:
    return httpx.post(house.url + path, json=body)


@pytest.mark.parametrize("field", ["content", "prompt"])
def test_text_becomes_tokens_and_text_again(house: Any, field: str) -> None:
    answer = post(house, "/tokenize", **{field: "hé", "add_special": True}).json()
    assert answer == {"tokens": list("hé".encode()), "count": 3, "max_model_len": 30_000}
    assert post(house, "/detokenize", tokens=answer["tokens"]).json() == {"content": "hé", "prompt": "hé"}


def test_an_id_without_a_token_is_refused_by_the_name_of_its_field(house: Any) -> None:
    refused = post(house, "/detokenize", tokens=[1, 999_999])
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "tokens" and error["message"].startswith("tokens: token 999999 is outside the vocabulary")


def test_pieces_and_strings_of_tokens_are_given_when_asked_for(house: Any) -> None:
    answer = post(house, "/tokenize", prompt="é", with_pieces=True, return_token_strs=True).json()
    assert answer["tokens"] == [{"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}]
    assert answer["token_strs"] == ["\ufffd", "\ufffd"]


def test_a_conversation_is_counted_as_the_model_reads_it(house: Any) -> None:
    answer = post(house, "/tokenize", messages=[{"role": "user", "content": "Hi"}]).json()
    assert bytes(answer["tokens"]) == b"user:Hi|assistant:"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": "x", "prompt": "y"}, "content"),
        ("/tokenize", {"messages": 3}, "messages"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_a_bad_field_is_named(house: Any, path: str, body: dict[str, Any], param: str) -> None:
    answer = post(house, path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"])
def test_prompts_beyond_the_context_are_counted(house: Any, path: str) -> None:
    says = {"role": "user", "content": "[vast]"}
    answer = post(house, path, **{"input" if "responses" in path else "messages": [says]})
    assert answer.status_code == 200
    told = answer.json()
    assert told.get("count", told.get("input_tokens")) == len("user:[vast]|assistant:")


def test_props_say_what_this_server_is(house: Any) -> None:
    props = httpx.get(house.url + "/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 30_000
    assert (props["total_slots"], props["model_alias"]) == (4, "paper-9b")
    assert props["chat_template"] == house.text.template_source


def test_props_are_those_of_the_model_that_is_named(fresh_house: Any, late_model: Any) -> None:
    late_model.settings = replace(late_model.settings, context=1_000, unlisted=("late-Q4_K_M",))
    house = fresh_house(others=[late_model])
    for name in ("late", "late:latest", "late-Q4_K_M.gguf"):
        props = httpx.get(house.url + "/props", params={"model": name}).json()
        assert (props["model_alias"], props["default_generation_settings"]["n_ctx"]) == ("late", 1_000)
        assert props["total_slots"] == 0, "it is not loaded"
    assert httpx.get(house.url + "/props", params={"model": "org/alias"}).json()["model_alias"] == "paper-9b"


@pytest.mark.parametrize("several", [False, True])
def test_props_of_an_unknown_model_name_those_that_there_are(fresh_house: Any, late_model: Any, several: bool) -> None:
    answer = httpx.get(fresh_house(others=[late_model] * several).url + "/props", params={"model": "other"})
    assert answer.status_code == 404
    assert "served: paper-9b, org/alias" + ", late" * several in answer.json()["error"]["message"]


def test_embeddings_are_refused_in_each_dialect(house: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="makes no embeddings") as refused:
        house.client().embeddings.create(model="m", input="x")
    assert refused.value.code == "unsupported_operation"
    for path in ("/api/embed", "/api/embeddings"):
        answer = post(house, path, model="m", input="x")
        assert answer.status_code == 400
        assert "makes no embeddings" in answer.json()["error"]


def test_pages_of_allowed_origins_may_use_every_route_and_others_none(fresh_house: Any) -> None:
    house = fresh_house(origins=("https://chat.example",), keys=ApiKeys.single("sesame-seed"))
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "content-type,authorization"}
    for path in ("/v1/responses", "/api/chat", "/api/generate", "/api/show", "/api/tags", "/tokenize", "/props"):
        allowed = httpx.options(house.url + path, headers={"origin": "https://chat.example"} | asked)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://chat.example")
        assert httpx.options(house.url + path, headers={"origin": "https://evil.example"} | asked).status_code == 400
        assert httpx.get(house.url + path).status_code == 401, f"{path} needs a key"

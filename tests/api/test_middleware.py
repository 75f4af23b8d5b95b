"""Keys, origins, sizes, and the small routes."""

from __future__ import annotations

import httpx
import openai
import pytest

from rekindle.api import ApiKeys, Guard, Settings
from rekindle.api.cards import ModelCard
from rekindle.engine.types import Sampling
from rekindle.errors import BadConfig

JSON = {"content-type": "application/json"}


def test_without_the_right_key_v1_is_closed_and_the_rest_is_open(fresh_house):
    house = fresh_house(keys=ApiKeys.single("sésame"))
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sésame".encode()}):
        response = httpx.get(house.url + "/v1/models", headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["code"] == "invalid_api_key"
    with pytest.raises(openai.AuthenticationError):
        house.client("wrong").completions.create(model="m", prompt="x")
    right = {"Authorization": "Bearer sésame".encode()}
    assert httpx.get(house.url + "/v1/models", headers=right).status_code == 200
    assert httpx.get(house.url + "/v1/models", headers={"Authorization": b"bearer s\xc3\xa9same"}).status_code == 200
    assert httpx.get(house.url + "/v1/models", headers={"x-api-key": "sésame".encode()}).status_code == 200
    assert [httpx.get(house.url + path).status_code for path in ("/", "/health", "/ready")] == [200] * 3
    assert httpx.get(house.url + "/metrics").status_code == 401, "counts tell of other clients"
    assert httpx.get(house.url + "/metrics", headers=right).status_code == 200


def test_other_origins_are_not_allowed_unless_named(house, fresh_house):
    asked = {"Origin": "http://other", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in httpx.options(house.url + "/v1/completions", headers=asked).headers
    open_one = fresh_house(origins=("http://other",), keys=ApiKeys.single("k"))
    response = httpx.options(open_one.url + "/v1/completions", headers=asked)
    assert response.headers["access-control-allow-origin"] == "http://other"
    refused = httpx.get(open_one.url + "/v1/models", headers={"Origin": "http://other"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "http://other", "the page must be able to read the refusal"
    stranger = httpx.get(open_one.url + "/health", headers={"Origin": "http://stranger"})
    assert "access-control-allow-origin" not in stranger.headers


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_refused_and_one_at_the_limit_is_not(fresh_house, chunked):
    house = fresh_house(max_body=1000)

    def send(size: int) -> httpx.Response:
        body = b'{"prompt": "say(a)"' + b" " * (size - 20) + b"}"
        assert len(body) == size
        content = iter([body[:500], body[500:]]) if chunked else body
        return httpx.post(house.url + "/v1/completions", content=content, headers=JSON)

    assert send(1000).status_code == 200
    refused = send(1001)
    assert refused.status_code == 413
    assert "1000 bytes" in refused.json()["error"]["message"]
    assert len(house.engine.requests) == 1


def test_models_are_listed_and_found_by_id(house):
    client = house.client()
    assert [model.id for model in client.models.list()] == ["paper-9b", "org/alias"]
    assert client.models.retrieve("paper-9b").model_extra["context_length"] == 30_000
    assert httpx.get(house.url + "/v1/models/org/alias").json()["id"] == "org/alias"


def test_health_and_page(house):
    assert httpx.get(house.url + "/health").json() == {"status": "ok", "running": 3, "waiting": 2, "slots": 4}
    page = httpx.get(house.url + "/")
    assert page.headers["content-type"].startswith("text/html")
    assert "/v1/chat/completions" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert httpx.head(house.url + "/").status_code == 200


def test_metrics_count_what_happened(fresh_house):
    house = fresh_house()
    client = house.client()
    client.completions.create(model="m", prompt="say(abcd)")
    list(client.chat.completions.create(model="m", messages=[{"role": "user", "content": "say(ab)"}], stream=True))
    httpx.post(house.url + "/v1/completions", json={"prompt": "x", "n": 0})
    httpx.get(house.url + "/nowhere")
    httpx.get(house.url + "/v1/models/none")
    page = set(httpx.get(house.url + "/metrics").text.splitlines())
    finished = list(house.engine.finished.values())
    assert {
        'rekindle_requests_total{route="/v1/completions",status="200"} 1.0',
        'rekindle_requests_total{route="/v1/completions",status="400"} 1.0',
        'rekindle_requests_total{route="/v1/chat/completions",status="200"} 1.0',
        'rekindle_requests_total{route="/v1/models/{id}",status="404"} 1.0',
        'rekindle_requests_total{route="other",status="404"} 1.0',
        f"rekindle_prompt_tokens_total {sum(f.prompt_tokens for f in finished):.1f}",
        f"rekindle_computed_tokens_total {sum(f.cache.computed for f in finished):.1f}",
        f'rekindle_draft_tokens_total{{outcome="proposed"}} {sum(f.draft.proposed for f in finished):.1f}',
        f'rekindle_draft_tokens_total{{outcome="accepted"}} {sum(f.draft.accepted for f in finished):.1f}',
        f"rekindle_draft_blocks_total {sum(f.draft.blocks for f in finished):.1f}",
        f'rekindle_restored_tokens_total{{tier="ram"}} {sum(f.cache.restored_from["ram"] for f in finished):.1f}',
        f'rekindle_restored_tokens_total{{tier="disk"}} {sum(f.cache.restored_from["disk"] for f in finished):.1f}',
        "rekindle_generated_tokens_total 8.0",
        "rekindle_time_to_first_token_seconds_count 2.0",
        "rekindle_time_per_token_seconds_count 4.0",
        "rekindle_running 3.0",
        "rekindle_queue_length 2.0",
        'rekindle_pages{state="used"} 3.0',
        'rekindle_engine_tokens_total{how="restored"} 2000.0',
        'rekindle_steps_total{how="recorded"} 70.0',
        'rekindle_expert_layers_total{way="cache and cpu"} 40.0',
        'rekindle_page_moves_total{how="out"} 5.0',
        'rekindle_slabs_total{how="late"} 6.0',
        "rekindle_expert_swaps_total 2.0",
    } <= page


def test_the_servers_own_defaults_apply_where_a_request_is_silent(fresh_house):
    house = fresh_house(card=ModelCard(Sampling(temperature=0.6, top_k=20), max_tokens=3))
    answer = house.client().completions.create(model="m", prompt="say(abcdef)", temperature=0)
    assert answer.choices[0].text == "abc"
    sampling = house.engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k) == (0, 20)


@pytest.mark.parametrize(
    ("name", "bad"),
    [("models", ()), ("context", 1), ("card", ModelCard(max_tokens=0)), ("card", ModelCard(Sampling(top_p=2.0)))],
)
def test_settings_that_make_no_sense_are_refused(name, bad):
    with pytest.raises(BadConfig):
        Settings(**{"models": ("m",), "context": 10, name: bad})


@pytest.mark.parametrize(("name", "bad"), [("max_body", 0), ("bodies", 0), ("body_seconds", 0)])
def test_a_guard_that_lets_nothing_in_is_refused(name, bad):
    with pytest.raises(BadConfig, match=name):
        Guard(**{name: bad})

"""Sampling defaults: a request's own values win, then the server's user, the model's file, its card."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from rekindle.api.cards import CAUTIOUS, ModelCard, card_of, names_in
from rekindle.engine.types import Sampling


@pytest.mark.parametrize(
    ("name", "thinking", "direct"),
    [
        ("Qwen3.8-27B", (1.0, 0.95, 20, 0.0), (0.7, 0.8, 20, 1.5)),
        ("Qwen3.6-35B-A3B-Q4_K_M", (1.0, 0.95, 20, 0.0), (0.7, 0.8, 20, 1.5)),
        ("qwen3_5-9b", (0.6, 0.95, 20, 0.0), (0.7, 0.8, 20, 1.5)),
        ("Qwen3-0.6B", (0.6, 0.95, 20, 0.0), (0.7, 0.8, 20, 0.0)),
        ("SmolLM2-135M-Instruct", (0.0, 1.0, 0, 0.0), (0.0, 1.0, 0, 0.0)),
        ("SmolLM2-1.7B-Instruct", (0.2, 0.9, 0, 0.0), (0.2, 0.9, 0, 0.0)),
        ("my-own", (0.7, 0.95, 0, 0.0), (0.7, 0.95, 0, 0.0)),
    ],
)
def test_a_model_gets_what_its_publisher_recommends(name: str, thinking: Any, direct: Any) -> None:
    card = card_of({}, [name])
    for sampling, expected in ((card.of(thinks=True), thinking), (card.of(thinks=False), direct)):
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.presence_penalty) == expected


@pytest.mark.parametrize("name", ["Qwen3-4B-Instruct-2507", "Qwen3-Coder-30B-A3B"])
def test_a_model_that_cannot_think_is_never_sampled_as_if_it_did(name: str) -> None:
    card = card_of({}, [name], thinks=False)
    assert card.of(thinks=True) == card.of(thinks=False) == card_of({}, [name]).direct
    file = {"general.sampling.temp": 0.25}
    assert card_of(file, [name], thinks=False).of(thinks=False).temperature == 0.25, "the file wins"


def test_the_file_wins_over_the_card_and_the_user_over_both() -> None:
    file = {"general.sampling.temp": 0.30000001192092896, "general.sampling.top_k": 7, "general.name": "Qwen3.6 27B"}
    card = card_of(file, names_in(file))
    assert (card.sampling.temperature, card.sampling.top_k, card.sampling.top_p) == (0.3, 7, 0.95)
    assert card.direct == card_of({}, ["qwen3.6"]).direct, "a file says how the model answers by itself"
    assert card.origin == "temperature, top_k from the model's file, else the card of Qwen3.6"
    given = card_of(file, names_in(file), {"temperature": 0.1, "max_tokens": 500})
    assert given.direct is not None
    assert (given.sampling.temperature, given.direct.temperature, given.max_tokens) == (0.1, 0.1, 500)
    assert given.origin.startswith("max_tokens, temperature from the presets file, else ")
    assert given.sampling.top_k == 7
    derived = {"general.name": "My Coder", "general.base_model.0.name": "Qwen3.6 27B"}
    assert card_of(derived, names_in(derived)).origin == "the card of Qwen3.6"


@pytest.mark.parametrize("bad", [float("nan"), -1.0, 9.0, "warm", [1.0]])
def test_a_file_that_recommends_nonsense_is_not_heeded(bad: Any) -> None:
    assert card_of({"general.sampling.temp": bad}, ["my-own"]).sampling == CAUTIOUS


def test_a_template_that_closes_the_thinking_gets_the_defaults_for_that(fresh_house: Any) -> None:
    card = ModelCard(Sampling(temperature=0.9), Sampling(temperature=0.4, presence_penalty=1.5), origin="a test")
    house = fresh_house(card=card)

    def temperature(said: str, **fields: Any) -> float:
        messages = [{"role": "user", "content": said}]
        continued = {"messages": messages, "add_generation_prompt": False, **fields}
        assert httpx.post(house.url + "/v1/chat/completions", json=continued).status_code == 200
        return float(house.engine.requests[-1].sampling.temperature)

    assert temperature("say(x) <think>") == 0.9
    assert temperature("say(x) <think></think>\n\n") == 0.4
    assert temperature("say(x) </think>", temperature=1.5) == 1.5
    shown = httpx.get(house.url + "/v1/models/paper-9b").json()["defaults"]
    direct = {"temperature": 0.4, "presence_penalty": 1.5}
    assert shown == {"temperature": 0.9, "without_thinking": direct, "max_tokens": None, "from": "a test"}

"""One value for thinking and effort, whatever a dialect calls it, mapped to what the template takes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from rekindle.api.thinking import nearest

from .conftest import House


def post(house: House, path: str, **fields: Any) -> Any:
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]} | fields
    answer = httpx.post(house.url + path, json=body)
    assert answer.status_code == 200, answer.text
    given = house.text.rendered[-1]
    options = {name: given[name] for name in ("enable_thinking", "reasoning_effort") if name in given}
    return options, answer.json()["rekindle"]["ignored_fields"]


MESSAGES, CHAT = "/v1/messages", "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "fields", "options"),
    [
        (MESSAGES, {}, {"enable_thinking": False}),
        (MESSAGES, {"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        (MESSAGES, {"thinking": {"type": "adaptive", "budget_tokens": 0}}, {}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2000}}, {"enable_thinking": True}),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 0}}, {"enable_thinking": False}),
        (MESSAGES, {"output_config": {"effort": "high"}}, {"enable_thinking": False}),
        (
            MESSAGES,
            {"output_config": {"effort": "high"}, "thinking": {"type": "adaptive"}},
            {"reasoning_effort": "medium"},
        ),
        (CHAT, {}, {}),
        (CHAT, {"reasoning_effort": "none"}, {"enable_thinking": False}),
        (CHAT, {"reasoning_effort": "minimal"}, {"reasoning_effort": "low"}),
        (CHAT, {"reasoning_effort": "max"}, {"reasoning_effort": "xhigh"}),
        (CHAT, {"reasoning_effort": "x-high"}, {"reasoning_effort": "xhigh"}),
        (CHAT, {"enable_thinking": False, "reasoning_effort": "high"}, {"enable_thinking": False}),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}, {"enable_thinking": True}),
    ],
)
def test_every_way_to_say_it_comes_to_what_the_template_takes(
    house: House, path: str, fields: Any, options: Any
) -> None:
    assert post(house, path, **fields) == (options, [])


def test_what_the_template_does_not_take_is_named_and_never_an_error(fresh_house: Any) -> None:
    house = fresh_house()
    house.text.options, house.text.efforts = frozenset(), ()
    thinking = {"type": "enabled", "budget_tokens": 2000}
    assert post(house, MESSAGES, thinking=thinking, output_config={"effort": "max"}) == (
        {},
        ["thinking", "output_config.effort"],
    )
    assert post(house, MESSAGES) == ({}, []), "no thinking was asked for, and there is none"
    assert post(house, CHAT, reasoning_effort="high") == ({}, ["reasoning_effort"])
    assert post(house, CHAT, chat_template_kwargs={"enable_thinking": True})[1] == [
        "chat_template_kwargs.enable_thinking"
    ]


def test_a_word_that_is_no_effort_is_named(house: House) -> None:
    assert post(house, CHAT, reasoning_effort="heroic") == ({}, ["reasoning_effort"])


def test_the_next_lower_of_two_efforts_that_are_as_near_is_taken() -> None:
    assert nearest("high", ("low", "medium", "xhigh")) == "medium"
    assert nearest("minimal", ("low", "medium", "xhigh")) == "low"
    assert nearest("max", ("low", "medium", "high")) == "high"

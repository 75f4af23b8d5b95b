"""What a finished chat answer leaves behind, over the paper engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest

from rekindle.api.keys import ApiKeys, Client
from rekindle.engine.types import Request

END = 256  # the paper model's stop token
PATIENCE = 20.0  # seconds a test waits for what must happen
House = Any  # the paper house of conftest.py


@pytest.fixture
def quiet_house(fresh_house: Callable[..., House]) -> Callable[..., House]:
    """A server whose engine has nobody waiting."""

    def open_one(waiting: int = 0, **settings: Any) -> House:
        house = fresh_house(**settings)
        status = replace(house.engine.status(), waiting=waiting)
        house.engine.status = lambda: status
        return house

    return open_one


def ask(house: House, question: str, key: str = "none", **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": question}], **fields}
    headers = {"Authorization": f"Bearer {key}"}
    response = httpx.post(f"{house.url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    return response.json() if not fields.get("stream") else {}


def submitted(house: House) -> Request:
    """The next request that reaches the engine."""
    assert house.engine.submitted.acquire(timeout=PATIENCE), "nothing was submitted"
    return house.engine.requests[-1 - house.engine.submitted._value]


def wait_for_outcome(house: House, outcome: str, key: str = "none") -> None:
    headers = {"Authorization": f"Bearer {key}"}
    deadline = time.monotonic() + PATIENCE
    line = f'rekindle_preparations_total{{outcome="{outcome}"}} 1.0'
    while line not in (page := httpx.get(f"{house.url}/metrics", headers=headers).text):
        assert time.monotonic() < deadline, [it for it in page.splitlines() if "preparations" in it]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_remembered_before_its_client_can_send_it_back(
    quiet_house: Callable[..., House], stream: bool
) -> None:
    house = quiet_house()
    ask(house, "say(Hé!)", stream=stream)
    ((prompt, ids, message),) = house.text.remembered
    assert prompt == house.engine.requests[0].prompt
    assert ids == (*"Hé!".encode(), END)
    assert message == {"role": "assistant", "content": "Hé!"}


@pytest.mark.parametrize("stream", [False, True])
def test_after_an_answer_the_prompt_that_comes_next_is_prepared(
    quiet_house: Callable[..., House], stream: bool
) -> None:
    house = quiet_house()
    ask(house, "[dropped] say(Hello there!)", stream=stream)
    assert not submitted(house).background
    prepared = submitted(house)
    assert bytes(prepared.prompt.tokens).decode() == "user:[dropped] say(Hello there!)|assistant:…|"
    assert (prepared.background, prepared.max_tokens) == (True, 0)
    wait_for_outcome(house, "prepared")


def test_the_state_that_is_prepared_lies_in_the_name_space_of_its_client(quiet_house: Callable[..., House]) -> None:
    house = quiet_house(keys=ApiKeys({"bob's long secret": Client("bob", "team")}))
    ask(house, "[dropped] say(Hello there!)", key="bob's long secret")
    assert [submitted(house).namespace for _ in range(2)] == ["team", "team"]
    wait_for_outcome(house, "prepared", key="bob's long secret")


def test_a_few_tokens_behind_the_answers_own_state_are_not_prepared(quiet_house: Callable[..., House]) -> None:
    house = quiet_house()
    ask(house, "say(Hello there, how do you do?)")
    wait_for_outcome(house, "needless")
    assert len(house.engine.requests) == 1


@pytest.mark.parametrize(
    ("question", "waiting", "settings", "outcome"),
    [
        ("[dropped] hi", 1, {}, "dropped"),
        ("[fixed] hi", 0, {}, "refused"),
        ("[wrong] hi", 0, {}, "failed"),
        ("[dropped] hi", 0, {"context": len("user:[dropped] hi|assistant:") + 2}, "impossible"),
    ],
)
def test_what_cannot_or_need_not_be_prepared_is_counted_and_the_answer_is_not_hurt(
    quiet_house: Callable[..., House], question: str, waiting: int, settings: dict[str, Any], outcome: str
) -> None:
    house = quiet_house(waiting, **settings)
    assert ask(house, question)["choices"][0]["message"]["content"] == "ok"
    wait_for_outcome(house, outcome)
    assert len(house.engine.requests) == 1


def test_behind_a_call_that_the_limit_cuts_off_no_prompt_is_prepared(quiet_house: Callable[..., House]) -> None:
    """What its client will send is unknown: it may send the call, mend it or leave it out."""
    house = quiet_house()
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    call = '<tool_call>{"name": "now", "arguments": {"zone": "Rome"}}</tool_call>'
    answer = ask(house, f"[dropped] say({call})", tools=[tool], max_tokens=50)
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "now"
    wait_for_outcome(house, "impossible")
    assert len(house.engine.requests) == 1


def test_a_prompt_gives_way_to_the_token_loop_before_it_is_rendered(
    quiet_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch
) -> None:
    gave, house = list[str](), quiet_house()
    monkeypatch.setattr("rekindle.api.app.give_way", lambda: gave.append(threading.current_thread().name))
    ask(house, "say(hello)")
    assert len(gave) == 1 and gave != [threading.main_thread().name]


def test_what_would_be_prepared_while_the_server_stops_is_dropped_without_a_word(
    quiet_house: Callable[..., House], caplog: pytest.LogCaptureFixture
) -> None:
    house = quiet_house()
    ask(house, "[dropped][stopping] hi")
    wait_for_outcome(house, "dropped")
    assert not caplog.records


def test_preparing_can_be_switched_off_and_needs_one_answer_to_one_question(quiet_house: Callable[..., House]) -> None:
    house = quiet_house(prepare_next=False)
    ask(house, "[dropped] hi")
    assert len(house.text.remembered) == 1, "remembering has a switch of its own"
    several = quiet_house()
    ask(several, "[dropped] hi", n=2)
    ask(several, "[dropped] hi", add_generation_prompt=False)
    assert len(several.text.remembered) == 3
    for each in (house, several):
        assert "rekindle_preparations_total{" not in httpx.get(f"{each.url}/metrics").text
        assert not any(request.background for request in each.engine.requests)


def test_an_answer_whose_client_left_is_neither_remembered_nor_followed(quiet_house: Callable[..., House]) -> None:
    house = quiet_house()
    body = {"messages": [{"role": "user", "content": "[dropped][drip] say(a long answer)"}], "stream": True}
    with httpx.stream("POST", f"{house.url}/v1/chat/completions", json=body, timeout=PATIENCE) as response:
        next(response.iter_lines())
    assert house.engine.cancelled.get(timeout=PATIENCE) == house.engine.requests[0].id
    ask(house, "[dropped] hi")
    assert [message["content"] for _, _, message in house.text.remembered] == ["ok"]


def test_a_conversation_has_one_preparation_and_the_newest_wins(quiet_house: Callable[..., House]) -> None:
    house = quiet_house()
    ask(house, "[stuck] say(one)")
    assert not submitted(house).background
    first = submitted(house)
    ask(house, "[stuck] say(one)")
    assert not submitted(house).background
    second = submitted(house)
    assert first.background and second.background
    assert house.engine.cancelled.get(timeout=PATIENCE) == first.id
    ask(house, "[stuck] another conversation")
    submitted(house)
    assert submitted(house).background
    assert house.engine.cancelled.empty(), "another conversation's is left alone"


def test_preparations_never_outnumber_the_slots(quiet_house: Callable[..., House]) -> None:
    house = quiet_house()
    for n in range(house.engine.status().slots):
        ask(house, f"[stuck] {n}")
        submitted(house)
        assert submitted(house).background
    ask(house, "[stuck] one more")
    wait_for_outcome(house, "dropped")

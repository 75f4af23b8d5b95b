"""Answers whose tokens are drawn by recorded draws, and when clients get them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine.test_grammar import LONG, PENALISED, STOPS, alone, ask, prompt, rules
from support.snapshot_lab import Answer, Lab

from rekindle.engine.drafting import Drafts
from rekindle.engine.flight import Flight
from rekindle.engine.recorded_draws import RecordedDraws
from rekindle.engine.types import Sampling
from rekindle.speculative.lookup import PromptLookup

CARD = Sampling(temperature=1.0, top_k=20, top_p=0.8, presence_penalty=1.5, seed=3)
WIDE_OPEN = Sampling(temperature=0.9, top_p=0.9, frequency_penalty=0.3, seed=4)


@pytest.fixture(scope="module")
def lab(make_tiny: Any) -> Lab:
    return Lab(make_tiny("dense"))


def recording(lab: Lab, **settings: Any) -> tuple[Any, list[int]]:
    """An engine that replays draws as a GPU does, by running them again; and the replays."""
    replays = list[int]()

    def record(step: Any) -> Any:
        def replay() -> None:
            replays.append(1)
            step()

        return replay

    engine = lab.engine(ram=0, **settings)
    vocab = lab._oracle.model.spec.drawable or lab._oracle.model.spec.vocab
    engine._launcher.draw = RecordedDraws(record, torch.device("cpu"), vocab, 4)  # type: ignore[method-assign]
    return engine, replays


@pytest.mark.parametrize("settings", [{"async_steps": 1}, {"drafts": Drafts("lookup", PromptLookup, None)}])
def test_recorded_draws_change_no_token(lab: Lab, settings: dict[str, Any]) -> None:
    """Of several answers at once: with penalties, with a grammar, running ahead, with drafts."""
    asked = [(CARD, None), (PENALISED, rules("[0-9]{12}")), (CARD, rules(LONG))]
    expected = [alone(lab, prompt(seed), each[1], each[0]).tokens[:12] for seed, each in enumerate(asked)]
    engine, replays = recording(lab, **settings)
    answers = [
        ask(engine, prompt(seed), grammar, sampling, max_tokens=12) for seed, (sampling, grammar) in enumerate(asked)
    ]
    assert [answer.tokens for answer in answers] == expected
    engine.stop()
    assert len(replays) >= 6


def test_recorded_draws_without_top_k_change_no_token(lab: Lab) -> None:
    expected = alone(lab, prompt(), None, WIDE_OPEN).tokens[:8]
    engine, replays = recording(lab, async_steps=1)
    assert ask(engine, prompt(), None, WIDE_OPEN, max_tokens=8).tokens == expected
    engine.stop()
    assert len(replays) >= 7


def test_the_next_draw_is_on_its_way_before_a_client_gets_a_token(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a grammar, which has to know the token first."""
    draws, at_tokens, draw = list[int](), list[int](), Flight.draw

    def noted(self: Flight) -> None:
        if self.drawn is None and self.drawing:
            draws.append(1)
        draw(self)

    monkeypatch.setattr(Flight, "draw", noted)
    engine = lab.engine(ram=0, async_steps=1)
    fields = {"max_tokens": 10, "stop_tokens": STOPS, "rules": rules(LONG)}
    answer = Answer(engine, prompt(), CARD, at_token=lambda _: at_tokens.append(len(draws)), **fields)
    assert len(answer.tokens) == 10
    engine.stop()
    assert all(drawn >= number + 1 for number, drawn in enumerate(at_tokens[1:-1], 2)), at_tokens

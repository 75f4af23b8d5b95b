"""Thinking that has used up its budget is closed by forced tokens, which are tokens of the answer like all others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.paper_drafter import paper_drafts
from support.snapshot_lab import Answer, Lab, RecordingCache, random_tokens

from rekindle.engine.forcing import Forcing, impose
from rekindle.engine.types import Sampling, ThinkingLimit
from rekindle.prompt import Prompt

BEGIN, END, LENGTH = 317, 318, 24
CLOSE = (7, END, 8, 8)
GREEDY, SEEDED = Sampling(temperature=0), Sampling(temperature=1.0, seed=5)
ASKED = Prompt(random_tokens(100, 1))


def limit(budget: int, is_open: bool = True) -> ThinkingLimit:
    return ThinkingLimit(budget, BEGIN, END, CLOSE, is_open)


@pytest.fixture(scope="module")
def lab(make_tiny: Any) -> Lab:
    return Lab(make_tiny("dense"))


def answer(lab: Lab, asked: Prompt, sampling: Sampling, settings: dict[str, Any], **fields: Any) -> list[int]:
    engine = lab.engine(**settings)
    tokens = Answer(engine, asked, sampling, **{"max_tokens": LENGTH, **fields}).tokens
    engine.stop()
    return tokens


def expected(lab: Lab, budget: int, sampling: Sampling) -> list[int]:
    """The thinking, the closing, and what the model says when both are its prompt."""
    thought = answer(lab, ASKED, sampling, {"ram": 0}, max_tokens=budget) if budget else []
    before = (*thought, *CLOSE)
    asked = Prompt((*ASKED.tokens, *before))
    return [*before, *answer(lab, asked, sampling, {"ram": 0}, max_tokens=LENGTH - len(before))]


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("budget", [0, 1, 9])
def test_the_answer_goes_on_behind_the_closing_as_if_the_model_had_written_it(
    lab: Lab, budget: int, sampling: Sampling
) -> None:
    """Step by step, one step ahead, and with drafters that are right, wrong or both."""
    wanted = expected(lab, budget, sampling)
    text = [*ASKED.tokens, *wanted]
    for ahead in (0, 1):
        assert answer(lab, ASKED, sampling, {"async_steps": ahead}, thinking=limit(budget)) == wanted
        for right in (1.0, 0.0, 0.7):
            settings = {"async_steps": ahead, "drafts": paper_drafts(right, text)}
            assert answer(lab, ASKED, sampling, settings, thinking=limit(budget)) == wanted


def test_forced_tokens_are_in_the_snapshot_and_a_whole_hit_is_forced_too(lab: Lab) -> None:
    engine = lab.engine()
    first = Answer(engine, ASKED, GREEDY, max_tokens=LENGTH, thinking=limit(0)).tokens
    again = Answer(engine, ASKED, GREEDY, max_tokens=LENGTH, thinking=limit(0))
    assert again.finished.cache.computed == 0
    assert again.tokens == first
    longer = Prompt((*ASKED.tokens, *first, *random_tokens(9, 6)))
    restored = Answer(engine, longer, GREEDY, max_tokens=2).finished.cache.restored
    engine.stop()
    assert restored == 100 + LENGTH - 1, "all of it but the last token, which is in no state"
    assert isinstance(engine.prefixes, RecordingCache)
    snapshot = next(each for each in engine.prefixes.seen if each.position == restored)
    assert snapshot.tokens[100:104].tolist() == list(CLOSE)


def test_thinking_that_ends_by_itself_is_let_be(lab: Lab) -> None:
    plain = answer(lab, ASKED, GREEDY, {"ram": 0})
    by_itself = ThinkingLimit(4, BEGIN, plain[2], CLOSE, True)
    assert plain[2] not in plain[:2]
    assert answer(lab, ASKED, GREEDY, {}, thinking=by_itself) == plain


def test_thinking_that_the_answer_opens_is_counted_from_there() -> None:
    forcing = Forcing(limit(2, is_open=False))
    for token in (5, 6, BEGIN, 1):
        forcing.note(token)
        assert forcing.at(0) is None
    forcing.note(2)
    assert [forcing.at(ahead) for ahead in range(5)] == [*CLOSE, None]
    for token in CLOSE:
        forcing.note(token)
    assert (forcing.at(0), forcing.room) == (None, None)


def test_what_is_forced_is_known_unless_a_pending_token_may_use_up_the_budget() -> None:
    forcing = Forcing(limit(3))
    assert [forcing.is_known(ahead) for ahead in range(5)] == [True, True, True, False, False]
    unopened = Forcing(limit(0, is_open=False))
    assert [unopened.is_known(ahead) for ahead in (0, 1)] == [True, False], "the pending one may open the thinking"
    assert Forcing().is_known(1)


def test_a_row_without_a_token_is_given_none() -> None:
    drawn = torch.tensor([4, -1, 6, 7])
    assert impose(drawn, [None, 9, 9, None]).tolist() == [4, -1, 9, 7]

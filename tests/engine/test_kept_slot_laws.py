"""Conversations end, go on and branch, alone and beside others, while kept slots are given up at any moment: every
answer is that of a cold run, and nothing leaks. REKINDLE_FULL=300 draws that many lives, at random.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.snapshot_lab import PLENTY, Answer, Lab, check_slots, random_tokens

from rekindle.engine.drafting import NO_DRAFTS, Drafts
from rekindle.engine.types import Sampling, Token
from rekindle.prompt import Boundary, BoundaryKind, Prompt
from rekindle.spec import Span
from rekindle.speculative.lookup import PromptLookup
from rekindle.stages import LocalStage

FULL = int(os.environ.get("REKINDLE_FULL", "0"))
ROUNDING = 1e-4  # in logits and their logarithms, between a state born in decode and a cold prefill
SCORED = Sampling(temperature=0, logprobs=0)
POOLS: dict[str, dict[str, Any]] = {
    "full": {"pages": 64},
    "short of pages": {"pages": 14},
    "small": {"pages": 7, "pool": {"host_pages": 40}},
    "sparse": {"pages": 7, "pool": {"host_pages": 60, "kv_mode": "sparse"}},
}
BOUNDED = settings(
    max_examples=FULL or 10,
    derandomize=not FULL,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if FULL else [])],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass(frozen=True)
class Turn:
    """One request of a conversation."""

    conversation: int
    sent_again: float  # share of what was said before; 1.0 appends
    new: int  # tokens; 0 sends the very same again
    answer: int  # tokens
    cut: float  # a boundary, as a share of the prompt
    given_up: int  # kept slots that are given up just before it is read
    namespace: str


TURNS = st.builds(
    Turn,
    conversation=st.integers(0, 2),
    sent_again=st.sampled_from([1.0, 1.0, 1.0, 0.6]),
    new=st.integers(0, 90),
    answer=st.integers(0, 5),
    cut=st.floats(0.1, 1.0),
    given_up=st.sampled_from([0, 0, 0, 1, 4]),
    namespace=st.sampled_from(["", "", "", "other"]),
)
LIVES = st.fixed_dictionaries(
    {
        "waves": st.lists(st.lists(TURNS, min_size=1, max_size=3), min_size=2, max_size=5),  # a wave comes at once
        "pool": st.sampled_from(list(POOLS)),
        "ram": st.sampled_from([0, 200_000, PLENTY]),
        "slots": st.integers(1, 3),
        "split": st.booleans(),
        "drafts": st.booleans(),
        "crowded": st.booleans(),  # there is seldom room for a capture, and states wait in the kept slots
    }
)


@pytest.fixture(scope="module", params=["dense", "moe"])
def lab(request: Any, make_tiny: Any) -> Lab:
    return Lab(make_tiny(request.param))


class Life:
    def __init__(self, lab: Lab, life: dict[str, Any]) -> None:
        spans = (Span(0, 3), Span(3, 8)) if life["split"] else ()
        drafts = Drafts("lookup", PromptLookup, None) if life["drafts"] else NO_DRAFTS
        self.pool = POOLS[life["pool"]]
        self.engine = lab.engine(
            ram=life["ram"], spans=spans, slots=life["slots"], drafts=drafts, context=800, keeps=True, **self.pool
        )
        self.said: dict[int, tuple[int, ...]] = {}
        if life["crowded"]:
            asked = count()
            for stage in self.engine.pipeline.stages:
                stage.has_room_for_capture = lambda others=0: next(asked) % 5 == 0  # type: ignore[union-attr]

    def prompt(self, turn: Turn, seed: int) -> Prompt:
        before = self.said.get(turn.conversation, ())
        tokens = (*before[: round(len(before) * turn.sent_again)], *random_tokens(turn.new, seed))
        tokens = tokens[:700] or random_tokens(30, seed)
        return Prompt(tokens, (Boundary(max(1, round(turn.cut * len(tokens))), BoundaryKind.MESSAGE),))

    def ask(self, turn: Turn, seed: int) -> tuple[Prompt, Answer]:
        prompt = self.prompt(turn, seed)
        for _ in range(turn.given_up):
            self.engine._inbox.put(self.engine._endings.make_room)
        answer = Answer(self.engine, prompt, SCORED, max_tokens=turn.answer, namespace=turn.namespace)
        return prompt, answer

    def stop(self) -> None:
        check_slots(self.engine)
        self.engine.stop()
        for stage in self.engine.pipeline.stages:
            assert isinstance(stage, LocalStage)
            stage.check()
            assert stage.pages().used == 0
        assert self.engine.status().cache.entries["device"] == 0
        assert self.engine.status().broken is None


def rows(answer: Answer) -> list[tuple[int, float]]:
    tokens = (event for event in answer.wait().events if isinstance(event, Token))
    return [(event.token, event.logprob.logprob) for event in tokens if event.logprob is not None]


@BOUNDED
@given(life=LIVES)
def test_a_kept_slot_changes_no_answer_and_is_never_lost(lab: Lab, life: dict[str, Any]) -> None:
    lived, seed = Life(lab, life), 0
    sparse = life["pool"] == "sparse"
    cold = lab.engine(ram=0, slots=1, context=800, **(lived.pool if sparse else {}))
    for wave in life["waves"]:
        asked = []
        for turn in wave:
            seed += 1
            asked.append((turn, *lived.ask(turn, seed)))
        for turn, prompt, answer in asked:
            expected, found = rows(Answer(cold, prompt, SCORED, max_tokens=turn.answer)), rows(answer)
            assert [token for token, _ in found] == [token for token, _ in expected], answer.events[-1]
            assert all(abs(a - b) < ROUNDING for (_, a), (_, b) in zip(found, expected, strict=True))
            cache = answer.finished.cache
            assert cache.restored + cache.computed == len(prompt.tokens)
            lived.said[turn.conversation] = (*prompt.tokens, *answer.tokens)
    lived.stop()
    cold.stop()

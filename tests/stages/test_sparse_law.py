"""Sparse mode's law: what a row attends is a function of the tokens and of the pool alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.answers import Answer

from rekindle.engine.drafting import Drafts
from rekindle.engine.engine import Engine, EngineSettings
from rekindle.engine.types import CacheReport
from rekindle.prefix import PrefixCache, local_tiers
from rekindle.prompt import Boundary, BoundaryKind, Prompt
from rekindle.spec import Span
from rekindle.speculative.lookup import PromptLookup
from rekindle.stages import LocalStage, Pipeline

ONE, TWO = (Span(0, 8),), (Span(0, 4), Span(4, 8))
CONVERSATIONS, TURNS, ANSWER = 6, 4, 20
RNG = np.random.default_rng(17)
MESSAGES = [
    [tuple(RNG.integers(0, 320, n).tolist()) for n in RNG.integers(60, 300, TURNS)] for _ in range(CONVERSATIONS)
]


def make_stages(tiny: Any, spans: tuple[Span, ...], **options: Any) -> list[LocalStage]:
    """Every row attends at most 448 tokens, whatever the places of its stage."""
    shared = {"slots": 2, "pages": 7, "host_pages": 80, "kv_mode": "sparse", "attended": 7, **options}
    return [tiny.stage(span, **shared) for span in spans]


def turns(
    stages: list[LocalStage],
    cache: PrefixCache,
    prompts: list[Prompt] | None = None,
    grid: int = 128,
    draft: bool = False,
) -> tuple[list[Prompt], list[tuple[list[int], CacheReport]]]:
    """Every turn of every conversation: its prompt, its answer, and what was cached. Or the same prompts once more."""
    drafts = Drafts("lookup", PromptLookup, None) if draft else Drafts()
    settings = EngineSettings(context=4096, grid=grid, drafts=drafts)
    engine = Engine(Pipeline(stages), cache, settings).start()
    asked, answers = list[Prompt](), list[tuple[list[int], CacheReport]]()
    for messages in MESSAGES:
        tokens, edges = tuple[int, ...](), list[Boundary]()
        for message in messages:
            tokens += message
            edges.append(Boundary(len(tokens), BoundaryKind.MESSAGE))
            prompt = Prompt(tokens, tuple(edges)) if prompts is None else prompts[len(asked)]
            answer = Answer(engine, prompt, max_tokens=ANSWER, patience=120)
            asked.append(prompt)
            answers.append((answer.tokens, answer.finished.cache))
            tokens += tuple(answer.tokens)
    engine.stop()
    for stage in stages:
        stage.check()
    return asked, answers


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_no_turn_of_a_conversation_differs_hit_or_cold_on_one_stage_or_two(make_tiny: Any, kind: str) -> None:
    tiny, cache, none = make_tiny(kind), PrefixCache(local_tiers(1 << 28)), PrefixCache(local_tiers(0))
    prompts, restored = turns(make_stages(tiny, ONE), cache)
    assert sum(cache.restored > 0 for _, cache in restored) == CONVERSATIONS * (TURNS - 1)
    assert sum(cache.sparse for _, cache in restored) >= 2 * CONVERSATIONS
    others = {
        "cold, in other chunks": turns(make_stages(tiny, ONE), none, prompts, grid=192),
        "two stages with unlike pools, with a drafter": turns(
            [*make_stages(tiny, TWO[:1], pages=9), *make_stages(tiny, TWO[1:], rewind_rows=17)],
            PrefixCache(local_tiers(1 << 28)),
            prompts,
            draft=True,
        ),
        "restarted on another split": turns(make_stages(tiny, TWO), cache, prompts),
    }
    again = others["restarted on another split"][1]
    assert all(len(prompt.tokens) <= cache.restored for prompt, (_, cache) in zip(prompts, again, strict=True))
    for name, (_, answers) in others.items():
        differing = [i for i, (a, b) in enumerate(zip(restored, answers, strict=True)) if a[0] != b[0]]
        assert not differing, f"{name}: {len(differing)} of {len(restored)} turns differ"
